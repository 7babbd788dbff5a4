"""How far a run has come: its data, learning rates and random numbers follow from that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class TrainState(NamedTuple):
    """How far a run has come, the same on every process and for any number of processes.

    `optimizer_step` counts completed steps, including skipped fp16 steps, whose data was consumed.
    `epoch` is the epoch in progress, and `step_in_epoch` the number of its step batches that were
    consumed, one per optimizer step. `samples_seen` counts samples over all processes and epochs.

    Step batches, unlike micro-batches, are the same for any number of processes and any
    accumulation, so that a run can continue on other hardware.
    """

    optimizer_step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    samples_seen: int = 0

    def after_step(self, num_samples: int) -> TrainState:
        """Return the state after one more optimizer step, over `num_samples` samples."""
        return TrainState(
            self.optimizer_step + 1,
            self.epoch,
            self.step_in_epoch + 1,
            self.samples_seen + num_samples,
        )

    def after_epoch(self) -> TrainState:
        """Return the start of the next epoch."""
        return self._replace(epoch=self.epoch + 1, step_in_epoch=0)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainState:
        """Return the state that `values` has by name. Raises KeyError if a part is missing."""
        return cls(*(int(values[name]) for name in cls._fields))


def checkpoint_name(state: TrainState) -> str:
    """Return the name of the checkpoint at `state`. Names sort as a run goes on.

    A step that ends an epoch has two states: before and after the epoch's evaluation.
    """
    return f"step-{state.optimizer_step:010d}-epoch-{state.epoch:05d}"


Weights = Literal["model", "ema"]
"""Which weights of a run: those that are trained, or their average."""


Mode = Literal["max", "min"]
"""Whether a larger or a smaller value of a number is better."""


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint with the best value of a metric, which is kept until there is a better one."""

    name: str
    metric: str
    value: float
    mode: Mode = "max"

    @property
    def weights(self) -> Weights:
        """The weights that the metric was measured with."""
        return "ema" if self.metric.startswith("eval_ema") else "model"
