"""Temporary folders of commands: a killed command's is removed by the next, and no other."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from accel_trainer.cli.common.scratch import scratch_folder

_HOLDS_ONE = """
import sys
from pathlib import Path
from accel_trainer.cli.common.scratch import scratch_folder

with scratch_folder("replays", beside=Path(sys.argv[1]) if sys.argv[1:] else None) as folder:
    (folder / "file").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def start_holder(*beside: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDS_ONE, *beside],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_command_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    killed, abandoned = start_holder()
    running, used = start_holder()
    other = tmp_path / "accel-trainer-of-somebody-else"  # without a lock
    other.mkdir()
    with killed:
        killed.kill()
    assert abandoned.is_dir()
    with scratch_folder("at") as mine, scratch_folder("why") as another:
        assert {*tmp_path.iterdir()} == {used, mine, another, other}
    running.communicate("")
    assert [*tmp_path.iterdir()] == [other]


def test_what_is_killed_beside_a_run_is_removed_by_the_next_there(tmp_path: Path) -> None:
    killed, abandoned = start_holder(tmp_path / "run")
    with killed:
        killed.kill()
    assert [*tmp_path.iterdir()] == [abandoned]
    with scratch_folder("new", beside=tmp_path / "other") as mine:
        assert [*tmp_path.iterdir()] == [mine]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "name",
    ["accel-trainer-my-best-run", "accel-trainer-x-1-2", "accel-trainer-why-12-abcdefgh"],
)
@pytest.mark.parametrize("mark", ["run.lock", ".accel-trainer-scratch", "both"])
def test_a_folder_of_somebody_else_stays_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mark: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    folder = tmp_path / name
    folder.mkdir()
    for each in ("run.lock", ".accel-trainer-scratch") if mark == "both" else (mark,):
        (folder / each).write_text(name if mark == "both" else "pid 12 on here")
    with scratch_folder("replays"):
        pass
    assert folder.is_dir()
