"""`--dry-run`: a run and its resume in a new process leave the same, or the difference is named."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_trainer import (
    Callback,
    ConfigError,
    OptimizerConfig,
    RecipeConfig,
    RunResult,
    StepOutput,
    main,
)
from accel_trainer.cli.recipe.dry_run import dry_run
from accel_trainer.cli.recipe.exit import exit_with
from accel_trainer.core.errors import CheckpointError, ExitCode
from accel_trainer.core.types import Batch
from accel_trainer.data.loader import EvalLoader
from accel_trainer.data.workers import SampleReader
from accel_trainer.run.data import MAX_EVAL_SAMPLES
from recipes import cifar
from tests import processes, workload

from ...checks.hidden import PLACES, USERS
from ...checks.honest import HONEST
from ...digits import ON_DIGITS
from ...training import planted
from ...variants import slow


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary folders are made, by a path short enough for a socket.

    Nothing is left there.
    """
    forkserver.ensure_running()  # it keeps a folder, too
    folder = Path(tempfile.mkdtemp(prefix="dry-"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.glob("dry-run*")) == []
    shutil.rmtree(folder)


def in_folder(folder: Path, train: Callable[[Any], RunResult], config: RecipeConfig) -> None:
    tempfile.tempdir = str(folder)
    exit_with(lambda: dry_run(train, config), is_debug=False)


@pytest.mark.usefixtures("python_is_forked")
def test_a_dry_run_of_a_recipe_says_what_it_compared_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(
            cifar.train,
            cifar.Config,
            description="",
            argv=[*ON_DIGITS, "--dry-run", "--cache-dir", str(tmp_path / "cache")],
        )
    assert ended.value.code == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("dry run ok in ")
    assert "6 steps at once, and 3 steps and a resume in a new process, gave the same " in line
    assert {path.name for path in tmp_path.iterdir()} == {"cache"}


@pytest.mark.slow
def test_a_dry_run_of_two_processes_says_once_that_all_is_equal(
    tmp_path: Path, scratch: Path
) -> None:
    config = workload.make_config(tmp_path / "run")
    arguments = (scratch, workload.train, config)
    job = processes.start(
        in_folder, *arguments, num_processes=2, folder=tmp_path / "logs", has_workers=True
    )
    codes = job.wait()
    shown = job.output(0) + job.output(1)
    assert (codes, shown.count("dry run ok")) == ([0, 0], 1), shown
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("num_samples", "num_processes", "num_parts"), [(1000, 1, 8), (513, 2, None), (600, 4, 64)]
)
def test_a_dry_run_evaluates_at_most_512_samples_each_once(
    num_samples: int, num_processes: int, num_parts: int | None
) -> None:
    cpu = torch.device("cpu")
    reader = SampleReader(planted.vectors(num_samples), cpu)
    batches = []
    for index in range(num_processes):
        where = {"num_processes": num_processes, "process_index": index}
        whole = EvalLoader(reader, batch_size=64, device=cpu, num_parts=num_parts, **where)
        few = whole.first(MAX_EVAL_SAMPLES)
        batches.append(list(few.batches()))
    ids = torch.cat([batch.sample_ids for own in batches for batch in own])
    assert sorted(ids.tolist()) == list(range(few.num_samples))
    assert few.num_samples <= 512
    assert len({len(own) for own in batches}) == 1 or num_parts, "a forward may be a collective"
    assert all(len(batch.inputs) == len(batch) for own in batches for batch in own)


