"""What SkyPilot and Kubernetes are given: the exit code that is started again, and commands that exist."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import yaml
from accelerate.commands.launch import launch_command_parser

from accel_trainer import ExitCode
from accel_trainer.run.parser import parse_config
from recipes import images

ROOT = Path(__file__).parents[2]


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / "recipes" / name).read_text())


def check_command(words: list[str]) -> images.Config:
    """The launcher knows its flags, the recipe is there and knows its own."""
    assert words[:2] == ["accel-trainer", "launch"]
    options = launch_command_parser().parse_args(words[2:])
    assert options.training_script == "recipes/images.py"
    assert (ROOT / options.training_script).is_file()
    return parse_config(images.Config, options.training_script_args, description="")


def test_kubernetes_replaces_a_pod_that_was_preempted_and_no_other() -> None:
    spec = read("job.yaml")["spec"]
    (preempted, disrupted) = spec["podFailurePolicy"]["rules"]
    assert preempted == {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [ExitCode.PREEMPTED]}}
    assert (disrupted["action"], spec["backoffLimit"]) == ("Ignore", 0)
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # or the rules would not apply
    (container,) = pod["containers"]
    config = check_command([*container["command"], *container["args"]])
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(config.run.output_dir.parent), config.dataset} <= mounts


def test_skypilot_recovers_a_job_that_was_preempted() -> None:
    task = read("sky.yaml")
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [ExitCode.PREEMPTED]
    command = task["run"].replace("\\\n", " ").removeprefix("exec ").replace("$SKYPILOT_NUM_GPUS_PER_NODE", "8")
    config = check_command(shlex.split(command))
    assert str(config.run.output_dir).startswith("/runs/")
    assert "/runs" in task["file_mounts"]
