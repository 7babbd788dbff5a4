"""Whose turn it is: which of a run's optimizers step, as its task says."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from ..core.errors import ConfigError
from ..core.parameters import Optimizers, parameters_of
from ..core.types import Position, Task, Turn


def turn_at(position: Position, task: Task, names: Collection[str]) -> Turn:
    """Return what the `turn` of `task` says of the step after `position`; "" if it has none.

    Raises ConfigError for a turn that is not one or several of the optimizers' `names`.
    """
    if not hasattr(task, "turn"):
        return ""
    turn: Turn = task.turn(position)
    found = turn if isinstance(turn, tuple) else (turn,)
    if not found or any(name not in [*names] for name in found):
        raise ConfigError(
            "TASK",
            f"{type(task).__name__}.turn returned {turn!r:.80} at step {position.step}: return "
            "the name of an optimizer, or a tuple of names: "
            f"{', '.join(names) or 'optimizer= has none, give build_trainer a dict of functions'}",
        )
    return turn


def in_turn(optimizers: Optimizers, turn: Turn) -> Optimizers:
    """Return the optimizers that have the turn."""
    names = turn if isinstance(turn, tuple) else (turn,)
    return {name: each for name, each in optimizers.items() if name in names or not turn}


@contextmanager
def others_frozen(optimizers: Optimizers, turn: Turn) -> Iterator[None]:
    """Let the parameters of the optimizers without a turn require no gradients, for the block."""
    others = [
        parameter
        for name in optimizers.keys() - in_turn(optimizers, turn).keys()
        for parameter in parameters_of(optimizers[name])
        if parameter.requires_grad
    ]
    for parameter in others:
        parameter.requires_grad = False
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad = True
