"""A run that begins with what an earlier run has changed says so; one with new objects does not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from accel_trainer import (
    BatchConfig,
    Callback,
    ClassificationTask,
    MeanLoss,
    RecipeConfig,
    RunConfig,
    TrainerConfig,
    build_trainer,
    start_run,
)


class Counts(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, trainer: Any, report: Any) -> None:
        self.steps.append(report.optimizer_step)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Reads(Callback):
    def on_step_end(self, trainer: Any, report: Any) -> None:
        trainer.log("one", 1.0)


class Mean:
    def __init__(self) -> None:
        self.value = torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Moves(Callback):
    def __init__(self, mean: Mean) -> None:
        self.mean = mean

    def on_step_end(self, trainer: Any, report: Any) -> None:
        self.mean.value = self.mean.value + 1


class Remembers(MeanLoss):
    latest = 0

    def compute(self, sums: Any) -> Any:
        self.latest += 1
        return super().compute(sums)


def train(folder: Path, **changes: Any) -> None:
    inputs = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    config = RecipeConfig(
        batch=BatchConfig(per_device_batch_size=16),
        trainer=TrainerConfig(num_epochs=1, max_steps=changes.pop("max_steps", None)),
        run=RunConfig(output_dir=folder, quiet=True, init_from=changes.pop("init_from", None)),
    )
    held_out = TensorDataset(inputs[:9] + 1, torch.ones(9).long())
    given = {"task": ClassificationTask(), "model": nn.Linear(4, 2)} | changes
    with start_run(config, recipe="again") as run:
        build_trainer(run, train_set=data, eval_sets=held_out, **given).fit()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each for each in caplog.messages if "USED_BEFORE" in each]


def parts() -> dict[str, tuple[dict[str, Any], str]]:
    mean = Mean()
    return {
        "model": ({"model": nn.Linear(4, 2)}, "model"),
        "callback": ({"callbacks": [Counts()]}, "Counts"),
        "state": ({"states": {"mean": mean}, "callbacks": [Moves(mean)]}, "the state mean"),
        "metric": ({"metrics": [Remembers()]}, "Remembers of eval"),
    }


@pytest.mark.parametrize("name", ["model", "callback", "state", "metric"])
def test_what_a_run_has_changed_is_named_by_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    given, part = parts()[name]
    train(tmp_path / "0", **given)
    assert said(caplog) == []
    train(tmp_path / "1", **given)
    (line,) = said(caplog)
    assert part in line


@pytest.mark.parametrize("case", ["new", "set back", "resumed", "from the run", "only reads"])
def test_a_run_that_begins_anew_or_goes_on_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    model, callbacks = nn.Linear(4, 2), [Reads()]
    start = copy.deepcopy(model.state_dict())
    train(tmp_path / "0", model=model, callbacks=callbacks, max_steps=2)
    if case == "new":
        train(tmp_path / "1", callbacks=callbacks)
    elif case == "set back":
        model.load_state_dict(start)
        train(tmp_path / "1", model=model, callbacks=callbacks)
    elif case == "resumed":
        train(tmp_path / "0", model=model, callbacks=callbacks)
    elif case == "only reads":
        train(tmp_path / "1", callbacks=callbacks)
    else:
        train(tmp_path / "1", callbacks=callbacks, init_from=tmp_path / "0")
    assert said(caplog) == []
