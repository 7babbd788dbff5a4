"""Where a run stands. Everything else that changes with time is a pure function of this, or a tensor."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass(slots=True)
class TrainState:
    """The position of a run, the same on every process and for any number of processes.

    `optimizer_step` counts completed updates (skipped fp16 steps included: their data was consumed).
    `epoch` is the epoch in progress and `step_in_epoch` the windows consumed of it; a window is one
    optimizer step. `samples_seen` counts samples over all processes and epochs.

    The position inside an epoch is counted in windows, not in micro-batches, because the windows are
    the same for every number of processes and every accumulation: this is what lets a run continue
    on other hardware.
    """

    optimizer_step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    samples_seen: int = 0

    def advance(self, num_items: int) -> None:
        """Count one finished optimizer step over `num_items` samples."""
        self.optimizer_step += 1
        self.step_in_epoch += 1
        self.samples_seen += num_items

    def finish_epoch(self) -> None:
        """Move to the start of the next epoch."""
        self.epoch += 1
        self.step_in_epoch = 0

    def state_dict(self) -> dict[str, int]:
        """Return the position as plain integers."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take the position in `state`; a missing field is a KeyError."""
        for field in fields(self):
            setattr(self, field.name, int(state[field.name]))
