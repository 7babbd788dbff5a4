"""The callbacks of a run as the trainer sees them: told of each moment, and kept from harming it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import Trainer

_logger = logging.getLogger(__name__)

_MAX_FAILURES = 3


class Observers:
    """Tells `callbacks` what happens, in their order.

    A callback that is not essential and raises is warned about once, with its traceback, and not
    called again after three times: training goes on. A `UserError` is meant, and ends the run.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = list(callbacks)
        self._num_failures: Counter[Callback] = Counter()
        self._find_hooks()

    def notify(self, hook: str, trainer: Trainer, *arguments: Any) -> None:
        """Call `hook` of every callback that defines it: a step calls no empty ones."""
        for callback, observe in self._hooks[hook]:
            try:
                observe(trainer, *arguments)
            except Exception as error:
                self._isolate(callback, hook, error)

    def state_dict(self) -> dict[str, Any]:
        """Return the states by class name, without empty ones. May be **Collective**."""
        states = {}
        for callback in list(self._callbacks):
            try:
                states[type(callback).__name__] = callback.state_dict()
            except Exception as error:
                self._isolate(callback, "state_dict", error)
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore the states that `state_dict` returned; a callback that was not there keeps its own."""
        for callback in self._callbacks:
            if type(callback).__name__ in states:
                callback.load_state_dict(states[type(callback).__name__])

    def _find_hooks(self) -> None:
        names = [name for name in vars(Callback) if name.startswith("on_")]
        self._hooks: dict[str, list[tuple[Callback, Callable[..., None]]]] = {
            name: [
                (callback, getattr(callback, name))
                for callback in self._callbacks
                if getattr(type(callback), name) is not getattr(Callback, name)
            ]
            for name in names
        }

    def _isolate(self, callback: Callback, hook: str, error: Exception) -> None:
        if callback.is_essential or isinstance(error, UserError):
            raise error
        self._num_failures[callback] += 1
        name = f"{type(callback).__name__}.{hook}"
        if self._num_failures[callback] == 1:
            _logger.warning("%s failed (%s: %s); training goes on", name, type(error).__name__, error, exc_info=error)
        if self._num_failures[callback] == _MAX_FAILURES:
            _logger.warning("%s failed again: %s is not called any more", name, type(callback).__name__)
            self._callbacks.remove(callback)
            self._find_hooks()
