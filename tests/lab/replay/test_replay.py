"""A stretch of a recorded run, trained again by its recipe in a new process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

from accel_trainer.checkpoint.format import list_checkpoints, step_of
from accel_trainer.cli.runs.rows import read_rows
from accel_trainer.cli.runs.run_reader import RunReader, read_run
from accel_trainer.core.errors import OutputError
from accel_trainer.lab.replay.replay import (
    STEP_DIGESTS,
    STOP,
    Replay,
    environment_changes,
)
from tests.cli.conftest import run_command

from .conftest import FLAGS as POISONED_FLAGS
from .conftest import RECIPE

pytestmark = pytest.mark.usefixtures("python_is_forked")


ROOT = Path(__file__).parents[3]
FLAGS = (
    "--config recipes/configs/digits.yaml --runtime.num-threads 1 --max-steps 8 --quiet"
    " --checkpoint-every-n-steps 2 --checkpoint.keep-for-replay 2"
    " --trainer.log-every-n-steps 2 --trainer.digest-every-n-steps 2"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, one_that_forks: Path) -> RunReader:
    """A run of 8 steps, with checkpoints after each second one."""
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("runs") / "run"
    recipe = ROOT / "recipes" / "cifar.py"
    command = [one_that_forks, recipe, *FLAGS.split(), "--output-dir", folder]
    subprocess.run([str(word) for word in command], cwd=ROOT, check=True)
    return read_run(folder)


def test_a_replay_begins_at_the_nearest_checkpoint_and_repeats_the_rows(
    run: RunReader, tmp_path: Path
) -> None:
    replayed = tmp_path / "replayed"
    callbacks = {**STEP_DIGESTS, **STOP}
    trained = Replay.of(run, None).train(replayed, until=6, after=5, callbacks=callbacks)
    assert trained.after == 4
    rows = [read_rows(each, after=4, until=6) for each in (run.folder, replayed)]
    assert rows[0] == rows[1] != []
    steps = [json.loads(line) for line in (replayed / "steps.jsonl").read_text().splitlines()]
    assert [step["optimizer_step"] for step in steps] == [5, 6]
    assert steps[-1]["model"] == rows[0][-1]["digest/model"]
    assert [step_of(path) for path in list_checkpoints(replayed / "checkpoints")] == [6]
    assert environment_changes(run) == []


def test_another_processor_gpu_or_version_is_named(run: RunReader) -> None:
    hardware = {**run.environment["hardware"], "cpu_kernels": "ALTIVEC", "device": "NVIDIA H200"}
    packages = {**run.environment["packages"], "torch": "1.0"}
    environment = {**run.environment, "hardware": hardware, "packages": packages}
    device, kernels, version = environment_changes(replace(run, environment=environment))
    assert device.startswith("device NVIDIA H200 -> ")
    assert kernels == f"kernels for ALTIVEC -> {torch.backends.cpu.get_cpu_capability()}"
    assert version == f"torch 1.0 -> {metadata.version('torch')}"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lr", "1e25"], "loss sum "),
        (["--lr", "1e39", "--max-steps", "1"], "finite gradient, but the state"),
    ],
    ids=["gradient", "state"],
)
def test_a_step_whose_state_cannot_be_saved_has_its_samples_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    """With batch norm, whose averages are NaN as soon as its input is."""
    recipe = tmp_path / "normed.py"
    recipe.write_text(
        RECIPE.read_text().replace("nn.Flatten(),", "nn.Flatten(), nn.BatchNorm1d(36),")
    )
    folder = tmp_path / "run"
    command = [sys.executable, recipe, *POISONED_FLAGS.split(), "--output-dir", folder, *flags]
    ended = subprocess.run([str(word) for word in command], cwd=ROOT, check=False)
    assert ended.returncode == 79
    _, explained, _ = run_command(capsys, ["doctor", folder])
    (step,) = re.findall(r"replay \S+ --step (\d+)", " ".join(explained.split()))
    code, out, err = run_command(capsys, ["replay", folder, "--step", step])
    assert code == 0, err
    assert f"step {step} " in out
    assert said in out
    assert "its 8 samples, by loss: " in out


def test_a_replay_that_fails_says_so(run: RunReader, tmp_path: Path) -> None:
    replay = Replay.of(run, None).with_flags(["--seed", "5"])
    with pytest.raises(OutputError, match="ended with exit code 64") as caught:
        replay.train(tmp_path / "failed", until=6, after=5, callbacks=STOP)
    assert caught.value.exit_code == 64, "the command ends as the recipe did"
