"""Ctrl-C while `diff --effect` trains twice at once, with real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab.replay.conftest import Train


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_and_no_file(train_poisoned: Train, tmp_path: Path) -> None:
    first = train_poisoned("--epochs", "1")
    second = tmp_path / "second"
    shutil.copytree(first, second)
    config = second / "config.yaml"
    config.write_text(config.read_text().replace("learning_rate: 0.05", "learning_rate: 0.06"))
    code = "import sys; from accel_trainer.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [
        sys.executable,
        "-c",
        code,
        "diff",
        str(first),
        str(second),
        "--effect",
        "--jobs",
        "2",
    ]
    with subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        while process.poll() is None and not [*tmp_path.glob("accel-trainer-*/*/*/steps.jsonl")]:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, err = process.communicate()
    assert (process.returncode, err.splitlines()[-1]) == (130, "accel_trainer: interrupted")
    assert "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert not [*tmp_path.glob("accel-trainer-*")]
