from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_trainer.core import filesystem
from tests.faults.disks import CountingDisk, FailingDisk, installed


@pytest.fixture
def open_umask() -> Iterator[None]:
    previous = os.umask(0)
    yield
    os.umask(previous)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_replaced_in_one_step_and_synced_with_its_name(tmp_path: Path) -> None:
    disk = CountingDisk()
    with installed(disk):
        filesystem.write_file_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert disk.operations == ["create", "write", "sync", "rename", "sync_directory"]


def test_a_folder_is_published_with_its_names_synced_before_and_after(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    disk = CountingDisk()
    with installed(disk):
        filesystem.publish(tmp_path / "temporary", tmp_path / "final")
    assert disk.operations == ["sync_directory", "rename", "sync_directory"]


def test_folders_lose_their_names_durably_before_any_of_their_files(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "file").touch()
    disk = CountingDisk()
    with installed(disk):
        filesystem.remove_own(folders, filesystem.files_in)
    assert disk.operations == ["rename", "rename", "sync_directory", "remove_tree", "remove_tree"]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("at", range(4))
def test_a_failed_replacement_leaves_the_old_file_and_no_temporary(tmp_path: Path, at: int) -> None:
    filesystem.write_file_atomic(tmp_path / "a", b"old")
    with (
        installed(FailingDisk(at, errno.EIO, times=1)),
        pytest.raises(OSError, match="Input/output"),
    ):
        filesystem.write_file_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_directory_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with filesystem.new_directory(tmp_path / "d") as temporary:
        filesystem.create_file(temporary / "a", [b"1", b"2"])
        assert not (tmp_path / "d").exists()
        filesystem.publish(temporary, tmp_path / "d")
    assert (tmp_path / "d" / "a").read_bytes() == b"12"

    def fail_in_the_middle() -> None:
        with filesystem.new_directory(tmp_path / "e") as temporary:
            filesystem.create_file(temporary / "a", [b"1"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_middle()
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


@pytest.mark.usefixtures("open_umask")
def test_what_is_written_can_be_read_by_others_and_changed_by_none(tmp_path: Path) -> None:
    with filesystem.new_directory(tmp_path / "d") as temporary:
        filesystem.create_file(temporary / "a", [b""])
        filesystem.publish(temporary, tmp_path / "d")
    filesystem.AppendFile(tmp_path / "log").close()
    assert mode(tmp_path / "d") == 0o755
    assert mode(tmp_path / "d" / "a") == mode(tmp_path / "log") == 0o644


def test_a_file_is_not_created_through_a_symlink_or_over_another(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(FileExistsError):
            filesystem.create_file(tmp_path / name, [b"x"])
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory", "device", "too large", "missing"])
def test_only_regular_files_within_the_limit_are_read(tmp_path: Path, kind: str) -> None:
    """Fault (Malice): symlink, FIFO, device or folder instead of a file -> runs and all commands
    that inspect them refuse it at once, without waiting for data
    """
    path = tmp_path / "a"
    if kind == "symlink":
        (tmp_path / "b").touch()
        path.symlink_to("b")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "too large":
        path.write_bytes(b"12345")
    with pytest.raises(OSError, match=str(path)):
        filesystem.read_file(path, max_bytes=4)


def test_a_sweep_takes_leftovers_and_nothing_else(tmp_path: Path) -> None:
    """Fault (Crash during a save): temporary files left by crashes -> deleted by name at the next
    start, under the run's lock; nothing else is touched
    """
    ours = [
        f"{name}-12-1700000000000000000"
        for name in (".tmp-step-1", ".del-step-1", ".tmp-best.json")
    ]
    theirs = [
        ".tmp",
        ".tmp-x",
        "tmp-a-1-2",
        "step-1",
        ".git",
        f"{ours[0]}.keep",
        ".tmp-notes-2024-01",
    ]
    for name in ours[:2] + theirs[:3]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    for name in ours[2:] + theirs[3:]:
        (tmp_path / name).touch()
    filesystem.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(theirs)


def test_a_sweep_does_not_follow_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    filesystem.temporary_path(tmp_path / "a", "tmp").symlink_to(tmp_path / "precious")
    filesystem.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    assert (tmp_path / "precious" / "file").exists()


def test_an_append_that_fails_leaves_no_part_of_its_line(tmp_path: Path) -> None:
    file = filesystem.AppendFile(tmp_path / "log")
    file.append(b"one\n")
    with installed(FailingDisk(0, errno.ENOSPC, times=1)), pytest.raises(OSError, match="No space"):
        file.append(b"two\n")
    file.append(b"three\n")
    assert (tmp_path / "log").read_bytes() == b"one\nthree\n"
    file.truncate(4)
    file.append(b"four\n")
    file.sync()
    assert file.size == 9
    file.close()
    assert (tmp_path / "log").read_bytes() == b"one\nfour\n"
