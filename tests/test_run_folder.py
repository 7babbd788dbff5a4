from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from accel_trainer.errors import ExitCode, OutputError
from accel_trainer.run_folder import RunLock, foreign_access, prepare_directory

HOLDER = """
import os, sys
from pathlib import Path
from accel_trainer.run_folder import RunLock
lock = RunLock(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    os.close(1)
print(os.getpid(), child, flush=True)
import time
time.sleep(60)
"""


def test_a_second_run_is_told_who_holds_the_lock_until_that_process_is_dead(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        _, orphan = map(int, holder.stdout.readline().split())
        try:
            with pytest.raises(OutputError, match=rf"LOCKED.*pid {holder.pid} on .* since 20") as raised:
                RunLock(path)
            assert raised.value.exit_code == ExitCode.OUTPUT
            os.kill(holder.pid, signal.SIGKILL)
            holder.wait()
            # Its forked worker is still alive and must not hold the lock.
            with RunLock(path):
                pass
        finally:
            os.kill(orphan, signal.SIGKILL)


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", fail)
    with pytest.raises(OutputError, match="NO_LOCKS"):
        RunLock(tmp_path / "run.lock")


@pytest.mark.parametrize("name", ["with space", "ünï☃", "-leading", "a" * 255, "x/y/z", "a/../b"])
def test_unusual_names_are_fine_and_come_back_resolved(tmp_path: Path, name: str) -> None:
    folder = prepare_directory(tmp_path / name)
    assert folder == (tmp_path / name).resolve()
    assert list(folder.iterdir()) == []
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("a\nb", "OUT_DIR_NAME"),
        ("a\0b", "OUT_DIR_NAME"),
        ("a" * 256, "PATH_TOO_LONG"),
        ("a" * 200 + "/", "PATH_TOO_LONG"),
    ],
    ids=["newline", "nul", "long name", "long path"],
)
def test_impossible_names_are_refused_before_anything_is_made(tmp_path: Path, name: str, code: str) -> None:
    path = tmp_path / (name * 30 if name.endswith("/") else name)
    with pytest.raises(OutputError, match=code) as raised:
        prepare_directory(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_in_the_way_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=f"OUT_DIR_IS_FILE.*{re.escape(str(tmp_path / 'file'))}"):
        prepare_directory(tmp_path / "file" / below)


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has loaded torch")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.geteuid() == 0:  # root may write anywhere
                os.chdir(tmp_path)
                os.setuid(65534)
            prepare_directory(Path("."))
        except OutputError as error:
            code = 0 if error.code == "OUT_DIR_NOT_WRITABLE" else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    tmp_path.chmod(0o755)


def test_a_folder_that_others_can_write_is_reported(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert foreign_access(tmp_path) is None
    tmp_path.chmod(0o777)
    assert "mode 777" in str(foreign_access(tmp_path))
