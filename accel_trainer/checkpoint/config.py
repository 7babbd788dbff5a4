"""The settings of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ..core.config import AT_LEAST_ONE, NOT_NEGATIVE, Config, Range, short_flag
from ..core.train_state import TrainState


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Config):
    """When checkpoints are saved, and which are kept."""

    every_n_steps: Annotated[int | None, short_flag("--checkpoint-every-n-steps")] = None
    """Save every n optimizer steps; None: only at the end of epochs, with `trainer.num_steps` also
    every 1000 and at each evaluation."""
    every_n_epochs: int = 1
    """Save at the end of every n-th epoch."""
    keep_last_n: int = 2
    """How many of the newest checkpoints to keep: at least 2, in case the newest is damaged."""
    keep_every_n_steps: int | None = None
    """Also keep, for good, the checkpoints at multiples of this many optimizer steps; None: no
    others."""
    keep_for_replay: int = 0
    """Also keep up to this many older checkpoints, evenly spread over the run: commands that
    retrain part of the run start at the nearest one."""
    max_failed_saves: int = 3
    """End the run after this many failed saves in a row; until then a failed save is a warning."""

    def __post_init__(self) -> None:
        names = ("every_n_steps", "every_n_epochs", "keep_every_n_steps", "max_failed_saves")
        AT_LEAST_ONE.check(self, "checkpoint", *names)
        NOT_NEGATIVE.check(self, "checkpoint", "keep_for_replay")
        Range("to 2 or more", lambda number: number >= 2).check(self, "checkpoint", "keep_last_n")

    def is_due(self, state: TrainState) -> bool:
        """Whether a checkpoint is due at `state`."""
        step = state.optimizer_step
        is_epoch_due = state.step_in_epoch == 0 and state.epoch % self.every_n_epochs == 0
        is_step_due = self.every_n_steps is not None and step % self.every_n_steps == 0
        return step > 0 and (is_epoch_due or is_step_due)
