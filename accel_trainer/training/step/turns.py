"""Whose turn it is: which of a run's optimizers step, and in which order, as its task says."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from zlib import crc32

import torch
from accelerate import Accelerator
from torch import Tensor

from ...core.errors import ConfigError
from ...core.parameters import Optimizers, parameters_of
from ...core.types import Position, StepReport, Task, Turn
from ...distributed.collectives import gather_numbers


def takes_turns(task: Task) -> bool:
    """Return whether `task` says which optimizers step."""
    return hasattr(task, "turn") or hasattr(task, "updates")


def updates_at(
    position: Position, task: Task, names: Collection[str], accelerator: Accelerator
) -> list[Turn]:
    """Return whose turn is each update of the step after `position`, for a task that takes turns.

    **Collective. Host sync**: gradients of different parameters would be averaged, or, of different
    sizes, waited for.

    Raises ConfigError for a turn that is not one or several of the optimizers' `names`, or that is
    not the same on all processes.
    """
    has_several = hasattr(task, "updates")
    method = "updates" if has_several else "turn"
    found = getattr(task, method)(position)
    fact = f"{type(task).__name__}.{method} returned {found!r:.80} at step {position.step}"
    turns = found if has_several else [found]
    known = [*names]
    if not (isinstance(turns, list) and turns and all(map(names_in, turns))) or any(
        name not in known for turn in turns for name in names_in(turn)
    ):
        raise ConfigError(
            "TASK",
            f"{fact}: return {'a list of turns, each ' * has_several}the name of an optimizer, or "
            "a tuple of names: "
            f"{', '.join(names) or 'optimizer= has none, give build_trainer a dict of functions'}",
        )
    if len({*gather_numbers(crc32(repr(turns).encode()), accelerator)}) > 1:
        raise ConfigError(
            "TASK",
            f"{fact}, and another one on another process: let it follow from the position alone",
        )
    return turns


def in_turn(optimizers: Optimizers, turn: Turn) -> Optimizers:
    """Return the optimizers that have the turn."""
    if not turn:
        return optimizers
    return {name: each for name, each in optimizers.items() if name in names_in(turn)}


def names_in(turn: Turn) -> tuple[str, ...]:
    """Return the names of the optimizers that a turn lists."""
    return turn if isinstance(turn, tuple) else (turn,)


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


def joined(updates: Sequence[StepReport]) -> StepReport:
    """Return the report of a step of several `updates`."""
    return updates[-1]._replace(
        loss_sum=torch.stack([each.loss_sum for each in updates]).sum(),
        was_skipped=any(each.was_skipped for each in updates),
        turn="",
        updates=updates,
    )
