"""However a run ends, however often it is restarted, it leaves what an undisturbed run leaves."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from accel_trainer import (
    Batch,
    Callback,
    CheckpointConfig,
    MeanLoss,
    ProcessError,
    RunResult,
    StepReport,
    Trainer,
)
from accel_trainer.core.types import StepOutput
from accel_trainer.fault_tolerance.preemption import TIME_LIMIT
from tests import processes, workload
from tests.variants import slow


def outcome(folder: Path) -> dict[str, Any]:
    """What a run left, but for times, rates and memory."""
    result = json.loads((folder / "result.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    best = folder / "checkpoints" / "best.json"
    return {
        "result": {
            k: v
            for k, v in result.items()
            if k not in ("samples_per_s", "wall_s", "peak_memory_bytes")
        },
        "rows": [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows],
        "export": {path.name: path.read_bytes() for path in sorted((folder / "export").iterdir())},
        "best": best.read_text() if best.exists() else None,
    }


class SignalInEvaluation(MeanLoss):
    """Sends this process a signal in an evaluation.

    `at` counts the evaluations of both models from 1; 0 is the trial at the start.
    """

    at: int | None = None
    count = -1

    def empty(self, device: Any) -> Tensor:
        type(self).count += 1
        return super().empty(device)

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        if type(self).count == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        super().update(sums, batch, output)


def train(folder: Path, changes: Mapping[str, Any], signal_at: int | None) -> None:
    config = workload.make_config(folder, checkpoint=CheckpointConfig())
    config = replace(config, trainer=replace(config.trainer, **changes))
    if signal_at is not None:
        workload.MeanLoss = SignalInEvaluation  # type: ignore[misc]
        if os.environ.get("RANK", "0") == "0":
            SignalInEvaluation.at = signal_at
    result = workload.train(config, dropout=0.1)
    raise SystemExit(75 if result.state == "preempted" else 0)


@pytest.mark.parametrize(
    ("changes", "signal_at", "num_processes"),
    [
        ({}, 4, 2),  # the last of two evaluations, each of the weights and of their average
        ({"max_steps": 2}, 1, 1),  # inside an epoch
        *slow([({"max_steps": 5}, 1, 1)]),  # an epoch's end, for one process
        *slow(
            [({}, 3, 1), ({}, 3, 2), ({}, 4, 1), ({"max_steps": 5}, 1, 2), ({"max_steps": 2}, 1, 2)]
        ),
        *slow([({"max_steps": 3}, 2, 1), ({"max_steps": 3}, 2, 2)]),  # an epoch's end, for two
    ],
)
def test_a_signal_in_the_last_evaluation_costs_nothing(
    tmp_path: Path, changes: dict[str, Any], signal_at: int, num_processes: int
) -> None:
    """Fault (Signals and processes): a signal during an evaluation -> the evaluation is abandoned,
    and the resume repeats it
    """
    options: dict[str, Any] = {"num_processes": num_processes, "folder": tmp_path / "logs"}
    processes.run(train, tmp_path / "whole", changes, None, **options)
    job = processes.start(train, tmp_path / "parts", changes, signal_at, **options)
    assert job.wait() == [75] * num_processes, job.output()
    assert json.loads((tmp_path / "parts" / "result.json").read_text())["state"] == "preempted"
    for _ in range(2):  # the second time there is nothing left to do
        processes.run(train, tmp_path / "parts", changes, None, **options)
        assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def run(
    folder: Path, *callbacks: Callback, allow: tuple[str, ...] = (), **changes: Any
) -> RunResult:
    config = workload.make_config(folder, checkpoint=CheckpointConfig())
    config = replace(
        config,
        trainer=replace(config.trainer, **changes),
        run=replace(config.run, allow_change=allow),
    )
    return workload.train(config, callbacks=callbacks)


class LimitAt(Callback):
    """Reaches the time limit at a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        if report.optimizer_step == self._step:
            trainer._stop_flag.request(TIME_LIMIT)


