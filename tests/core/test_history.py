"""The rows of a run, as its result returns them."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from accel_trainer import ConfigError, RunResult, read_history
from accel_trainer.core.history import check_name
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


GOOD_NAMES = (
    "loss",
    "top5_accuracy",
    "f1 (macro)",
    "AP50:95",
    "a/b",
    "..x",
    "x..",
    "Größe",
    "%",
    "v1.2",
)
BAD_NAMES = ("", "/", "a/", "/a", "a//b", ".", "..", "a/../b", " ", "x" * 151)
BAD_PARTS = ("\0", "\n", "\r", "\x1b[0m", "\u2028", "\u202e", "\x85", "\ud800", "\u200b")


def test_a_name_is_one_that_rows_tables_and_files_can_have() -> None:
    for name in (*GOOD_NAMES, "x" * 150):
        check_name(name, "a metric")
    inserted = (name + part + "x" for name, part in itertools.product(GOOD_NAMES, BAD_PARTS))
    for name in (*BAD_NAMES, *BAD_PARTS, *inserted):
        with pytest.raises(ConfigError, match="NAME.*a metric has a number named") as error:
            check_name(name, "a metric")
        assert len(str(error.value)) < 260
        assert "\n" not in str(error.value)
