"""The rows of a run, as its result returns them."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

from accel_trainer import RunResult, read_history
from accel_trainer.core.train_state import TrainState
from tests import workload


def test_the_history_has_the_rows_of_all_attempts_of_a_run(tmp_path: Path) -> None:
    config = workload.make_config(tmp_path)
    early = workload.train(replace(config, trainer=replace(config.trainer, max_steps=5)))
    assert {row["epoch"] for row in early.history} == {1}
    result = workload.train(config)
    assert result.history == list(read_history(tmp_path))
    assert [row["epoch"] for row in result.history if row["event"] == "eval"] == [1, 2]
    assert early.history == result.history, "it is read when asked for"
    sent = pickle.loads(pickle.dumps(result))  # as `launch` does
    assert sent.history == result.history
    shutil.rmtree(tmp_path)
    assert result.history == []


def test_nan_and_inf_of_the_history_are_floats(tmp_path: Path) -> None:
    row = {"event": "train", "a": "nan", "b": "inf", "c": "-inf", "d": 1.5, "e": [1]}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = RunResult("done", "", TrainState(), {}, None, tmp_path).history
    assert math.isnan(found.pop("a"))
    assert found == {"event": "train", "b": math.inf, "c": -math.inf, "d": 1.5, "e": [1]}
