"""The moments of a training at which somebody may look at it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from ..core.registry import Pieces
from ..core.types import StepReport
from .callback import TrainerView
from .callback_runner import Watch

ReadState = Callable[[], Pieces]
"""Returns what a checkpoint would hold now, perhaps with this process's shards."""

ReadAttributes = Callable[[], Mapping[str, object]]
"""Returns what a subclass of Trainer keeps, by name."""


class Inspector:
    """Sees a training at each of these moments, and raises an error to end it; this one does not.

    The moments are the same on all processes. A training with another inspector has the same bits:
    an inspector changes nothing.
    """

    def begin(
        self, trainer: TrainerView, read_state: ReadState, attributes: ReadAttributes
    ) -> None:
        """The trainer is to train, from its start or from a checkpoint."""

    def step(self) -> None:
        """A step begins."""

    def computing(self) -> None:
        """Gradients of the step are to be computed, perhaps not for the first time."""

    def computed(self) -> None:
        """These gradients are computed."""

    def update(self) -> None:
        """The weights are to be updated."""

    def stepped(self) -> None:
        """The step has ended, and no hook has seen it yet."""

    def boundary(self, report: StepReport) -> Inspector:
        """The hooks have seen the step; return who looks at the next one."""
        return self

    def measuring(self, name: str, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context for the evaluation `name` of the model, or of its average."""
        return nullcontext()

    def epoch_end(self) -> AbstractContextManager[None]:
        """Return a context for the last evaluation of an epoch and its hooks."""
        return nullcontext()

    def save(self, pieces: Pieces) -> None:
        """A checkpoint of `pieces`, perhaps with this process's shards, is to be saved."""

    def hook(self, name: str) -> Watch | None:
        """Return what gives a context for each call of the hook `name`, None for no context."""
        return None
