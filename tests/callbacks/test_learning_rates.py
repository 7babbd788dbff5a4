"""Rows have the learning rates with which the parameters were stepped."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from accel_trainer import (
    BatchConfig,
    Callback,
    ClassificationTask,
    Gradients,
    RecipeConfig,
    RunConfig,
    ScheduleConfig,
    TrainerConfig,
    build_trainer,
    start_run,
)
from accel_trainer.callbacks.learning_rates import learning_rates
from accel_trainer.core.learning_rate import RATIO, SCALE, set_learning_rate
from accel_trainer.training.callback import TrainerView

ROWS = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(ROWS, (ROWS.sum(1) > 0).long())


def optimizer_with(factors: list[tuple[float, float]], *, as_tensor: bool = False) -> SGD:
    rate: Any = torch.tensor(1.0) if as_tensor else 1.0
    groups = [
        {"params": [nn.Parameter(torch.zeros(2))], RATIO: ratio, SCALE: scale, "lr": rate}
        for ratio, scale in factors
    ]
    return SGD(groups, lr=rate)


def test_a_row_has_each_rate_of_each_optimizer_once() -> None:
    drawn = random.Random(0)
    for _ in range(200):
        optimizers = {}
        for name in drawn.choice([("",), ("critic", "actor")]):
            factors = [
                (drawn.choice((1.0, 0.5, 2.0)), drawn.choice((1.0, 0.25)))
                for _ in range(drawn.randrange(1, 5))
            ]
            optimizers[name] = optimizer_with(factors)
            set_learning_rate(optimizers[name], 0.3)
        found = learning_rates(optimizers)
        for name, optimizer in optimizers.items():
            place = f"optim/{name}/" if name else "optim/"
            mine = {rate for key, rate in found.items() if key.startswith(place + "learning_rate")}
            assert {group["lr"] for group in optimizer.param_groups} == mine
        assert found["optim/learning_rate"] == next(iter(found.values()))
        following = [
            group["lr"]
            for group in next(iter(optimizers.values())).param_groups
            if group[RATIO] == 1 == group[SCALE]
        ]
        assert not following or found["optim/learning_rate"] == 0.3


def test_rates_that_are_tensors_are_numbers_in_a_row() -> None:
    optimizer = optimizer_with([(1.0, 1.0)], as_tensor=True)
    set_learning_rate(optimizer, 0.25)
    assert learning_rates({"": optimizer}) == {"optim/learning_rate": 0.25}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.body(rows))


class Factor(Callback):
    """Multiplies the rates of the second optimizer by a factor of its own."""

    def __init__(self) -> None:
        self.moved: list[float] = []

    def before_update(self, trainer: TrainerView, gradients: Gradients) -> None:
        self._before = trainer.model.head.bias.detach().clone()
        self._gradient = gradients.tensors["head.bias"].clone()
        trainer.optimizers["head"].param_groups[0][SCALE] = 0.5

    def on_step_end(self, trainer: TrainerView, report: Any) -> None:
        moved = (self._before - trainer.model.head.bias) / self._gradient
        self.moved.append(float(moved.detach().median()))


def test_a_factor_is_multiplied_and_the_row_has_the_real_rate(tmp_path: Path) -> None:
    config = RecipeConfig(
        batch=BatchConfig(global_batch_size=8),
        trainer=TrainerConfig(num_epochs=1, log_every_n_steps=1),
        schedule=ScheduleConfig(shape="constant"),
        run=RunConfig(output_dir=tmp_path, quiet=True),
    )
    factor = Factor()
    with start_run(config, recipe="rates") as run:
        build_trainer(
            run,
            model=Net(),
            task=ClassificationTask(),
            train_set=DATA,
            eval_sets=DATA,
            callbacks=[factor],
            optimizer={
                "body": lambda model: SGD(model.body.parameters(), lr=0.05),
                "head": lambda model: SGD(model.head.parameters(), lr=0.2),
            },
        ).fit()
    rows = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    trained = [row for row in rows if row["event"] == "train"]
    assert len(trained) == len(factor.moved) == 4
    for row, moved in zip(trained, factor.moved, strict=True):
        assert row["optim/learning_rate"] == row["optim/body/learning_rate"] == 0.05
        assert row["optim/head/learning_rate"] == pytest.approx(0.1)
        assert moved == pytest.approx(0.1, rel=1e-3)
