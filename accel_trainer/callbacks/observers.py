"""The callbacks of a run as the trainer sees them: notified of each moment, in their order."""

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


class CallbackFailed(Exception):
    """A callback raised an error that is no `UserError`: a bug in it, with its name."""


class Observers:
    """Notifies `callbacks`. An error ends the run, since a hook may be collective: no process may leave it out."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = _named(callbacks)
        names = [name for name in vars(Callback) if name.startswith("on_")]
        self._hooks: dict[str, list[tuple[str, Callable[..., None]]]] = {
            name: [
                (f"{key}.{name}", getattr(callback, name))
                for key, callback in self._callbacks.items()
                if getattr(type(callback), name) is not getattr(Callback, name)
            ]
            for name in names
        }

    def notify(self, hook: str, trainer: Trainer, *arguments: Any) -> None:
        """Call `hook` of every callback that defines it: a step calls no empty ones."""
        for name, observe in self._hooks[hook]:
            try:
                observe(trainer, *arguments)
            except UserError:
                raise
            except Exception as error:
                raise CallbackFailed(f"callback {name} failed ({type(error).__name__}: {error})") from error

    def notify_error(self, trainer: Trainer, error: BaseException) -> None:
        """Call `on_error` of every callback; an error of theirs must not hide the one that ends the run."""
        for name, observe in self._hooks["on_error"]:
            try:
                observe(trainer, error)
            except Exception:
                _logger.exception("%s failed", name)

    def state_dict(self) -> dict[str, Any]:
        """Return the states by name, without empty ones. May be **Collective**."""
        states = {name: callback.state_dict() for name, callback in self._callbacks.items()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore the states that `state_dict` returned; a callback that was not there keeps its own."""
        for name, callback in self._callbacks.items():
            if name in states:
                callback.load_state_dict(states[name])


def _named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Name callbacks by their class, and the second of a class `Name-2`, so that each finds its own state."""
    named: dict[str, Callback] = {}
    count: Counter[str] = Counter()
    for callback in callbacks:
        name = type(callback).__name__
        count[name] += 1
        named[name if count[name] == 1 else f"{name}-{count[name]}"] = callback
    return named
