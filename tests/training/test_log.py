"""What is kept of logged values until a row, without a trainer."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_trainer import ConfigError
from accel_trainer.core.train_state import TrainState
from accel_trainer.fault_tolerance.activity import Activity
from accel_trainer.training.log import Log

PNG = b"\x89PNG\r\n\x1a\nand so on"


@pytest.fixture
def log(tmp_path: Path) -> Log:
    activity = Activity()
    activity.state = TrainState(optimizer_step=12)
    return Log(tmp_path, activity, is_main_process=True)


def test_a_row_has_the_mean_of_what_was_logged_since_the_last_one(log: Log) -> None:
    log("noise", 1)
    log("noise", torch.tensor(2.5))
    log("mine/count", torch.tensor(2**40))
    assert log.read() == {"log/noise": 1.75, "mine/count": float(2**40)}
    log("noise", 3.0)
    assert log.read() == {"log/noise": 3.0}
    assert log.read() == {}


def test_a_mean_is_the_same_wherever_it_was_saved_and_loaded(tmp_path: Path) -> None:
    chance = random.Random(0)
    values = [chance.random() * 10 ** chance.randint(-8, 8) for _ in range(200)]
    expected = 0.0
    for value in values:
        expected += value
    for _ in range(10):
        log = Log(tmp_path, Activity(), is_main_process=True)
        for value in values:
            log("x", torch.tensor(value, dtype=torch.float64))
            if chance.random() < 0.1:
                state = json.loads(json.dumps(log.settle()))  # plain values
                log = Log(tmp_path, Activity(), is_main_process=True)
                log.pending = state
        assert log.read() == {"log/x": expected / len(values)}


def test_a_tensor_is_not_read_when_it_is_logged(log: Log) -> None:
    unreadable = torch.empty((), device="meta")  # any host sync would raise an error
    log("number", unreadable)
    with pytest.raises((NotImplementedError, RuntimeError)):
        log.read()


def test_a_tensor_that_changes_later_counts_as_it_was(log: Log) -> None:
    total = torch.tensor(1.0)
    log("total", total)
    total += 1
    assert log.read() == {"log/total": 1.0}


def test_a_logged_loss_keeps_no_graph(log: Log) -> None:
    log("loss", torch.ones(3, requires_grad=True).sum())
    _, _, kept = log.pending["log/loss"]
    assert not kept.requires_grad


def test_other_processes_keep_nothing(tmp_path: Path) -> None:
    log = Log(tmp_path, Activity(), is_main_process=False)
    log("a", 1.0)
    log.picture("c", PNG)
    assert log.read() == {}
    assert list(tmp_path.iterdir()) == []


# --- pictures ---


def test_a_picture_lies_in_the_run_under_its_name_and_step(log: Log, tmp_path: Path) -> None:
    log.picture("a/..x/b", PNG)
    (path,) = (tmp_path / "pictures").iterdir()
    assert path.name == "a=..x=b-step-0000000012.png"
    assert path.read_bytes() == PNG
    assert log.read() == {"a/..x/b": {"picture": f"pictures/{path.name}"}}


@pytest.mark.parametrize("picture", [torch.zeros(3, 4, 4), b"\xff\xd8\xff\xe0JFIF", "a.png"])
def test_a_picture_that_is_no_png_is_told_what_to_give(log: Log, picture: Any) -> None:
    said = ": give the bytes of a PNG, such as accel_trainer.vision.to_png(picture)"
    with pytest.raises(ConfigError, match=rf"log/x is of type \w+{re.escape(said)}"):
        log.picture("x", picture)


# --- names and values ---


@pytest.mark.parametrize(
    "name",
    [
        *("train/loss", "train/x", "optim/grad_norm", "perf/samples_per_s", "eval/loss"),
        *("eval_ema/x", "eval_my-set/x", "", "/", "a/", "/a", "a b", "a\n", "\x1b[0m", "ü"),
        *("x" * 41, "a/b/c/d/e", "<b>", "..", ".", "a/..", "../a", "a/../b", "...", "a\0"),
    ],
)
@pytest.mark.parametrize("is_main", [True, False])
def test_a_name_of_the_engine_or_a_strange_one_is_one_line(
    tmp_path: Path, name: str, is_main: bool
) -> None:
    log = Log(tmp_path, Activity(), is_main_process=is_main)
    calls: list[Any] = [(log, 1.0), (log.picture, PNG)]
    for call, value in calls:
        with pytest.raises(ConfigError, match=r"^\[?.*nothing can be logged as .*: give ") as error:
            call(name, value)
        assert "\n" not in str(error.value)
    assert log.pending == {}


@pytest.mark.parametrize("value", [torch.ones(1), torch.ones(2, 3), [1.0, 2.0], "1", None, {}])
def test_only_single_numbers_are_logged(log: Log, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"log/x is of type \w+: log one number, or a tensor"):
        log("x", value)


def test_a_number_needs_a_name_that_no_picture_has(log: Log) -> None:
    log.picture("x", PNG)
    with pytest.raises(ConfigError, match="log/x is also a picture: rename one"):
        log("x", 1.0)


def test_a_name_may_be_a_number(log: Log) -> None:
    log(3, 1.0)  # type: ignore[arg-type]
    assert log.read() == {"log/3": 1.0}
