"""Programs that nobody here wrote run under our launcher: accelerate's tests of itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("script", ["test_script", "test_sync", "test_ops"])
def test_what_accelerate_tests_of_itself_holds_under_our_launcher(script: str) -> None:
    flags = ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0", "-m"]
    command = [
        sys.executable,
        "-m",
        "accel_trainer.cli.launch",
        *flags,
        f"accelerate.test_utils.scripts.{script}",
    ]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