class StopAtEvaluation(Callback):
    """Ends the run at its first evaluation, as early stopping may do."""

    def on_evaluate_end(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        trainer.request_stop("enough")


def test_the_evaluation_after_a_time_limit_does_not_end_the_run(tmp_path: Path) -> None:
    run(tmp_path / "whole", StopAtEvaluation())
    stopped = run(tmp_path / "parts", StopAtEvaluation(), LimitAt(2))
    assert (stopped.state, stopped.stop_reason) == ("stopped", "time limit")
    ended = run(tmp_path / "parts", StopAtEvaluation())
    assert (ended.state, ended.stop_reason) == ("done", "enough")
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("step", [5, 7, 10])
def test_a_run_stopped_by_a_time_limit_ends_as_one_without_it(tmp_path: Path, step: int) -> None:
    run(tmp_path / "whole")
    stopped = run(tmp_path / "parts", LimitAt(step))
    assert stopped.state == ("done" if step == 10 else "stopped")
    rows = outcome(tmp_path / "parts")["rows"]
    assert [row["optimizer_step"] for row in rows if row["event"] == "eval"] == {
        5: [5],
        7: [5, 7],
        10: [5, 10],
    }[step]
    run(tmp_path / "parts")
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


class Exits(Callback):
    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        if report.optimizer_step == 7:
            sys.exit()


def test_an_exit_from_a_callback_is_no_silent_end(tmp_path: Path) -> None:
    run(tmp_path / "whole")
    with pytest.raises(ProcessError, match="the same command continues"):
        run(tmp_path / "parts", Exits())
    run(tmp_path / "parts")
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def test_a_run_that_stops_inside_an_epoch_shows_its_last_evaluation(tmp_path: Path) -> None:
    result = run(tmp_path, max_steps=2, log_every_n_steps=50)
    assert result.best is not None
    assert result.best.name == "step-0000000002-epoch-00000"
    left = outcome(tmp_path)
    assert [(row["event"], row["optimizer_step"], row["epoch"]) for row in left["rows"]] == [
        ("train", 2, 1),
        ("eval", 2, 1),
    ]
    assert left["rows"][1]["eval/accuracy"] == left["result"]["metrics"]["eval/accuracy"]
    assert json.loads(left["best"])["name"] == result.best.name
    assert json.loads((tmp_path / "result.json").read_text())["samples_per_s"] > 0


def test_a_record_that_is_missing_or_old_is_made_by_the_next_start(tmp_path: Path) -> None:
    run(tmp_path)
    before = outcome(tmp_path)
    (tmp_path / "export" / "model.safetensors").write_bytes(b"damaged")
    (tmp_path / "result.json").write_text(json.dumps(before["result"] | {"state": "preempted"}))
    run(tmp_path)
    assert outcome(tmp_path) == before
    (tmp_path / "result.json").unlink()
    run(tmp_path)
    assert outcome(tmp_path) == before


def test_a_run_that_stopped_early_continues_with_more_patience(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_epochs": 8, "monitor": "eval/loss", "monitor_mode": "max"}
    whole = run(tmp_path / "whole", patience=3, **options)
    early = run(tmp_path / "parts", patience=1, **options)
    assert early.position.optimizer_step < whole.position.optimizer_step
    assert (
        run(tmp_path / "parts", patience=3, allow=("trainer.patience",), **options).position
        == whole.position
    )


class Counts(Callback):
    """Counts steps from a number of its own."""

    def __init__(self, start: int) -> None:
        self.count = start

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_each_of_two_callbacks_of_one_class_finds_its_own_state(tmp_path: Path) -> None:
    run(tmp_path, Counts(0), Counts(100), max_steps=4)
    counts = Counts(0), Counts(0)
    run(tmp_path, *counts)
    assert [each.count for each in counts] == [10, 110]
