"""The loop from outside: a program owns it, and the run is the same."""

from __future__ import annotations

import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from accel_trainer import Callback, RecipeConfig, RunResult, StepReport, Trainer

from .. import processes, workload
from .test_exactness import final_files

NUM_STEPS = 10


def loop(trainer: Trainer, *, leave_after: int | None = None, fails: bool = False) -> RunResult:
    """Train in a loop of one's own."""
    seen: list[StepReport] = []
    with trainer.running() as reports:
        for report in reports:
            seen.append(report)
            if report.optimizer_step == leave_after:
                if fails:
                    raise KeyError("mine")
                break
    assert [report.optimizer_step for report in seen] == [
        *range(seen[0].optimizer_step, trainer.state.optimizer_step + 1)
    ]
    assert trainer.result is not None
    return trainer.result


def config_of(folder: Path) -> RecipeConfig:
    config = workload.make_config(folder)
    return replace(config, checkpoint=replace(config.checkpoint, every_n_steps=None))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    workload.train(config_of(folder))
    return folder


def test_a_loop_of_ones_own_trains_as_fit_does(tmp_path: Path, whole: Path) -> None:
    result = workload.train(config_of(tmp_path), fit=loop)
    assert (result.state, result.position.optimizer_step) == ("done", NUM_STEPS)
    assert final_files(tmp_path) == final_files(whole)


@pytest.mark.parametrize("step", [1, 5, 7])
def test_a_loop_that_is_left_early_is_saved_and_resumes_exactly(
    tmp_path: Path, whole: Path, step: int
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    result = workload.train(config_of(tmp_path), fit=partial(loop, leave_after=step))
    assert (result.state, result.stop_reason) == ("stopped", "left by the program")
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(list((tmp_path / "checkpoints").glob(f"step-{step:010d}-*"))) == 1
    workload.train(config_of(tmp_path))
    assert final_files(tmp_path) == final_files(whole)


def test_processes_that_leave_the_loop_together_resume_exactly(tmp_path: Path) -> None:
    for name, steps in (("whole", [None]), ("parts", [3, None])):
        for number, step in enumerate(steps):
            logs = tmp_path / f"logs-{name}-{number}"
            processes.run(train_two, tmp_path / name, step, num_processes=2, folder=logs)
    assert final_files(tmp_path / "parts") == final_files(tmp_path / "whole")


def train_two(folder: Path, leave_after: int | None) -> None:
    workload.train(config_of(folder), fit=partial(loop, leave_after=leave_after))


class ErrorKeeper(Callback):
    """Keeps the error that ended the run."""

    error: BaseException | None = None

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        self.error = error


def test_an_error_in_the_loop_reaches_callbacks_and_is_raised(tmp_path: Path, whole: Path) -> None:
    keeper = ErrorKeeper()
    with pytest.raises(KeyError, match="mine"):
        workload.train(
            config_of(tmp_path), fit=partial(loop, leave_after=7, fails=True), callbacks=(keeper,)
        )
    assert isinstance(keeper.error, KeyError)
    workload.train(config_of(tmp_path))
    assert final_files(tmp_path) == final_files(whole)


def test_a_branch_may_add_an_average_which_begins_with_the_weights(tmp_path: Path) -> None:
    base = config_of(tmp_path / "base")
    base = replace(base, trainer=replace(base.trainer, ema_decay=None))
    workload.train(replace(base, trainer=replace(base.trainer, num_epochs=1)))
    allowed = ("trainer.ema_decay", "trainer.num_epochs")
    run = replace(
        base.run,
        output_dir=tmp_path / "branch",
        resume=str(tmp_path / "base"),
        allow_change=allowed,
    )
    result = workload.train(replace(base, run=run, trainer=replace(base.trainer, ema_decay=0.9)))
    assert (result.state, result.position.optimizer_step) == ("done", NUM_STEPS)
    assert 0 < result.metrics["eval_ema/accuracy"] <= 1
