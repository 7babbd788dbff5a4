"""Notices after which rounds of a loop nothing of a step is left: there, a run can be saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer

from ..checks.read_ahead import ReadAhead
from ..core.logger import logger
from ..core.parameters import parameters_of

_MANY_ROUNDS = 1000


class Updates:
    """Watches the steps of the optimizers that are `given`, perhaps wrapped by accelerate.

    A step is an update, or one that accelerate's gradient scaler has skipped.
    """

    def __init__(self, given: Sequence[object], resources: ExitStack) -> None:
        """Watch them until `resources` are closed."""
        optimizers = [each for each in given if isinstance(each, Optimizer)]
        self._parameters = {id(plain(each)): parameters_of(each) for each in optimizers}
        self.stepped: set[int] = set()
        """Those that have stepped since the last call of `settle`."""
        self._num_open = 0
        self._read_ahead = ReadAhead(chain.from_iterable(self._parameters.values()), resources)
        for optimizer in optimizers:
            inner = plain(optimizer)
            hook = inner.register_step_post_hook(lambda each, *_: self.stepped.add(id(each)))
            resources.callback(hook.remove)
            if isinstance(optimizer, AcceleratedOptimizer) and optimizer.scaler is not None:
                # A step that the scaler skips calls no hook.
                vars(optimizer)["step"] = partial(self._step_scaled, optimizer, optimizer.step)
                resources.callback(vars(optimizer).pop, "step")

    def _step_scaled(
        self, optimizer: AcceleratedOptimizer, step: Callable[[Any], None], closure: Any = None
    ) -> None:
        step(closure)
        if optimizer.gradient_state.sync_gradients:
            self.stepped.add(id(optimizer.optimizer))

    def settle(self) -> tuple[bool, bool]:
        """Return whether the round has stepped, and whether nothing of a step is left after it.

        The gradients of the optimizers that have stepped are dropped. Those of others, which the
        loop still accumulates, are left alone.
        """
        stepped, self.stepped = self.stepped, set()
        self._read_ahead.end_round(bool(stepped))
        for number in stepped:
            for parameter in self._parameters[number]:
                parameter.grad = None
        is_boundary = bool(stepped) and all(
            parameter.grad is None
            for number in self._parameters.keys() - stepped
            for parameter in self._parameters[number]
        )
        self._num_open = 0 if is_boundary else self._num_open + 1
        if self._num_open == _MANY_ROUNDS:
            logger.warning(
                "[LOOP_BOUNDARY] no checkpoint could be saved for %d rounds: a run is saved after "
                "an optimizer's step that leaves no gradients of the other optimizers",
                _MANY_ROUNDS,
            )
        return bool(stepped), is_boundary


def plain(optimizer: Optimizer) -> Optimizer:
    """Return torch's optimizer inside accelerate's."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
