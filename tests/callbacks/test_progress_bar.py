"""What a run prints: on a terminal, into a file, in quiet, on several processes, and when it goes
on."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from accel_trainer import (
    Batch,
    BatchConfig,
    Callback,
    CheckpointConfig,
    ClassificationTask,
    StepOutput,
    StepReport,
    Trainer,
    TrainerConfig,
)
from accel_trainer.callbacks import progress_bar
from accel_trainer.callbacks.progress_bar import ProgressBar, loss_of
from accel_trainer.core.batch_plan import ENDLESS
from accel_trainer.core.errors import ExitCode
from accel_trainer.core.train_state import TrainState

from .. import processes, terminal, workload
from ..variants import slow, slow_but


class Acts(Callback):
    """Warns after the third step, and kills its process after another.

    `interrupts`: it sends itself this many INT after the seventh step. `moved`: before that, it
    moves this folder away and leaves a link.
    """

    def __init__(self, dies_after: int, interrupts: int, moved: Path | None) -> None:
        self._dies_after = dies_after
        self._interrupts = interrupts
        self._moved = moved

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        if report.optimizer_step == 3:
            logging.getLogger(__name__).warning("a word of warning")
        if report.optimizer_step == self._dies_after:
            trainer._checkpointer.wait(must_succeed=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if report.optimizer_step == 7:
            trainer._checkpointer.wait(must_succeed=True)
            if self._moved is not None:
                self._moved.symlink_to(self._moved.rename(self._moved.with_name("elsewhere")))
            for _ in range(self._interrupts):
                os.kill(os.getpid(), signal.SIGINT)


class ScaledTask(ClassificationTask):
    """Classification with a loss of any size."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self._scale = scale

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        return output._replace(losses=output.losses * self._scale)


