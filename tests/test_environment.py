"""A run records what it ran with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator

from accel_trainer import RuntimeConfig
from accel_trainer.environment import describe_environment
from tests import processes
from tests.workload import make_config, train


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_run_leaves_its_environment_in_its_folder(tmp_path: Path) -> None:
    train(make_config(tmp_path / "run"))
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["hardware"] | {"num_cpus": None} == {
        "device": "cpu", "num_cpus": None, "num_threads": 1, "num_processes": 1
    }  # fmt: skip
    assert environment["mixed_precision"] == "no"


def test_what_the_messages_between_processes_go_by_is_recorded(tmp_path: Path) -> None:
    processes.run(train_with_debugging, tmp_path / "run", num_processes=2, folder=tmp_path)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["backend"] == "gloo"
    variables = environment["variables"]
    assert variables["MASTER_ADDR"] == "127.0.0.1"
    assert variables["GLOO_SOCKET_IFNAME"] == "lo"
    assert (variables["TORCH_DISTRIBUTED_DEBUG"], variables["NCCL_DEBUG"]) == ("INFO", "INFO")


def train_with_debugging(folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    train(make_config(folder, runtime=RuntimeConfig(num_threads=1, debug_distributed=True)))
    assert dist.get_debug_level() == dist.DebugLevel.INFO


def test_the_commit_of_the_recipe_is_recorded_and_whether_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "train.py"
    monkeypatch.setattr(sys, "argv", [str(recipe), "--epochs", "3"])
    accelerator = Accelerator(cpu=True)

    def code() -> object:
        return describe_environment(accelerator)["code"]

    recipe.write_text("one")
    assert code() == {"recipe": "train.py", "git_commit": None, "is_changed": None}, "not in a repository"
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "notes.txt").write_text("not part of it")
    assert code() == {"recipe": "train.py", "git_commit": commit, "is_changed": False}
    recipe.write_text("two")
    assert code() == {"recipe": "train.py", "git_commit": commit, "is_changed": True}


def test_secrets_on_the_command_line_are_not_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = (
        "train.py --hub-token hf_1 --db.password=p=2 --api-key 3 --epochs 4 --num-tokens 5 --use-token --lr 6"
    )
    monkeypatch.setattr(sys, "argv", argv.split())
    shown = " ".join(describe_environment(Accelerator(cpu=True))["command"]["arguments"])
    assert shown == (
        "train.py --hub-token *** --db.password=*** --api-key *** --epochs 4 --num-tokens 5 --use-token --lr 6"
    )
