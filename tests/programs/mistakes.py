"""Parts that break a promise: a program with one of them must end otherwise."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from accel_trainer import Batch, Callback, StepOutput, StepReport, Trainer

from .draft import Draft
from .models import Folding, Net
from .training import Around


class Forgets(Around):
    """Counts its steps, and weighs the losses by the number."""

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        self.count = 0

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        self.count += 1
        return output._replace(losses=output.losses * (1 + 1 / self.count))


class Hides(Around):
    """Counts its steps where no walk through its attributes comes: in a pipe."""

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        self.ends = os.pipe()
        os.write(self.ends[1], b"\1")

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        count = os.read(self.ends[0], 1)[0]
        os.write(self.ends[1], bytes([count + 1]))
        return output._replace(losses=output.losses * (1 + 1 / count))


class OwnMean(Around, Callback):
    """Weighs the losses by a running mean of its own process's outputs."""

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        self.mean = self.last = torch.zeros(())

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        return output._replace(losses=output.losses * (1 + self.mean.tanh()))

    def on_micro_batch(self, trainer: Trainer, batch: Batch, output: StepOutput) -> None:
        self.last = output.outputs.float().mean()

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        self.mean = self.mean.lerp(self.last, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "last": self.last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean, self.last = state["mean"], state["last"]


class NeverUnfolds(Folding):
    """Keeps what it has folded once."""

    def train(self, mode: bool = True) -> Folding:
        kept = self.folded
        super().train(mode)
        self.folded = kept
        return self


def forgets(draft: Draft) -> None:
    draft.task = Forgets(draft.task)


def hides(draft: Draft) -> None:
    draft.task = Hides(draft.task)


def differs_by_process(draft: Draft) -> None:
    draft.task = OwnMean(draft.task)
    draft.callbacks.append(draft.task)


def never_unfolds(draft: Draft) -> None:
    draft.model = Net(nn.Sequential(NeverUnfolds(), nn.Tanh()))


MISTAKES: dict[str, Callable[[Draft], None]] = {
    "a count that is not saved": forgets,
    "a count in a pipe": hides,
    "a state of one process": differs_by_process,
    "weights that stay folded": never_unfolds,
}
