"""A recipe whose part is chosen by a flag: some hide state, one fails, and one is plain."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from accel_trainer import Callback, MeanLoss, RecipeConfig, RunResult, StepOutput, main
from accel_trainer.core.types import Batch
from tests.training import planted


@dataclass(frozen=True, kw_only=True)
class Config(RecipeConfig):
    """The settings of the recipe."""

    part: str = "plain"
    """Which of `PARTS` it has."""


class Shrinks(Callback):
    """Counts steps, without a state_dict, and shrinks the weights at the sixth."""

    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, trainer: Any, report: Any) -> None:
        self.count += 1
        if self.count == 6:
            with torch.no_grad():
                trainer.model.linear.weight.mul_(0.5)


class Remembering(MeanLoss):
    """Averages over all evaluations so far."""

    higher_is_better = {"smooth": False}

    def __init__(self) -> None:
        self.values: list[float] = []

    def compute(self, totals: Any) -> dict[str, float]:
        self.values += super().compute(totals).values()
        return {"smooth": sum(self.values) / len(self.values)}


class OfWorker:
    """Adds the number of the data worker."""

    def __init__(self, num: int) -> None:
        self._vectors = planted.vectors(num)

    def __len__(self) -> int:
        return len(self._vectors)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        vector, label = self._vectors[index]
        worker = get_worker_info()
        return vector + (0 if worker is None else 1 + worker.id), label


class Tally(planted.PlainTask):
    """Weighs by the length of a file in the current folder, which it makes longer."""

    def step(self, model: Any, batch: Batch) -> StepOutput:
        with Path("tally.txt").open("a+") as file:
            file.write("x")
            weight = file.tell()
        output = super().step(model, batch)
        return StepOutput(output.losses * weight, output.outputs)


class Interrupts(Callback):
    """Sends Ctrl-C to the command that tests the recipe, in a step."""

    def on_step_end(self, trainer: Any, report: Any) -> None:
        if report.optimizer_step == 6:
            os.kill(int(os.environ["INTERRUPTED"]), signal.SIGINT)
            time.sleep(600)


class Timed(Callback):
    """Logs a number that is another in each run."""

    def on_step_end(self, trainer: Any, report: Any) -> None:
        trainer.log("own/address", id(self) % 10007)


def _fail(num: int) -> Any:
    raise ValueError("no such data")


PARTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "callback": {"callbacks": Shrinks},
    "metric": {"metrics": Remembering},
    "worker": {"data": OfWorker},
    "file": {"task": Tally},
    "interrupt": {"callbacks": Interrupts},
    "time": {"callbacks": Timed},
    "broken": {"data": _fail},
}


def train(config: Config) -> RunResult:
    """Train on vectors."""
    parts = dict(PARTS[config.part])
    for name in {"callbacks", "metrics"} & parts.keys():
        parts[name] = (parts[name](),)
    return planted.train(config, **parts)


if __name__ == "__main__":
    main(train, Config)
