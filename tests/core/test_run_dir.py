from __future__ import annotations

import errno
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from accel_trainer.core.errors import ExitCode, OutputError
from accel_trainer.core.run_dir import prepare_directory, refuse_strange_entries, run_lock
from tests.workload import make_config, train

fcntl = pytest.importorskip("fcntl")

HOLDER = """
import os, sys
from pathlib import Path
from accel_trainer.core.run_dir import run_lock
lock = run_lock(Path(sys.argv[1]))
lock.__enter__()
child = os.fork()
if child == 0:
    os.close(1)
print(os.getpid(), child, flush=True)
import time
time.sleep(60)
"""


def test_a_second_run_learns_who_holds_the_lock_until_its_process_is_dead(tmp_path: Path) -> None:
    """Fault (Signals and processes): the process that held the lock is dead, but its child is alive
    -> the lock is free at once
    """
    path = tmp_path / "run.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        _, orphan = map(int, holder.stdout.readline().split())
        try:
            with pytest.raises(
                OutputError, match=rf"LOCKED.*pid {holder.pid} on .* since 20"
            ) as raised:
                run_lock(path).__enter__()
            assert raised.value.exit_code == ExitCode.OUTPUT
            os.kill(holder.pid, signal.SIGKILL)
            holder.wait()
            # Its forked worker is still alive and must not hold the lock.
            with run_lock(path):
                pass
        finally:
            os.kill(orphan, signal.SIGKILL)


def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", fail)
    with pytest.raises(OutputError, match="NO_LOCKS"):
        run_lock(tmp_path / "run.lock").__enter__()


@pytest.mark.parametrize("name", ["with space", "ünï☃", "-leading", "a" * 255, "x/y/z", "a/../b"])
def test_unusual_names_are_fine_and_come_back_resolved(tmp_path: Path, name: str) -> None:
    """Fault (Disk): unusual names -> Unicode and spaces work; control characters are refused"""
    folder = prepare_directory(tmp_path / name)
    assert folder == (tmp_path / name).resolve()
    assert list(folder.iterdir()) == []
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755 & ~umask


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("a\nb", "OUT_DIR_NAME"),
        ("a\0b", "OUT_DIR_NAME"),
        ("a" * 256, "OUT_DIR_NOT_WRITABLE.*File name too long"),
        ("a" * 200 + "/", "OUT_DIR_NOT_WRITABLE.*File name too long"),
    ],
    ids=["newline", "nul", "long name", "long path"],
)
def test_impossible_names_are_refused_before_anything_is_made(
    tmp_path: Path, name: str, code: str
) -> None:
    """Fault (Disk): path too long -> exit 73 at the start"""
    path = tmp_path / (name * 30 if name.endswith("/") else name)
    with pytest.raises(OutputError, match=code) as raised:
        prepare_directory(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("num_bytes", [3900, 4033])
def test_a_path_with_no_room_for_the_names_of_checkpoints_is_refused(
    tmp_path: Path, num_bytes: int
) -> None:
    below = "/".join(["a" * 100] * 40)[: num_bytes - len(str(tmp_path)) - 1].rstrip("/")
    with pytest.raises(OutputError, match="OUT_DIR_NOT_WRITABLE.*File name too long"):
        train(make_config(tmp_path / below))
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_in_the_way_is_named(tmp_path: Path, below: str) -> None:
    """Fault (Disk): output folder is a file, or is inside one -> exit 73 with its name; missing
    parent folders are created
    """
    (tmp_path / "file").touch()
    with pytest.raises(
        OutputError, match=f"cannot write to {re.escape(str(tmp_path / 'file'))}.*Not a directory"
    ):
        prepare_directory(tmp_path / "file" / below)


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OutputError, match=f"cannot write to {tmp_path}/loop/run"):
        prepare_directory(tmp_path / "loop" / "run")


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has loaded torch")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    """Fault (Disk): output folder not writable -> exit 73 before any data is loaded"""
    tmp_path.chmod(0o555)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.chdir(tmp_path)
            if os.geteuid() == 0:  # root may write anywhere
                os.setuid(65534)
            prepare_directory(Path("."))
        except OutputError as error:
            code = 0 if error.code == "OUT_DIR_NOT_WRITABLE" else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    tmp_path.chmod(0o755)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_run_folder_with_something_else_in_place_of_a_file_is_refused(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    {
        "link": lambda: path.symlink_to("/etc/passwd"),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }[kind]()
    with pytest.raises(OutputError, match=f"{path} is not a file"):
        refuse_strange_entries(tmp_path)
    before = path.lstat()
    with pytest.raises(OutputError, match="OUT_DIR_ENTRY"):
        train(make_config(tmp_path))
    assert path.lstat() == before


def test_a_link_in_place_of_the_checkpoints_of_a_run_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match="checkpoints is not a folder"):
        train(make_config(tmp_path / "run"))
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_folder_without_locks_is_refused_unless_the_lock_is_optional(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """Fault (Disk): the file system has no locks (some network and FUSE mounts) -> exit 73 before
    any work. With `--run.no-lock`, the run trains there and prints a warning: nothing keeps a
    second run out of the folder, and `status` cannot tell a killed run from a running one
    """

    def fail(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", fail)
    path = tmp_path / "run.lock"
    with pytest.raises(OutputError, match=r"NO_LOCKS.*--run\.no-lock"), run_lock(path):
        pass
    assert caplog.messages == []
    with run_lock(path, is_optional=True):
        assert "pid " in path.read_text()
    assert ["[NO_LOCKS]" in message for message in caplog.messages] == [True]


def test_an_optional_lock_that_another_run_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int, operation: int) -> None:
        raise OSError(errno.EAGAIN, "taken")

    monkeypatch.setattr(fcntl, "lockf", fail)
    with (
        pytest.raises(OutputError, match="LOCKED"),
        run_lock(tmp_path / "run.lock", is_optional=True),
    ):
        pass
