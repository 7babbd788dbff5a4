"""A recipe in processes of its own, started as a person would: for the commands that run one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ..errors import OutputError

_LAUNCH = (
    "-m", "accel_trainer.tools.launch", "--multi_gpu", "--num_machines", "1", "--main_process_port", "0",
    "--dynamo_backend", "no",
)  # fmt: skip


def start_recipe(
    command: Sequence[str],
    *,
    num_processes: int = 1,
    directory: Path | None = None,
    variables: Mapping[str, str] | None = None,
    output: IO[Any] | int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a recipe and its flags inside `signals_handed_on`; it does not outlive this process.

    `variables` are added to the environment, `directory` is where it runs (None: here), and `output` is
    where its stdout goes (None: where this process's does).
    """
    environment = {**os.environ, "ACCEL_TRAINER_LAUNCHER": str(os.getpid()), **(variables or {})}
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    several = [*_LAUNCH, "--num_processes", str(num_processes), "--mixed_precision", precision]
    launcher = several if num_processes > 1 else []
    return subprocess.Popen([sys.executable, *launcher, *command], cwd=directory, env=environment, stdout=output)


def recorded_start(environment: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return what `start_recipe` needs to start again what made a run, by its `environment.json`.

    Raises:
        OutputError: it does not say.
    """
    try:
        command, hardware = environment["command"], environment["hardware"]
        kept = {
            name: value
            for name, value in environment["variables"].items()
            if name.startswith(("ACCELERATE_USE_", "FSDP_"))
        }
        kept["ACCELERATE_MIXED_PRECISION"] = environment["mixed_precision"]
        if hardware["device"] == "cpu":
            kept["ACCELERATE_USE_CPU"] = "true"
        return {
            "num_processes": hardware["num_processes"],
            "directory": Path(command["directory"]),
            "variables": kept,
        }
    except KeyError as error:
        raise OutputError(
            "NOT_RECORDED", f"{folder} does not say what started it ({error}): it is from an older version"
        ) from None
