"""What a checkpoint holds of the loop itself, besides the model and its optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelerate.utils import recursively_apply
from torch import Tensor

from ..core.registry import StateDict, Stateful

if TYPE_CHECKING:
    from .callback_runner import CallbackRunner
    from .log import Log
    from .progress import Progress
    from .step.nonfinite_report import NonfiniteReport


@dataclass(eq=False)
class LoopState(Stateful):
    """The progress, the latest skipped steps, the callbacks, and the numbers for the next row."""

    progress: Progress
    nonfinite: NonfiniteReport
    callbacks: CallbackRunner
    log: Log

    def state_dict(self) -> StateDict:
        """Return plain values and tensors. **Collective** if the state of a callback is."""
        return {
            **self.progress.state_dict(),
            "skipped_steps": self.nonfinite.skipped_steps,
            "callbacks": self.callbacks.state_dict(),
            "log": self.log.settle(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what `state_dict` returned."""
        self.progress.load_state_dict(state)
        self.nonfinite.skipped_steps = state["skipped_steps"]
        # In memory of their own, as in `load_all`.
        self.callbacks.load_state_dict(recursively_apply(Tensor.clone, state["callbacks"]))
        self.log.pending = state["log"]