def attempt(
    folder: Path,
    dies_after: int = 0,
    is_quiet: bool = False,
    max_steps: int | None = None,
    log_every_n_steps: int = 2,
    interrupts: int = 0,
    moves_checkpoints: bool = False,
    loss_scale: float = 1.0,
) -> None:
    """Train 2 epochs of 5 steps with a row for every second step, and its end."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    config = workload.make_config(folder, checkpoint=CheckpointConfig(every_n_steps=5))
    config = replace(
        config,
        batch=BatchConfig(global_batch_size=16, eval_batch_size=10),
        trainer=replace(
            config.trainer, log_every_n_steps=log_every_n_steps, ema_decay=None, max_steps=max_steps
        ),
        run=replace(config.run, quiet=is_quiet),
    )
    moved = folder / "checkpoints" if moves_checkpoints else None
    acts = Acts(dies_after, interrupts, moved)
    workload.train(config, callbacks=(acts,), task=ScaledTask(loss_scale))


def test_lines_in_a_file_say_how_it_goes_and_what_is_left(tmp_path: Path) -> None:
    job = processes.run(attempt, tmp_path / "run", folder=tmp_path / "logs", num_processes=2)
    lines = job.output(0).splitlines()
    steps = [re.match(r"epoch (\d)/2  step (\d+)/10  loss ", line) for line in lines]
    found = [match.groups() for match in steps if match]
    assert found == [("1", "2"), ("1", "4"), ("1", "5"), ("2", "6"), ("2", "8"), ("2", "10")]
    (last,) = (line for line in lines if "step 10/10  loss" in line)
    assert re.search(
        r"  learning rate \S+  samples/s [\d,]+  data wait \S+%"
        r"  00:00 left$",
        last,
    )
    assert "\r" not in job.output(0)
    assert job.output(1) == "WARNING: a word of warning\n", "what process 0 shows is shown once"


@pytest.mark.parametrize(
    ("max_steps", "said"),
    [(6, "6 steps (max_steps=)"), (None, "10 steps"), *slow([(10, "10 steps")])],
)
def test_the_steps_that_will_be_taken_are_announced(
    tmp_path: Path, max_steps: int | None, said: str
) -> None:
    job = processes.run(attempt, tmp_path / "run", 0, False, max_steps, folder=tmp_path / "logs")
    assert job.output().splitlines()[1].endswith(f", 2 epochs, {said}")


@pytest.mark.parametrize(
    ("step_s", "num_steps", "first_step", "said"),
    [
        (0.5, 1_003, 0, "about 08:10 for 980 more steps"),
        (0.5, 1_003, 500, "about 04:00 for 480 more steps"),
        (30.0, 100, 0, "about 48:00 for 96 more steps"),
        (0.5, 200, 0, None),  # it is over in a minute and a half
        (0.5, ENDLESS, 0, None),
    ],
)
def test_what_a_run_takes_is_said_once_after_its_first_steps(
    step_s: float,
    num_steps: int,
    first_step: int,
    said: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress_bar, "time", SimpleNamespace(monotonic=lambda: clock.now))
    config = TrainerConfig(num_epochs=None, num_steps=num_steps)
    bar = ProgressBar(config, banner="", is_quiet=False)
    plan = SimpleNamespace(steps_per_epoch=1_000_000)
    state = TrainState(first_step, 0, first_step)
    trainer: Any = SimpleNamespace(
        best=None, state=state, loader=SimpleNamespace(plan=plan), is_finished=False, data_wait_s=0
    )
    bar.on_fit_start(trainer)
    clock.now = 60.0  # of compilation, in the first steps
    for step in range(first_step + 1, min(num_steps, first_step + 100) + 1):
        clock.now += step_s
        bar.on_step_end(trainer, cast(StepReport, SimpleNamespace(optimizer_step=step, epoch=0)))
    lines = [line for line in capsys.readouterr().out.splitlines() if "about" in line]
    assert [line.partition(",")[0] for line in lines] == [said] * (said is not None)


@pytest.mark.parametrize(
    ("wait_s", "num_workers", "said"),
    [
        (0.2, 0, "4.0 of 10.0 s of training wait for samples: num_workers=2"),
        (0.2, 3, "4.0 of 10.0 s of training wait for samples: num_workers=6"),
        (0.2, 8, None),  # each CPU has one
        (0.2, None, None),  # the reader has no workers
        (0.1, 0, None),
    ],
)
def test_steps_that_wait_for_samples_are_said_where_workers_help(
    wait_s: float,
    num_workers: int | None,
    said: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress_bar, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(progress_bar, "available_cpus", lambda: 8)
    config = TrainerConfig(num_epochs=None, num_steps=200)
    bar = ProgressBar(config, banner="", is_quiet=False)
    reader = SimpleNamespace() if num_workers is None else SimpleNamespace(num_workers=num_workers)
    loader = SimpleNamespace(plan=SimpleNamespace(steps_per_epoch=1_000), reader=reader)
    trainer: Any = SimpleNamespace(
        best=None, state=TrainState(), loader=loader, is_finished=False, data_wait_s=0.0
    )
    bar.on_fit_start(trainer)
    for step in range(1, 101):
        clock.now += 0.5
        trainer.data_wait_s += wait_s
        bar.on_step_end(trainer, cast(StepReport, SimpleNamespace(optimizer_step=step, epoch=0)))
    lines = [line for line in capsys.readouterr().out.splitlines() if "wait" in line]
    assert lines == [said] * (said is not None)


def test_quiet_still_prints_warnings(tmp_path: Path) -> None:
    job = processes.run(attempt, tmp_path / "run", 0, True, folder=tmp_path / "logs")
    assert job.output() == "WARNING: a word of warning\n"
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 8


def test_a_run_that_continues_reports_from_where(tmp_path: Path) -> None:
    job = processes.run(
        attempt, tmp_path / "run", 7, folder=tmp_path / "killed", codes=[-signal.SIGKILL]
    )
    assert "continuing" not in job.output()
    job = processes.run(attempt, tmp_path / "run", folder=tmp_path / "again")
    assert (
        "continuing after step 5, epoch 2/2, from step-0000000005-epoch-00001"
        in job.output().splitlines()
    )


def test_ctrl_c_says_at_once_what_happens_and_at_the_end_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    job = processes.run(
        attempt, tmp_path / "run", 0, False, None, 2, 1, folder=folder, codes=[ExitCode.PREEMPTED]
    )
    *_, pressed, last = [line for line in job.output().splitlines() if line and "best" not in line]
    assert pressed == "stopping after this step; press again to leave now"
    assert last == "SIGINT: saved step 7: run the same command to continue"


def test_a_second_ctrl_c_says_what_is_lost(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    job = processes.run(
        attempt, tmp_path / "run", 0, False, None, 2, 2, folder=folder, codes=[128 + signal.SIGINT]
    )
    last = job.output().splitlines()[-1]
    assert "losing 2 steps after step 5" in last
    assert "run the same command" in last


def test_a_second_ctrl_c_leaves_if_the_checkpoints_cannot_be_listed(tmp_path: Path) -> None:
    options = (0, False, None, 2, 2, True)
    job = processes.run(
        attempt, tmp_path / "run", *options, folder=tmp_path / "logs", codes=[128 + signal.SIGINT]
    )
    assert "Traceback" not in job.output()


@pytest.mark.parametrize("is_exact", [False, True])
def test_the_loss_of_a_step_is_the_mean_of_this_process(is_exact: bool) -> None:
    ids = [torch.arange(3), torch.arange(2)]
    report = StepReport(1, 0, 0.1, torch.tensor(30.0), {}, 10, None, False, None, ids)
    assert loss_of(report, is_exact=is_exact) == (3.0 if is_exact else 6.0)
    tokens = report._replace(num_items=torch.tensor(60))
    assert loss_of(tokens, is_exact=is_exact) == 0.5


def on_terminal(
    folder: Path, columns: int, log_every_n_steps: int = 2, loss_scale: float = 1.0
) -> str:
    """Return what an attempt writes to a terminal."""
    code = (
        "from tests.callbacks.test_progress_bar import attempt, Path; "
        f"attempt(Path({str(folder)!r}), "
    )
    code += f"log_every_n_steps={log_every_n_steps}, loss_scale={loss_scale})"
    return terminal.run_python(code, columns=columns)


@pytest.mark.usefixtures("python_is_forked")
def test_a_terminal_shows_one_bar_and_warnings_on_separate_lines(tmp_path: Path) -> None:
    lines = [line.rpartition("\r")[2] for line in on_terminal(tmp_path / "run", 150).split("\n")]
    assert "WARNING: a word of warning" in lines
    bars = [line for line in lines if "|" in line]
    assert len(bars) == 1, lines
    assert re.match(
        r"epoch 2/2 \|█+\| 10/10  00:00 left, loss 1\.\d+  +[\d.]+(step/s|s/step)", bars[0]
    )
    assert lines[-3].startswith("done: 10 steps (2 epochs)")
    # The best evaluation is written as the last one is.
    assert re.findall(r"eval accuracy (\S+)", lines[-2])[0].endswith("%")


@pytest.mark.usefixtures("python_is_forked")
def test_a_terminal_shows_a_table_of_epochs_with_the_best_so_far_marked(tmp_path: Path) -> None:
    lines = [line.rpartition("\r")[2] for line in on_terminal(tmp_path / "run", 80).split("\n")]
    (head,) = (number for number, line in enumerate(lines) if re.match("epoch +loss  ", line))
    assert lines[head].split("  ")[-1] == "eval accuracy"
    rows = [line for line in lines if re.match(r"[ *]   [12]  ", line)]
    history = [*map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())]
    train, evaluation = (
        [row for row in history if row["event"] == event and row["optimizer_step"] in (5, 10)]
        for event in ("train", "eval")
    )
    best = 0.0
    for row, of_train, of_eval in zip(rows, train, evaluation, strict=True):
        accuracy = of_eval["eval/accuracy"]
        mark = "*" if accuracy > best else " "
        best = max(best, accuracy)
        numbers = [f"{of_train['train/loss']:.4g}", f"{of_eval['eval/loss']:.4g}"]
        assert row[0] == mark
        assert row[1:].split()[1:] == [*numbers, f"{accuracy:.2%}"]


@pytest.mark.usefixtures("python_is_forked")
def test_the_columns_of_the_table_are_apart_for_large_numbers(tmp_path: Path) -> None:
    text = on_terminal(tmp_path / "run", 80, loss_scale=-1e16)
    lines = [line.rpartition("\r")[2] for line in text.split("\n")]
    rows = [line[1:].split() for line in lines if re.match(r"[ *]   [12][ -]", line)]
    assert [row[0] for row in rows] == ["1", "2"]
    assert [len(row) for row in rows] == [4, 4], rows


@pytest.mark.usefixtures("python_is_forked")
@pytest.mark.parametrize("columns", slow_but([40, 60], [40, 60, 80, 120, 200]))
def test_a_bar_and_the_lines_around_it_fit_the_terminal(tmp_path: Path, columns: int) -> None:
    text = on_terminal(tmp_path / "run", columns)
    assert terminal.too_long(text, columns) == []
    bars = [state for line in text.split("\n") for state in line.split("\r") if "|" in state]
    expected = (
        r"\|█+\| 10/10  00:00 left" if columns < 60 else r"\|█+\| 10/10  00:00 left, loss 1\.\d+"
    )
    assert re.search(expected, bars[-1]), bars[-1]


@pytest.mark.usefixtures("python_is_forked")
def test_the_bar_names_the_epoch_of_its_step_between_rows_too(tmp_path: Path) -> None:
    text = on_terminal(tmp_path / "run", 80, log_every_n_steps=100)
    shown = [
        (int(epoch), int(step))
        for epoch, step in re.findall(r"epoch (\d)/2 \|[^|]*\| (\d+)/10 ", text)
    ]
    assert {1, 2} == {epoch for epoch, _ in shown}
    assert all(epoch in ((step - 1) // 5 + 1, step // 5 + 1) for epoch, step in shown), shown
