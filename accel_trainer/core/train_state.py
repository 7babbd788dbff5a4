"""The position of a run. All other changing state is a pure function of it, or tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Literal


@dataclass(slots=True)
class TrainState:
    """The position of a run, the same on every process and for any number of processes.

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

    def advance(self, num_samples: int) -> None:
        """Count one finished optimizer step over `num_samples` samples."""
        self.optimizer_step += 1
        self.step_in_epoch += 1
        self.samples_seen += num_samples

    def finish_epoch(self) -> None:
        """Move to the start of the next epoch."""
        self.epoch += 1
        self.step_in_epoch = 0

    def state_dict(self) -> dict[str, int]:
        """Return the position as plain integers."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the position from `state`. Raises KeyError if a field is missing."""
        for field in fields(self):
            setattr(self, field.name, int(state[field.name]))


def checkpoint_name(position: TrainState) -> str:
    """Return the name of the checkpoint at `position`. Names sort as positions do.

    A step that ends an epoch has two positions: before and after the epoch's evaluation.
    """
    return f"step-{position.optimizer_step:010d}-epoch-{position.epoch:05d}"


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint with the best value of a metric, which is kept until there is a better one."""

    name: str
    metric: str
    value: float
    mode: Literal["max", "min"] = "max"
    """Whether a larger or a smaller value is better."""

    @property
    def weights(self) -> Literal["model", "ema"]:
        """The weights that the metric was measured with."""
        return "ema" if self.metric.startswith("eval_ema") else "model"
