"""What a checkpoint holds of the loop itself, besides the model and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accelerate.utils import recursively_apply
from torch import Tensor

from ..core.registry import Stateful

if TYPE_CHECKING:
    from ..core.log import Log
    from .callback_runner import CallbackRunner
    from .nonfinite_report import NonfiniteReport
    from .progress import Progress


class LoopState(Stateful):
    """The progress, the latest skipped steps, the callbacks, and the numbers for the next row."""

    def __init__(
        self, progress: Progress, nonfinite: NonfiniteReport, callbacks: CallbackRunner, log: Log
    ) -> None:
        self._progress = progress
        self._nonfinite = nonfinite
        self._callbacks = callbacks
        self._log = log

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors. **Collective** if the state of a callback is."""
        return {
            **self._progress.state_dict(),
            "skipped_steps": self._nonfinite.skipped_steps,
            "callbacks": self._callbacks.state_dict(),
            "log": self._log.settle(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._progress.load_state_dict(state)
        self._nonfinite.skipped_steps = state["skipped_steps"]
        # In memory of their own, as in `load_all`.
        callbacks = recursively_apply(Tensor.clone, state["callbacks"])
        self._callbacks.load_state_dict(callbacks)
        self._log.pending = state["log"]
