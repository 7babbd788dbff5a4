"""Whose turn it is: which of a run's optimizers step, as its task says."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import Tensor

from ...core.errors import ConfigError
from ...core.parameters import Optimizers, parameters_of
from ...core.types import Position, Task, Turn


def turn_at(
    position: Position, task: Task, names: Collection[str], accelerator: Accelerator
) -> Turn:
    """Return what the `turn` of `task` says of the step after `position`; "" if it has none.

    **Collective. Host sync** if it has one: gradients of different parameters would be averaged,
    or, of different sizes, waited for.

    Raises ConfigError for a turn that is not one or several of the optimizers' `names`, or that is
    not the same on all processes.
    """
    if not hasattr(task, "turn"):
        return ""
    turn: Turn = task.turn(position)
    found = turn if isinstance(turn, tuple) else (turn,)
    fact = f"{type(task).__name__}.turn returned {turn!r:.80} at step {position.step}"
    if not found or any(name not in [*names] for name in found):
        raise ConfigError(
            "TASK",
            f"{fact}: return the name of an optimizer, or a tuple of names: "
            f"{', '.join(names) or 'optimizer= has none, give build_trainer a dict of functions'}",
        )
    row = torch.tensor([[name in found for name in names]], device=accelerator.device).byte()
    if (accelerator.gather(row) != row).any():
        raise ConfigError(
            "TASK",
            f"{fact}, and another one on another process: let it follow from the position alone",
        )
    return turn


def in_turn(optimizers: Optimizers, turn: Turn) -> Optimizers:
    """Return the optimizers that have the turn."""
    if not turn:
        return optimizers
    names = turn if isinstance(turn, tuple) else (turn,)
    return {name: each for name, each in optimizers.items() if name in names}


def out_of_turn(optimizers: Optimizers, turn: Turn) -> set[Tensor]:
    """Return the parameters of the optimizers that do not have the turn."""
    others = optimizers.keys() - in_turn(optimizers, turn).keys()
    return {each for name in others for each in parameters_of(optimizers[name])}


@contextmanager
def others_frozen(optimizers: Optimizers, turn: Turn) -> Iterator[None]:
    """Let the parameters of the optimizers without a turn require no gradients, for the block."""
    others = [each for each in out_of_turn(optimizers, turn) if each.requires_grad]
    for parameter in others:
        parameter.requires_grad = False
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad = True
