"""Calls the hooks of a run's callbacks, in their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import reduce
from typing import TYPE_CHECKING, Any

from ..core.errors import ConfigError, PartFailed, UserError
from ..core.logger import logger
from ..core.registry import StateDict
from .callback import Callback, TrainerView

if TYPE_CHECKING:
    from ..checkpoint.manager import Checkpointer


Watch = Callable[[str, Callback, Sequence[Any]], AbstractContextManager[object]]
"""Returns a context for a callback's hook, which is named as in `Plateau.on_step_end`, and for what
it is called with."""

HOOKS = ("before_", "on_")
"""How the names of hooks begin."""


class CallbackRunner:
    """Calls hooks. An error in one ends the run: no process may skip a hook that is collective.

    `listeners` are the callbacks that override a hook, by name, for each hook.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = named(callbacks)
        self.listeners = {
            hook: {name: each for name, each in self._callbacks.items() if _listens(each, hook)}
            for hook in dir(Callback)
            if hook.startswith(HOOKS)
        }

    @property
    def reduced_rate(self) -> Callable[[float], float] | None:
        """What all callbacks make of a learning rate; None if none changes it."""
        found = [each for each in self._callbacks.values() if _listens(each, "reduced_rate")]
        if not found:
            return None
        return lambda rate: reduce(lambda value, each: each.reduced_rate(value), found, rate)

    def notify(
        self, hook: str, trainer: TrainerView, arguments: Sequence[Any], watch: Watch | None = None
    ) -> None:
        """Call `hook` of every callback, each in a context that `watch` returns for it."""
        for name, callback in self.listeners[hook].items():
            try:
                if watch is None:
                    getattr(callback, hook)(trainer, *arguments)
                else:
                    with watch(f"{name}.{hook}", callback, arguments):
                        getattr(callback, hook)(trainer, *arguments)
            except UserError:
                raise
            except Exception as error:
                raise PartFailed(
                    f"callback {name}.{hook} failed ({type(error).__name__}: {error})"
                ) from error

    @contextmanager
    def errors_observed(self, trainer: TrainerView, checkpointer: Checkpointer) -> Iterator[None]:
        """Call `on_error` for an error in the block, and raise it again once no save is running."""
        try:
            yield
        except BaseException as error:
            for name, callback in self._callbacks.items():
                try:
                    callback.on_error(trainer, error)
                except Exception:  # it must not hide the error that ends the run
                    logger.exception("%s.on_error failed", name)
            with suppress(Exception):  # as above
                checkpointer.wait()  # the checkpoint that it is writing is good
            raise

    def state_dict(self) -> StateDict:
        """Return the states by name, without empty ones. **Collective** if a callback's is.

        Raises ConfigError for a state that is no dict.
        """
        states = {}
        for name, callback in self._callbacks.items():
            state = callback.state_dict()
            if not isinstance(state, dict):
                raise ConfigError(
                    "CALLBACK",
                    f"state_dict of {name} returned {state!r:.40}: "
                    "return a dict, {} without a state",
                )
            if state:
                states[name] = state
        return states

    def load_state_dict(self, states: StateDict) -> None:
        """Restore the states that `state_dict` returned; callbacks without one stay unchanged."""
        for name, callback in self._callbacks.items():
            if name in states:
                callback.load_state_dict(states[name])

    def warn_of_lost(self, names: Collection[str]) -> None:
        """Warn of the states by these names whose callback is gone, or only has another name."""
        for name in names:
            if name not in self._callbacks:
                logger.warning(
                    "the checkpoint has state of the callback %s, which this run does not have: "
                    "it is lost",
                    name,
                )


def _listens(callback: Callback, hook: str) -> bool:
    method = getattr(callback, hook, None)  # of an object that need not be a Callback
    return method is not None and getattr(method, "__func__", method) is not getattr(Callback, hook)


def named(parts: Sequence[Any]) -> dict[str, Any]:
    """Name parts by class, the second of a class `Name-2`, to keep their states apart."""
    named: dict[str, Any] = {}
    count = Counter[str]()
    for part in parts:
        name = type(part).__name__
        count[name] += 1
        named[name if count[name] == 1 else f"{name}-{count[name]}"] = part
    return named
