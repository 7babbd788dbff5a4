"""What a loop carries from one round to the next, beside what its run stores: a resume loses it."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from numbers import Number
from operator import attrgetter
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from ..core.digest import digest_of
from ..core.errors import listed
from ..core.logger import logger
from .loop_source import Loop, begun_anew, loop_around, uses_of
from .subject import changed
from .unsaved_state import Mark, Parts, Walk, is_of_user, items_in, values_in

_VALUES = (Number, Collection, Namespace, SimpleNamespace)
_PLAIN = (Number, str, type(None))


class CarriedState:
    """Compares what the body of a loop uses after its first rounds.

    These are objects with a state dict, generators, iterators, arrays that a dataset keeps or that
    have the shape of a parameter, and values that the body, or a function that it calls, reads
    before it sets them and by which it decides something.

    `frame` takes the first item of `run.METHOD()`. The modules and optimizers that are `trained`
    may keep what no state dict has. `known` is stored by the run, or of no interest;
    `ignored` are names, to which a warning adds its own. Where a loop has no source, nothing is
    compared.

    Raises ConfigError if a break or return leaves the loop.
    """

    def __init__(
        self,
        frame: FrameType,
        method: str,
        *,
        trained: Parts,
        known: Sequence[object],
        ignored: set[str],
    ) -> None:
        self._trained = trained
        self._known = known
        self._models = nn.ModuleList(each for each in known if isinstance(each, nn.Module))
        self._shapes = {each.shape for each in self._models.parameters() if each.ndim}
        self._ignored = ignored
        self._marks: list[dict[str, Mark]] = []
        self._names: list[str] = []
        if (loop := loop_around(frame)) is not None:
            self._frame = loop.frame
            self._look_into(loop)
            self._warn_of_new_starts(begun_anew(frame, loop, method))

    def _look_into(self, loop: Loop) -> None:
        uses = uses_of(loop)
        self._deciding, self._passed = uses.deciding, uses.passed
        values = self._values()
        compared = {name for name in uses.read if "." not in name} | uses.carried
        self._names = sorted(
            # What a round sets first has no value yet.
            name
            for name in compared - self._ignored
            if hasattr(values, name.partition(".")[0])
        )
        for name in uses.read:
            with suppress(Exception):  # most names are no function's
                self._deciding |= _carried_by(name, values)

    def _warn_of_new_starts(self, names: Iterator[str]) -> None:
        values = vars(self._values())
        stored = {id(each) for each in self._known}
        if new := {name for name in names if id(values.get(name, name)) not in stored}:
            logger.warning(
                "[LOOP_STATE] %s starts over after a resume: write enumerate(run.batches(), "
                "run.batch_in_epoch) or enumerate(run.epochs(n), run.epoch), take means by "
                "run.log, and give the dataset what zip adds",
                listed(new),
            )

    def mark(self) -> None:
        """Mark what the body has left; the third time, warn of what changes each time."""
        if not self._names:
            return
        self._marks.append(dict(self._marks_now()))
        if len(self._marks) < 3:
            return
        self._names = []
        first, second, third = self._marks
        both = changed(first, second) & changed(second, third)
        if changing := both - self._ignored:
            self._ignored |= changing
            logger.warning(
                "[LOOP_STATE] the loop changes %s, which no checkpoint has: a resume would begin "
                "with the first values; give objects to states= of exact_run, take numbers from "
                "run.step and run.metrics, or name in ignore= what decides nothing",
                listed(changing),
            )

    def _values(self) -> SimpleNamespace:
        return SimpleNamespace(**{**self._frame.f_globals, **self._frame.f_locals})

    def _marks_now(self) -> Iterator[tuple[str, Mark]]:
        values = self._values()
        self._walk = Walk({}, self._models, self._known)
        for name in self._names:
            owner = name.rpartition(".")[0]
            with suppress(Exception):
                value = attrgetter(name)(values)
                # Others keep it in a value of theirs, and numbers of modules are stored.
                is_modules = isinstance(attrgetter(owner)(values), nn.Module) if owner else False
                if not owner or is_modules and not isinstance(value, Number):
                    yield from self._marks_in(value, name, name in self._deciding)
        yield from self._marks_in_trained()

    def _marks_in_trained(self) -> Iterator[tuple[str, Mark]]:
        """Yield the marks of what modules and optimizers keep, but for plain values of theirs."""
        walk = Walk(self._trained, self._models)
        for name, mark in walk.marks.items():
            owner, _ = walk.owners.get(name, (None, ""))
            is_stored = isinstance(owner, nn.Module | Optimizer) and _is_plain(mark)
            # The walk also looks at their classes and files, which it names otherwise.
            if not is_stored and name.partition(".")[0] in self._trained:
                yield name, mark

    def _marks_in(self, value: Any, name: str, decides: bool) -> Iterator[tuple[str, Mark]]:
        """Yield the marks of a value, or of what is in it, that count."""
        value = getattr(value, "__self__", value)  # of a method
        has_values = isinstance(value, FunctionType | Dataset | partial) or is_of_user(type(value))
        if id(value) in self._walk.seen:
            return
        if hasattr(value, "load_state_dict") and not isinstance(value, type):
            yield name, (type(value), digest_of(self._state_of(value)))
        elif items := _values_of(value) if has_values else items_in(value):
            self._walk.seen.add(id(value))
            if decides and not has_values and (mark := self._walk.mark(value)):
                yield name, mark
            for key, item in items.items():
                path = f"{name}.{key}"
                is_data = isinstance(value, Dataset) and not isinstance(item, Number)
                is_used = path in self._deciding or is_data
                yield from self._marks_in(item, path, is_used if has_values else decides)
        elif mark := self._walk.mark(value):
            is_array = hasattr(value, "shape")
            counts = value.shape in self._shapes if is_array else not isinstance(value, _VALUES)
            if counts or decides or name in self._passed:
                yield name, mark

    def _state_of(self, value: Any) -> list[Any]:
        """Return the state of an object without what the run stores, and numbers of the user's."""
        tensors = value.state_dict(keep_vars=True).values() if isinstance(value, nn.Module) else ()
        is_stored = bool(tensors) and all(id(each) in self._walk.seen for each in tensors)
        numbers = values_in(value).values() if is_of_user(type(value)) else ()
        return [
            None if is_stored else value.state_dict(),
            [each for each in numbers if isinstance(each, Number)],
        ]


def _values_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, or what a function of the user's finds around it."""
    if isinstance(value, partial):
        return {"func": value.func, "args": value.args, **value.keywords}
    if isinstance(value, FunctionType) and is_of_user(value):
        return {**inspect.getclosurevars(inspect.unwrap(value)).globals, **values_in(value)}
    return values_in(value)


def _is_plain(mark: Mark | None) -> bool:
    """Return whether a mark shows a number, a text, or a container of these."""
    kind, content = mark or (None, None)
    if isinstance(content, list):
        return all(map(_is_plain, content))
    return isinstance(kind, type) and issubclass(kind, _PLAIN)


def _carried_by(name: str, values: object) -> set[str]:
    """Return the paths of what a function of the user's keeps from one call to the next."""
    owner, _, method = name.rpartition(".")
    found = getattr(type(attrgetter(owner)(values)), method) if owner else getattr(values, name)
    if is_of_user(type(found)):
        found = type(found).__call__
    uses = uses_of(found) if is_of_user(found) else None
    carried = uses.carried | uses.deciding & uses.read if uses else ()
    return {f"{owner or name}.{each.removeprefix('self.')}" for each in carried}
