"""What a loop carries from one round to the next, beside what its run stores: a resume loses it."""

from __future__ import annotations

import ast
import inspect
import random
import textwrap
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import reduce
from types import FrameType
from typing import Any

import numpy as np
import torch

from ..core.digest import digest_of
from ..core.errors import ConfigError, listed
from ..core.logger import logger

_BODIES = ("body", "handlers", "cases", "orelse", "finalbody")
_PLAIN = (bool, int, float, complex, str, bytes)
_GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)


class CarriedState:
    """Compares what the body of a loop uses after its first steps.

    These are objects with a state dict, generators, and numbers and texts that the body reads
    before it sets them and that decide something in it. `known` is stored by the run, or of no
    interest; `ignored` are names. Where a loop has no source, nothing is compared.
    """

    def __init__(
        self, frame: FrameType, known: Collection[object], ignored: Collection[str]
    ) -> None:
        self._frame: FrameType | None = frame
        self._known = {id(each) for each in known}
        self._ignored = ignored
        self._marks: list[dict[str, object]] = []
        loop = _loop_at(frame)
        self._objects, self._numbers = (set(), set()) if loop is None else _uses_of(loop)
        if loop is not None and (name := _number_from_zero(loop)):
            logger.warning(
                "[LOOP_STATE] %s counts from 0 after a resume in the middle of an epoch: write "
                "enumerate(run.batches(), run.batch_in_epoch)",
                name,
            )

    def after_step(self) -> None:
        """Mark what the body has left; the third time, warn of what changes in each step."""
        if self._frame is None:
            return
        self._marks.append(self._mark(self._frame))
        if len(self._marks) < 3:
            return
        self._frame = None
        first, second, third = self._marks
        changing = {
            name
            for name in first.keys() & second.keys() & third.keys()
            if first[name] != second[name] != third[name]
        }
        if changing:
            logger.warning(
                "[LOOP_STATE] the loop changes %s, which no checkpoint has: a resume would begin "
                "with the values that they have at the start; give what has a state dict to "
                "states= of exact_run, or name in ignore= what decides nothing",
                listed(changing),
            )

    def _mark(self, frame: FrameType) -> dict[str, object]:
        values = {**frame.f_globals, **frame.f_locals}
        marks: dict[str, object] = {}
        for name in self._objects - {*self._ignored}:
            first, *attributes = name.split(".")
            with suppress(Exception):  # a property of the user's may raise anything
                value = reduce(getattr, attributes, values[first])
                if id(value) not in self._known:
                    is_number = name in self._numbers and isinstance(value, _PLAIN)
                    marks[name] = repr(value) if is_number else _state_of(value)
        return {name: mark for name, mark in marks.items() if mark is not None}


def refuse_early_exits(frame: FrameType) -> None:
    """Raise ConfigError if the body of the loop at `frame` leaves it by break or return."""
    body = loop.body if (loop := _loop_at(frame)) else []
    exits: list[ast.stmt] = [
        node for node in _statements(body, in_loops=False) if isinstance(node, ast.Break)
    ]
    exits += [node for node in _statements(body) if isinstance(node, ast.Return)]
    for node in exits:
        raise ConfigError(
            "LOOP",
            f"the loop over the run has a {type(node).__name__.lower()} in line "
            f"{node.lineno} of {frame.f_code.co_filename}, and what follows would never be "
            "trained: call run.stop() there, which ends the loops after the step",
        )


def _loop_at(frame: FrameType) -> ast.For | None:
    """Return the `for` whose iterable the frame evaluates; None if there is no source."""
    try:
        lines, first = inspect.getsourcelines(frame)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):
        return None
    ast.increment_lineno(tree, max(first, 1) - 1)
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For)
        and node.iter.lineno <= frame.f_lineno <= (node.iter.end_lineno or 0)
    ]
    return loops[-1] if loops else None


def _uses_of(loop: ast.For) -> tuple[set[str], set[str]]:
    """Return all names that the body reads, and those whose numbers it carries.

    It reads these before it sets them, and they decide something: a sum that is only added to,
    printed or logged does not.
    """
    first_read: dict[str, bool] = {}
    stored = set()
    deciding = set()
    for statement in _statements(loop.body):
        reads, stores = _names_of(statement)
        is_logged = isinstance(statement, ast.Expr)
        deciding |= set() if is_logged else reads - stores
        for name in (*reads, *stores):
            first_read.setdefault(name, name in reads)
        stored |= stores
    return {*first_read}, {name for name in stored & deciding if first_read[name]}


def _statements(body: list[ast.stmt], *, in_loops: bool = True) -> Iterator[ast.stmt]:
    """Yield all statements of a body, perhaps those in inner loops, but not those of functions."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        is_entered = in_loops or not isinstance(statement, ast.For | ast.While)
        for part in _BODIES if is_entered else ("orelse",):
            for nested in getattr(statement, part, []):
                inner = [nested] if isinstance(nested, ast.stmt) else nested.body
                yield from _statements(inner, in_loops=in_loops)


def _names_of(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """Return the names that a statement itself reads and sets, without the statements in it."""
    reads: set[str] = set()
    stores: set[str] = set()
    parts = [part for part in ast.iter_child_nodes(statement) if not isinstance(part, ast.stmt)]
    for part in parts:
        for node in ast.walk(part):
            if name := _dotted(node):
                (reads if isinstance(node.ctx, ast.Load) else stores).add(name)  # type: ignore[attr-defined]
    if isinstance(statement, ast.AugAssign):
        reads |= stores
    return reads, stores


def _dotted(node: ast.AST) -> str:
    """Return `a.b.c` of a name or of attributes of one; empty for anything else."""
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def _number_from_zero(loop: ast.For) -> str | None:
    """Return the name that `enumerate` counts in, from 0, if the body reads it."""
    match loop.iter, loop.target:
        case (
            ast.Call(ast.Name("enumerate"), [_] | [_, ast.Constant(0)], []),
            ast.Tuple([ast.Name(name), *_]),
        ):
            reads = {name for each in _statements(loop.body) for name in _names_of(each)[0]}
            return name if name in reads else None
    return None


def _state_of(value: Any) -> object:
    """Return what shows whether a value has changed; None for a value that is not compared."""
    if isinstance(value, torch.Generator):
        return digest_of(value.get_state())
    if isinstance(value, _GENERATORS):
        return repr(getattr(value, "bit_generator", value).__reduce__())
    has_state = callable(getattr(value, "load_state_dict", None)) and not isinstance(value, type)
    return digest_of(value.state_dict()) if has_state else None
