"""Trains a recipe as a `Start` says, which a command has made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any, TypeVar

from ...core import filesystem
from ...run.config import RecipeConfig
from ...run.keywords import with_values
from ...training.callback import RunResult
from .start import Start

C = TypeVar("C", bound=RecipeConfig)


def train_as(start: Start, train: Callable[[C], RunResult], config: C) -> RunResult:
    """Return the result of `train` with the config as it is changed by the start."""
    config = with_values(config, _changes(start, config))
    if start.disk is None:
        return train(config)
    assert config.run.output_dir is not None
    name, arguments = start.disk
    with _disk(resolve_name(name)(config.run.output_dir, **arguments)):
        return train(config)


def at_most(until: int, config: RecipeConfig) -> int:
    """Return the last step of a run that is to end with step `until`, or before it."""
    given = config.trainer.max_steps
    return until if given is None else min(given, until)


def _changes(start: Start, config: RecipeConfig) -> dict[str, Any]:
    changes = {
        name: tuple(value) if isinstance(value, list) else value  # JSON has no tuples
        for name, value in start.changes.items()
    }
    for name, value in start.defaults.items():
        if attrgetter(name)(config) is None:
            changes[name] = value
    if start.until is not None:
        changes["trainer.max_steps"] = at_most(start.until, config)
    if start.resume is not None and config.run.resume in ("auto", "never"):
        changes["run.resume"] = start.resume
    return changes


@contextmanager
def _disk(disk: filesystem.Disk) -> Iterator[None]:
    before = filesystem.disk
    filesystem.disk = disk
    try:
        yield
    finally:
        filesystem.disk = before
