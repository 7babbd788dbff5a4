"""`attempts.jsonl`: what a run says of its starts, and of where the time went."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel_trainer import RunResult
from accel_trainer.callbacks.result import write_result
from accel_trainer.core.train_state import TrainState

from .. import processes, workload


def attempt(folder: Path, max_steps: int | None) -> None:
    config = workload.make_config(folder)
    workload.train(replace(config, trainer=replace(config.trainer, max_steps=max_steps)))


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]


def test_each_start_and_end_of_a_run_is_a_row_with_its_step(tmp_path: Path) -> None:
    for max_steps in (3, 7, None, None):
        attempt(tmp_path, max_steps)
    told = [(row["event"], row["optimizer_step"]) for row in rows(tmp_path)]
    assert told == [
        ("start", 0),
        ("end", 3),
        ("start", 3),
        ("end", 7),
        ("start", 7),
        ("end", 10),
    ], "a run that finds nothing left to train is no attempt"
    times = [row["time"] for row in rows(tmp_path)]
    assert times == sorted(times)


def test_each_second_of_an_attempt_belongs_to_one_phase(tmp_path: Path) -> None:
    attempt(tmp_path, None)
    start, end = rows(tmp_path)
    assert set(end["phase_s"]) == {"start", "training", "evaluation", "save", "disk"}
    assert all(seconds > 0 for seconds in end["phase_s"].values())
    from_the_first_step = sum(
        seconds for phase, seconds in end["phase_s"].items() if phase != "start"
    )
    assert from_the_first_step <= end["time"] - start["time"]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["wall_s"] == sum(end["phase_s"].values()), "there is one clock"


def test_two_processes_write_one_row_each_time(tmp_path: Path) -> None:
    processes.run(attempt, tmp_path / "run", 2, num_processes=2, folder=tmp_path / "logs")
    assert [row["event"] for row in rows(tmp_path / "run")] == ["start", "end"]
    assert rows(tmp_path / "run")[0]["num_processes"] == 2


def test_the_result_is_json_without_nan_and_inf(tmp_path: Path) -> None:
    metrics = {"eval/a": float("nan"), "eval/b": [1.0, float("inf")], "eval/c": {"d": -math.inf}}
    result = RunResult("done", "", TrainState(), metrics, None, folder=tmp_path)
    write_result(tmp_path, result, {}, {})
    text = (tmp_path / "result.json").read_text()
    found = json.loads(text, parse_constant=pytest.fail)["metrics"]
    assert found == {"eval/a": "nan", "eval/b": [1.0, "inf"], "eval/c": {"d": "-inf"}}
