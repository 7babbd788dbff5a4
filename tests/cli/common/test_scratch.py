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
from accel_trainer.cli.common.scratch import scratch_folder

with scratch_folder("replays") as folder:
    (folder / "file").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def start_holder() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDS_ONE],
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
    with scratch_folder("audit") as mine, scratch_folder("why") as another:
        assert {*tmp_path.iterdir()} == {used, mine, another, other}
    running.communicate("")
    assert [*tmp_path.iterdir()] == [other]
