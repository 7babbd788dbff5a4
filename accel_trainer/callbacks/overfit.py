"""A few windows again and again: what cannot be learnt by heart points at a mistake."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..collectives import reduce_sum
from ..tasks import ClassificationTask
from ..types import Batch, Loader, StepReport, Window
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import RunResult, Trainer

_STOP = "the loss is close to 0"
_MAX_CROSS_ENTROPY = 0.05  # 95 % of the weight on the right class
_MAX_FRACTION = 0.01  # of the first loss, whatever it measures


class FewWindows:
    """A loader of the first windows of another one, over and over, as many as that has in an epoch."""

    def __init__(self, loader: Loader, num_windows: int) -> None:
        self.plan, self._loader = loader.plan, loader
        self.num_windows = min(num_windows, loader.plan.steps_per_epoch)

    @cached_property
    def kept(self) -> list[Window]:
        """The windows, as they are in the first epoch."""
        return list(islice(self._loader.windows(0, 0), self.num_windows))

    def windows(self, epoch: int, first_step: int) -> Iterator[Window]:
        """Yield as many windows as the epoch has from `first_step` on."""
        for step in range(first_step, self.plan.steps_per_epoch):
            yield self.kept[step % self.num_windows]


class OverfitCheck(Callback):
    """Stops once each window has a loss close to 0, and says at the end whether it came to that or what to suspect."""

    is_essential = True

    def __init__(self, few: FewWindows, *, tell: Callable[[str], None]) -> None:
        self._few, self._tell = few, tell
        self._first_loss = 0.0
        self._losses: deque[float] = deque(maxlen=few.num_windows)

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        """Look at the loss. **Collective. Host sync.**"""
        self._losses.append(float(reduce_sum(report.loss_sum, trainer.accelerator)) / report.num_items)
        self._first_loss = self._first_loss or self._losses[0]
        is_classification = isinstance(trainer.task, ClassificationTask)
        limit = _MAX_CROSS_ENTROPY if is_classification else _MAX_FRACTION * self._first_loss
        if len(self._losses) == self._few.num_windows and max(self._losses) <= limit:
            trainer.request_stop(_STOP)

    def on_fit_end(self, trainer: Trainer, result: RunResult) -> None:
        """Say how it went."""
        if not self._losses or result.state == "preempted":
            return
        last, is_ok = max(self._losses), result.stop_reason == _STOP
        self._tell(
            f"overfit {'ok' if is_ok else 'FAILED'}: loss {self._first_loss:.4g} -> {last:.4g} in "
            f"{result.position.optimizer_step} steps on {self._few.num_windows} batches"
        )
        if not is_ok:
            suspects = list(_suspects(trainer, self._few.kept[0].micro_batches[0]))
            if last < 0.9 * self._first_loss:
                suspects.append("too few steps, since the loss was falling: raise --epochs, or --lr")
            else:
                suspects.append("labels that do not belong to their inputs, or --lr far too high or low")
            self._tell("\n".join(f"  suspect: {suspect}" for suspect in suspects))

    def state_dict(self) -> dict[str, Any]:
        """Return the losses that the stop is decided by."""
        return {"first_loss": self._first_loss, "losses": list(self._losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""
        self._first_loss = state["first_loss"]
        self._losses.extend(state["losses"])


def _suspects(trainer: Trainer, batch: Batch) -> Iterator[str]:
    """Yield what is unusual about the model, the task and a batch, in words. **Host sync.**"""
    model, targets = trainer.raw_model, batch.targets
    if frozen := [name for name, parameter in model.named_parameters() if not parameter.requires_grad]:
        yield f"{len(frozen)} frozen parameters (requires_grad is False), such as {frozen[0]}"
    if any(type(module).__name__.startswith("Dropout") and module.p for module in model.modules()):
        yield "dropout: set it to 0 for this"
    if isinstance(trainer.task, ClassificationTask):
        if smoothing := trainer.task.config.label_smoothing:
            yield f"label smoothing {smoothing}, which keeps the loss above 0: set it to 0 for this"
        if targets.is_floating_point():
            yield "soft targets, which keep the loss above 0: switch off what mixes samples"
    if isinstance(batch.inputs, Tensor) and len(batch) > 1:
        std, mean = torch.std_mean(batch.inputs.double())
        if abs(mean) > 3 or not 0.1 < std < 10:
            yield f"inputs with mean {mean:.3g} and standard deviation {std:.3g}: bring them to about 0 and 1"
        groups = batch.inputs.flatten(1).unique(dim=0, return_inverse=True)[1]
        labelled = torch.column_stack([groups.to(targets), targets])
        if len(labelled.unique(dim=0)) > len(groups.unique()):
            yield "equal inputs with different labels"
