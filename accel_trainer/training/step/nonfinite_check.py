"""Steps the optimizers, unless a gradient is NaN or inf."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from ...core.buffers import StepBuffers
from ...core.parameters import Optimizers
from ...core.shards import is_shard, local_part
from ...distributed.streams import has_streams
from ..strategy.base import Strategy
from .nonfinite_report import NonfiniteReport, PendingUpdate
from .plain_step import take_step
from .turns import in_turn

# A gradient that overflows even below this scale is NaN or inf, not a float16 overflow.
_MIN_LOSS_SCALE = 1e-3


@dataclass(eq=False)
class NonfiniteCheck:
    """Applies updates, unless a gradient is NaN or inf: the host waits for the flag that says so.

    A step whose update is not applied leaves no trace in the `buffers`, and is reported.
    """

    strategy: Strategy
    _: KW_ONLY
    optimizers: Optimizers
    parameters: list[Tensor]
    buffers: StepBuffers
    report: NonfiniteReport

    def __post_init__(self) -> None:
        # Stays 1 until it is reset: while the check is deferred, no later update is applied either.
        self._found = torch.zeros((), device=self.strategy.accelerator.device, dtype=torch.float32)
        self._one = torch.ones_like(self._found)
        self._has_shards = any(map(is_shard, self.parameters))

    def apply(self, update: PendingUpdate, grad_norm: Tensor | None) -> bool:
        """Step the optimizers that have the turn; return whether the step was skipped instead.

        **Collective. Host sync**, unless the check is deferred.

        Raises DivergedError if a gradient is NaN or inf, and the run must end.
        """
        is_skipped = self._is_skipped(update, grad_norm)
        if not is_skipped:
            for optimizer in in_turn(self.optimizers, update.step_batch.turn).values():
                take_step(optimizer)
        return is_skipped

    def settle(self) -> None:
        """Report an update that the host has not looked at yet, if it was bad. **Collective.**

        Raises DivergedError.
        """

    def _is_skipped(self, update: PendingUpdate, grad_norm: Tensor | None) -> bool:
        if not self.find(grad_norm):
            return False
        self._found.zero_()
        self._undo(update)
        return True

    def find(self, grad_norm: Tensor | None = None) -> Tensor:
        """Return a flag [] on the device: 1 if a gradient, or their norm, is NaN or inf.

        **Collective** with shards; else all processes have the same gradients. The flag also stays
        1 after a bad update that has not been reported yet.
        """
        # The norm is NaN or inf if any gradient is.
        if grad_norm is None:
            gradients = [each.grad for each in self.parameters if each.grad is not None]
            if self._has_shards:
                gradients = [*map(local_part, gradients)]
        else:
            gradients = [grad_norm]
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found, self._one)
        return self.strategy.is_on_any_process(self._found)

    def _undo(self, update: PendingUpdate, *, steps_ago: int = 0) -> None:
        """Undo what the forwards of a bad step changed, and report it. **Collective.**"""
        self.buffers.restore(steps_ago=steps_ago)
        self.report(update)


class DeferredCheck(NonfiniteCheck):
    """Lets the kernel of each optimizer read the flag on the device (`found_inf`), as GradScaler.

    The kernel applies no bad update, and the host reads the flag one step later: what `apply`
    raises is about the step before.
    """

    _pending: PendingUpdate | None = None
    _copied: torch.Event | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # Each update writes it once that of the update before has been read.
        self._flag = torch.empty((), dtype=self._found.dtype, pin_memory=True)

    def _is_skipped(self, update: PendingUpdate, grad_norm: Tensor | None) -> bool:
        found = self.find(grad_norm)
        for optimizer in self.optimizers.values():
            optimizer.found_inf = found  # type: ignore[attr-defined]
        self._read(steps_ago=1)
        self._flag.copy_(self._found, non_blocking=True)
        stream = torch.accelerator.current_stream(self._found.device)
        self._copied = stream.record_event(self._copied)
        self._pending = update
        return False

    def settle(self) -> None:
        """Wait for the flag of the last update, if that is pending. **Collective. Host sync.**

        Raises DivergedError: the update was bad.
        """
        self._read(steps_ago=0)

    def _read(self, *, steps_ago: int) -> None:
        update = self._pending
        self._pending = None
        if update is not None and self._copied is not None:
            self._copied.synchronize()
            if self._flag:
                self._undo(update, steps_ago=steps_ago)


class ScaledCheck(NonfiniteCheck):
    """Steps with loss scaling: an overflow skips the step, and only NaN or inf is reported."""

    def apply(self, update: PendingUpdate, grad_norm: Tensor | None) -> bool:
        """As of every check. **Collective. Host sync.**"""
        accelerator = self.strategy.accelerator
        scaler = accelerator.scaler
        is_finite = not self.find()
        self._found.zero_()
        scale = scaler.get_scale()
        if is_finite:
            for optimizer in in_turn(self.optimizers, update.step_batch.turn).values():
                scaler.step(optimizer)
        scaler.update()
        # It has skipped the step, too, if `train_step` has replaced gradients that overflowed.
        has_overflowed = scaler.get_scale() < scale
        if is_finite and not has_overflowed:
            return False
        self.buffers.restore()
        # NaN or inf in a loss of some process, or after unscaling, which no loss scale fixes.
        is_bad = ~torch.isfinite(torch.stack([*update.losses])).all()
        is_bad |= not has_overflowed
        if accelerator.reduce(is_bad.float()) > 0 or scaler.get_scale() < _MIN_LOSS_SCALE:
            self.report(update)
        return True


def choose_check(
    strategy: Strategy, *, optimizers: Optimizers, report: NonfiniteReport
) -> type[NonfiniteCheck]:
    """Return how a run keeps bad updates out: the host waits for the flag only if it must.

    The check is deferred on an accelerator with streams and with fused optimizers, unless the run
    may skip steps.
    """
    if strategy.accelerator.scaler is not None:
        return ScaledCheck
    groups = [group for each in optimizers.values() for group in each.param_groups]
    is_deferred = (
        not report.may_skip
        and all(group.get("fused") for group in groups)
        and has_streams(strategy.accelerator.device)
        and not strategy.has_collective_forward
    )
    return DeferredCheck if is_deferred else NonfiniteCheck
