"""A run records what it ran with."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from accel_trainer import RecipeConfig, RunConfig, RuntimeConfig
from accel_trainer.distributed.machine import peak_memory_bytes
from accel_trainer.run.provenance import defaults_of, describe_environment
from tests import processes
from tests.run.test_config import Demanding
from tests.workload import make_config, train


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def environment_of(config: RecipeConfig) -> dict[str, Any]:
    return describe_environment(Accelerator(cpu=True), defaults_of(type(config)))


def test_a_run_leaves_its_environment_in_its_folder(tmp_path: Path) -> None:
    train(make_config(tmp_path / "run"))
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["packages"]["torch"] == metadata.version("torch")
    assert environment["hardware"] | {"num_cpus": None} == {
        "device": "cpu",
        "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
        "num_cpus": None,
        "num_threads": 1,
        "num_processes": 1,
    }
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
    os.environ.update(TORCH_DISTRIBUTED_DEBUG="INFO", NCCL_DEBUG="INFO")
    train(make_config(folder, runtime=RuntimeConfig(num_threads=1)))


def test_the_hash_and_the_commit_of_the_recipe_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "train.py"
    monkeypatch.setattr(sys, "argv", [str(recipe), "--epochs", "3"])
    accelerator = Accelerator(cpu=True)

    def code() -> object:
        found = describe_environment(accelerator, {})["code"]
        assert found.pop("recipe") == str(recipe)
        assert found.pop("sha256") == hashlib.sha256(recipe.read_bytes()).hexdigest()
        return found

    recipe.write_text("one\n")
    assert code() == {"git_commit": None}, "not in a repository"
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert code() == {"git_commit": commit}
    recipe.write_text("two \N{EURO SIGN}\n")
    assert code() == {"git_commit": commit}


def test_no_program_that_a_repository_names_for_git_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may have read a stranger's recipe, and not the configuration of its repository."""
    recipe = tmp_path / "train.py"
    ran = tmp_path / "ran"
    program = tmp_path / "program.sh"
    program.write_text(f"#!/bin/sh\ntouch {ran}\ncat\n")
    program.chmod(0o700)
    recipe.write_text("one\n")
    (tmp_path / ".gitattributes").write_text("*.py filter=theirs diff=theirs\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "train.py", ".gitattributes")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    for name in ("core.fsmonitor", "core.pager", "diff.external", "diff.theirs.textconv"):
        git(tmp_path, "config", name, str(program))
    git(tmp_path, "config", "filter.theirs.clean", str(program))
    monkeypatch.setattr(sys, "argv", [str(recipe)])
    recipe.write_text("two\n")
    assert len(environment_of(RecipeConfig())["code"]["git_commit"]) == 40
    assert not ran.exists()


def test_a_change_since_the_commit_is_only_in_the_copy_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "train.py"
    monkeypatch.setattr(sys, "argv", [str(recipe)])
    recipe.write_text("one\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    recipe.write_text("KEY = 'uncommitted-key'\n")
    for copies in (True, False):
        folder = tmp_path / f"run-{copies}"
        train(make_config(folder, run=RunConfig(output_dir=folder, copy_recipe=copies)))
        written = [
            path.name
            for path in folder.rglob("*")
            if path.is_file() and b"uncommitted" in path.read_bytes()
        ]
        assert written == ["recipe.py"] * copies


def test_the_defaults_of_a_recipe_are_recorded_even_if_it_refuses_them() -> None:
    recorded = environment_of(Demanding(dataset="digits"))["recipe_defaults"]
    assert (recorded["dataset"], recorded["trainer"]["num_epochs"]) == (None, 10)


def test_secrets_on_the_command_line_are_not_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault (Malice): secrets in a config -> a config has no field for secrets, and only the hub's
    library handles its token. The values of flags named like a secret, passwords in addresses
    and unknown environment variables are not recorded. Of uncommitted changes, only the copy of
    the recipe is stored
    """
    argv = (
        "train.py --hub-token hf_1 --db.password=p=2 --api-key 3 --epochs 4 --num-tokens 5 "
        "--use-token --lr 6"
    )
    monkeypatch.setattr(sys, "argv", argv.split())
    shown = " ".join(environment_of(RecipeConfig())["command"]["arguments"])
    assert shown == (
        "train.py --hub-token *** --db.password=*** --api-key *** --epochs 4 --num-tokens 5 "
        "--use-token --lr 6"
    )


def test_only_variables_that_are_known_to_be_harmless_are_written_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secrets = {"NCCL_SECRET_TOKEN", "NCCL_IB_TOKEN", "TORCH_NCCL_TOKEN"}
    for name in secrets:
        monkeypatch.setenv(name, "abc")
    monkeypatch.setenv("TORCH_HOME", "/home/somebody")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("MASTER_ADDR", "http://me:pw@proxy")
    monkeypatch.setenv("NCCL_IB_GID_INDEX", "3")
    variables = environment_of(RecipeConfig())["variables"]
    assert (variables["NCCL_DEBUG"], variables["MASTER_ADDR"]) == ("INFO", "http://***@proxy")
    assert variables["NCCL_IB_GID_INDEX"] == "3", "as any setting of NCCL"
    assert not {*secrets, "TORCH_HOME"} & variables.keys()


def test_addresses_with_a_password_and_what_looks_like_a_key_are_masked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv = [
        "train.py",
        "--dataset",
        "https://me:p%20w@host/x",
        "--note",
        "hf_abcdefghijkl",
        "--name",
        "sk-it",
        "a@b",
    ]
    monkeypatch.setattr(sys, "argv", argv)
    shown = environment_of(RecipeConfig())["command"]["arguments"]
    assert shown == [
        "train.py",
        "--dataset",
        "https://***@host/x",
        "--note",
        "***",
        "--name",
        "sk-it",
        "a@b",
    ]


def use_memory(folder: Path) -> None:
    """Train on two processes, of which the second uses more memory for a moment."""
    if os.environ["RANK"] == "1":
        torch.ones(60_000_000).sum()  # 240 MB
    peak = peak_memory_bytes(Accelerator())
    (folder / f"peak-{os.environ['RANK']}").write_text(str(peak))
    train(make_config(folder / "run"))


def test_the_peak_of_memory_is_that_of_the_fullest_process(tmp_path: Path) -> None:
    processes.run(use_memory, tmp_path, num_processes=2, folder=tmp_path / "logs")
    peaks = [int((tmp_path / f"peak-{rank}").read_text()) for rank in (0, 1)]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["peak_memory_bytes"] >= peaks[1] > peaks[0] + 100_000_000
