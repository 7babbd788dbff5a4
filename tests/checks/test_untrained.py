"""An optimizer that has trained nothing in a whole run is named at its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from accel_trainer import (
    BatchConfig,
    ClassificationTask,
    RecipeConfig,
    RunConfig,
    StepBatch,
    StepReport,
    Trainer,
    TrainerConfig,
    build_trainer,
    start_run,
)


class OneTurn(ClassificationTask):
    def turn(self, position: Any) -> str:
        return "body"


class LateTurn(ClassificationTask):
    def turn(self, position: Any) -> str:
        return "body" if position.epoch < 1 else "head"


class Drops(Trainer):
    def train_step(self, step_batch: StepBatch) -> StepReport:
        return self.apply_gradients(self.compute_gradients(step_batch).map(lambda tensor: None))  # type: ignore[arg-type,return-value]


class Detached(nn.Sequential):
    def forward(self, inputs: Any) -> Any:
        return self[1](self[0](inputs).detach())


def sgd(place: int, rate: float = 0.1) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model[place].parameters(), lr=rate)


BOTH = {"body": sgd(0), "head": sgd(1)}


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("the optimizer head", {"task": OneTurn(), "optimizer": BOTH}),
        ("the optimizer body", {"model": Detached, "optimizer": BOTH}),
        ("the optimizer", {"trainer_class": Drops}),
        ("", {"task": LateTurn(), "optimizer": BOTH}),
        ("", {"optimizer": BOTH}),
        ("", {}),
    ],
    ids=["no turn", "detached", "dropped", "late turn", "both", "one"],
)
def test_an_optimizer_that_trains_nothing_is_named_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, named: str, changes: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(48, 4)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    config = RecipeConfig(
        batch=BatchConfig(per_device_batch_size=16),
        trainer=TrainerConfig(num_epochs=2),
        run=RunConfig(output_dir=tmp_path / "run", quiet=True),
    )
    model = changes.pop("model", nn.Sequential)(nn.Linear(4, 4), nn.Linear(4, 2))
    held_out = TensorDataset(inputs[:9] + 1, torch.ones(9).long())
    with start_run(config, recipe="untrained") as run:
        build_trainer(
            run,
            model=model,
            train_set=data,
            eval_sets=held_out,
            **{"task": ClassificationTask(), **changes},
        ).fit()
    lines = [each for each in caplog.messages if "UNTRAINED" in each]
    assert len(lines) == bool(named)
    assert all(f"no parameter of {named}: " in line for line in lines)
