"""What a loop carries from one round to the next, beside what its run stores: a resume loses it."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from numbers import Number
from operator import attrgetter
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any

from torch import nn

from ..core.digest import digest_of
from ..core.errors import ConfigError, listed
from ..core.logger import logger
from .subject import changed
from .unsaved_state import Mark, Walk, is_of_user, items_in, values_in

_BODIES = ("body", "handlers", "cases", "orelse", "finalbody")
_SHOWING = re.compile(r"(\w+\.)*(print|log|info|debug|row|append|write|add_scalar|set_)\w*\(")
_EMPTY = ast.For(ast.Constant(None), ast.Constant(None), [], [])
_VALUES = (Number, Collection)


class CarriedState:
    """Compares what the body of a loop uses after its first steps.

    These are objects with a state dict, generators, iterators, arrays that have the shape of a
    parameter, and values that it reads before it sets them and by which it decides something.
    `known` is stored by the run, or of no interest; `ignored` are names. Where a loop has no
    source, nothing is compared.
    """

    def __init__(self, frame: FrameType, known: Sequence[object], ignored: Collection[str]) -> None:
        self._known = known
        self._models = nn.ModuleList(each for each in known if isinstance(each, nn.Module))
        self._shapes = {each.shape for each in self._models.parameters() if each.ndim}
        self._frame = frame
        self._marks: list[dict[str, Mark]] = []
        loop = _loop_at(frame)
        read, self._deciding, carried = _uses_of(loop)
        compared = {name for name in read if "." not in name} | carried
        self._names = sorted(compared.difference(ignored))
        match loop.iter, loop.target:
            case (
                ast.Call(ast.Name("enumerate"), [_] | [_, ast.Constant(0)], []),
                ast.Tuple([ast.Name(name), *_]),
            ) if name in self._deciding:
                logger.warning(
                    "[LOOP_STATE] %s counts from 0 after a resume in the middle of an epoch: write "
                    "enumerate(run.batches(), run.batch_in_epoch)",
                    name,
                )

    def after_step(self) -> None:
        """Mark what the body has left; the third time, warn of what changes in each step."""
        if not self._names:
            return
        self._marks.append(dict(self._mark()))
        if len(self._marks) < 3:
            return
        self._names = []
        first, second, third = self._marks
        if changing := changed(first, second) & changed(second, third):
            logger.warning(
                "[LOOP_STATE] the loop changes %s, which no checkpoint has: a resume would begin "
                "with the values that they have at the start; give what has a state dict to "
                "states= of exact_run, or name in ignore= what decides nothing",
                listed(changing),
            )

    def _mark(self) -> Iterator[tuple[str, Mark]]:
        values = SimpleNamespace(**{**self._frame.f_globals, **self._frame.f_locals})
        self._walk = Walk({}, self._models, self._known)
        for name in self._names:
            owner = name.rpartition(".")[0]
            with suppress(Exception):  # a property of the user's may raise anything
                # The plain values of a module are in no state dict.
                if not owner or isinstance(attrgetter(owner)(values), nn.Module):
                    yield from self._marks_in(attrgetter(name)(values), name, name)

    def _marks_in(self, value: Any, name: str, root: str) -> Iterator[tuple[str, Mark]]:
        """Yield the marks of a value, or of what is in it, that count; lists go by their `root`."""
        has_values = isinstance(value, FunctionType) or is_of_user(type(value))
        if id(value) in self._walk.seen:
            return
        if hasattr(value, "load_state_dict") and not isinstance(value, type):
            yield name, (type(value), digest_of(value.state_dict()))
        elif items := values_in(value) if has_values else items_in(value):
            self._walk.seen.add(id(value))
            for key, item in items.items():
                path = f"{name}.{key}"
                yield from self._marks_in(item, path, path if has_values else root)
        elif mark := self._walk.mark(value):
            is_array = hasattr(value, "shape")
            counts = value.shape in self._shapes if is_array else not isinstance(value, _VALUES)
            if counts or root in self._deciding:
                yield name, mark


def refuse_early_exits(frame: FrameType) -> None:
    """Raise ConfigError if the body of the loop at `frame` leaves it by break or return."""
    body = _loop_at(frame).body
    breaks = (each for each in _statements(body, in_loops=False) if isinstance(each, ast.Break))
    returns = (each for each in _statements(body) if isinstance(each, ast.Return))
    for node in chain(breaks, returns):
        raise ConfigError(
            "LOOP",
            f"the loop over the run has a {type(node).__name__.lower()} in line "
            f"{node.lineno} of {frame.f_code.co_filename}, and what follows would never be "
            "trained: call run.stop() there, which ends the loops after the step",
        )


def _loop_at(frame: FrameType) -> ast.For:
    """Return the `for` whose iterable the frame evaluates; an empty one if there is no source."""
    try:
        lines, first = inspect.getsourcelines(frame)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):
        return _EMPTY
    ast.increment_lineno(tree, max(first, 1) - 1)
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For)
        and node.iter.lineno <= frame.f_lineno <= (node.iter.end_lineno or 0)
    ]
    return [_EMPTY, *loops][-1]


def _uses_of(loop: ast.For) -> tuple[set[str], set[str], set[str]]:
    """Return the names that the body reads before it sets them, decides by, and carries.

    A sum that is only added to, printed or logged decides nothing, nor does what is made of it to
    be printed or logged. What it carries it reads first, decides by, and sets.
    """
    statements = [(each, *_names_of(each)) for each in _statements(loop.body)]
    read: set[str] = set()
    _, stored = _names_of(ast.Expr(loop.target))
    used: set[str] = set()  # for more than to be shown
    for statement, reads, stores in statements:
        read |= reads - stored
        stored |= stores
        if not _SHOWING.match(ast.unparse(statement)):
            used |= reads
    deciding = {
        name
        for statement, reads, stores in statements
        if not isinstance(statement, ast.Expr | ast.Assign) or stores & used
        for name in reads - stores
    }
    return read, deciding, deciding & stored & read


def _statements(body: list[ast.stmt], in_loops: bool = True) -> Iterator[ast.stmt]:
    """Yield the statements of a body, also of its inner loops if asked, but not of functions."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        is_entered = in_loops or not isinstance(statement, ast.For | ast.While)
        for part in _BODIES if is_entered else ("orelse",):
            for nested in getattr(statement, part, []):
                inner = [nested] if isinstance(nested, ast.stmt) else nested.body
                yield from _statements(inner, in_loops)


def _names_of(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """Return the names that a statement itself reads and sets, without the statements in it."""
    reads: set[str] = set()
    stores: set[str] = set()
    for part in ast.iter_child_nodes(statement):
        for node in () if isinstance(part, ast.stmt) else ast.walk(part):
            if name := _dotted(node):
                (reads if isinstance(node.ctx, ast.Load) else stores).add(name)  # type: ignore[attr-defined]
    if isinstance(statement, ast.AugAssign):
        reads |= stores
    return reads, stores


def _dotted(node: ast.AST) -> str:
    """Return `a.b.c` of a name, of attributes of one, or of an item of those; or nothing."""
    match node:
        case ast.Name(name):
            return name
        case ast.Subscript(owner):
            return _dotted(owner)
        case ast.Attribute(owner, name) if found := _dotted(owner):
            return f"{found}.{name}"
    return ""
