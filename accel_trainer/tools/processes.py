"""A recipe in processes of its own, started as a person would: for the commands that run one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Place:
    """What a run of several at once has to itself: cores of this machine, and variables that leave it some GPUs."""

    cores: Sequence[int] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def divide_machine(num_places: int) -> list[Place]:
    """Return that many shares of the machine; one alone is all of it."""
    if num_places == 1 or not hasattr(os, "sched_getaffinity"):
        return [Place()] * num_places
    import torch

    cores = sorted(os.sched_getaffinity(0))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(index) for index in range(torch.cuda.device_count())] if visible is None else visible.split(",")
    has_gpus = torch.cuda.is_available()
    places = []
    for k in range(num_places):
        mine = ",".join(gpus[k::num_places] or [gpus[k % len(gpus)]]) if has_gpus else ""
        places.append(Place(cores[k::num_places] or cores, {"CUDA_VISIBLE_DEVICES": mine} if mine else {}))
    return places


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
    except (KeyError, TypeError, AttributeError) as error:
        raise _not_recorded(folder, error) from None


def recorded_command(environment: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the recipe and its flags as they were typed. Raises OutputError: it does not say."""
    try:
        return [str(word) for word in environment["command"]["arguments"]]
    except (KeyError, TypeError) as error:
        raise _not_recorded(folder, error) from None


def _not_recorded(folder: Path, error: Exception) -> OutputError:
    return OutputError("NOT_RECORDED", f"{folder} does not say what started it ({error}): it is from an older version")