class Forgetful(Callback):
    """Saves what it then cannot take back."""

    def state_dict(self) -> dict[str, Any]:
        return {"notes": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("no such notes")


class Initialized(planted.Net):
    """Sets its weights from the first batch, and remembers that in a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.is_set = False

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.is_set:
            self.is_set = True
            with torch.no_grad():
                self.linear.bias.copy_(-super().forward(inputs).mean(0))
        return super().forward(inputs)


class Clock(planted.PlainTask):
    """Reads a device that never repeats itself."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        noise = random.SystemRandom().random()
        return StepOutput(super().step(model, batch).losses * noise)


class RandomEvaluation(planted.PlainTask):
    """Draws in an evaluation, from Python's generator."""

    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().eval_step(model, batch)
        return StepOutput(output.losses * random.SystemRandom().random(), output.outputs)


class Centred(planted.PlainTask):
    """Subtracts a running mean that is the task's."""

    def __init__(self) -> None:
        self.centre = torch.zeros(3)

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(batch.inputs)
        self.centre = 0.9 * self.centre + 0.1 * logits.detach().mean(0)
        return StepOutput((logits - self.centre).logsumexp(1))


class OwnGenerator(planted.PlainTask):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        noise = torch.randn(batch.inputs.shape, generator=self.generator)
        return super().step(model, Batch(batch.inputs + noise, batch.targets, batch.sample_ids))


def task(kind: Any) -> Any:
    return partial(planted.train, task=kind)


def train_hidden(user: str, place: str, config: RecipeConfig) -> RunResult:
    parts, _ = USERS[user]
    return planted.train(config, **parts(PLACES[place](Path())))


def hidden(user: str, place: str) -> Any:
    return partial(train_hidden, user, place)


def model(kind: Any) -> Any:
    return partial(planted.train, model=kind)


NAMED: dict[str, tuple[Any, str]] = {
    "late state": (
        hidden("task", "None at first"),
        r"CKPT_INEXACT.* in model.linear.* the checkpoint did not bring back task.number.number",
    ),
    "hidden": (
        hidden("task", "environment"),
        r"CKPT_INEXACT.* state was the same before .* \(the kernels\)",
    ),
    "closure": (hidden("task", "closure"), "CKPT_INEXACT.* did not bring back .*count.calls"),
    "clock": (
        task(Clock),
        "NOT_REPEATABLE.* two runs of 3 steps from the same start differ in model.linear",
    ),
    "flag": (model(Initialized), "CKPT_INEXACT.* did not bring back model.is_set"),
    "evaluation": (
        task(RandomEvaluation),
        "CKPT_INEXACT.* differs in metrics.jsonl.* an evaluation that draws",
    ),
    "attribute": (
        hidden("model", "default of a class"),
        "CKPT_INEXACT.* did not bring back model.number.number",
    ),
    "class attribute": (
        hidden("model", "attribute of a class"),
        "CKPT_INEXACT.* did not bring back CountsInItsClass.number",
    ),
    "global": (hidden("model", "global"), "CKPT_INEXACT.* did not bring back .*TOTAL"),
    "task": (task(Centred), "CKPT_INEXACT.* did not bring back task.centre"),
    "generator": (task(OwnGenerator), "CKPT_INEXACT.* did not bring back task.generator"),
}
SHOWN = ["late state", "clock", "evaluation", "global"]


def make_config(folder: Path, train: Any) -> RecipeConfig:
    if train.func is workload.train:
        return workload.make_config(folder)
    return planted.make_config(folder, max_steps=None)


@pytest.mark.parametrize("name", [*SHOWN, *slow(name for name in NAMED if name not in SHOWN)])
def test_what_a_resume_would_lose_fails_the_dry_run_and_is_named(tmp_path: Path, name: str) -> None:
    """Fault (Resume): part of the state is not restored, wherever that state is -> `--dry-run` ends
    with exit code 74 and lists the differences
    """
    train, named = NAMED[name]
    with pytest.raises(CheckpointError, match=named):
        dry_run(train, make_config(tmp_path / "run", train))


def test_what_can_be_saved_but_not_loaded_fails_the_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = partial(planted.train, callbacks=(Forgetful(),))
    with pytest.raises(SystemExit) as ended:
        dry_run(train, make_config(tmp_path / "run", train))
    assert ended.value.code not in (None, ExitCode.DONE)
    assert "dry run ok" not in capsys.readouterr().out


def train_honest(name: str, config: RecipeConfig) -> RunResult:
    return planted.train(config, **HONEST[name]())


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
def test_a_dry_run_of_honest_parts_finds_nothing(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = planted.make_config(tmp_path / "run", max_steps=None)
    if {"optimizer", "schedule"} & HONEST[name]().keys():
        config = replace(config, optimizer=OptimizerConfig())
    assert dry_run(partial(train_honest, name), config).state == "done"
    assert "dry run ok" in capsys.readouterr().out


def test_a_train_that_no_other_process_can_import_is_one_line(tmp_path: Path) -> None:
    def train(config: RecipeConfig) -> RunResult:
        return planted.train(config)

    with pytest.raises(ConfigError, match="define train at the top level of its file"):
        dry_run(train, planted.make_config(tmp_path / "run"))


class HashedTask(planted.PlainTask):
    """Its loss depends on the hash of a name, as the order of a set does."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        return output._replace(losses=output.losses * (1 + hash("name") % 1000 / 1000))

    eval_step = planted.PlainTask.step


def train_hashed(config: RecipeConfig) -> RunResult:
    return planted.train(config, task=HashedTask)


def test_what_depends_on_the_hash_seed_is_found_even_in_two_steps(
    tmp_path: Path,
) -> None:
    with pytest.raises(CheckpointError, match="stopped after 1 step .* differs in") as caught:
        dry_run(train_hashed, planted.make_config(tmp_path / "run", max_steps=2))
    assert caught.value.code == "CKPT_INEXACT"
