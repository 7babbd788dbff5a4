"""What the source of a user's loop shows: where its body is, and which names that uses how."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from types import FrameType, FunctionType
from typing import NamedTuple

from ..core.errors import ConfigError
from .unsaved_state import is_of_users_file

_BODIES = ("body", "handlers", "cases", "orelse", "finalbody")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_SHOWING = re.compile(
    r"(\w+\.)*(print|log|info|debug|append|write|add_scalar|set_postfix|set_desc)\w*\("
)
_PLACES = ("batch_in_epoch", "epoch", "step")


@dataclass(frozen=True)
class Loop:
    """A loop of the user's, and the frame that it runs in."""

    frame: FrameType
    body: Sequence[ast.stmt]
    target: ast.expr
    """What each round sets first."""
    headers: Sequence[ast.expr]
    """What it iterates, and what generators around the run's items do."""
    before: Sequence[ast.stmt]
    after: Sequence[ast.stmt]
    """The statements around it, in the body of a further loop."""


class Uses(NamedTuple):
    """The names that statements use; `a.b` is an attribute of `a`."""

    read: set[str]
    """Before they are set for sure."""
    used: set[str]
    """For more than to be printed or logged."""
    deciding: set[str]
    """A sum that is only added to, printed or logged decides nothing, nor does what is made of it
    to be printed or logged."""
    passed: set[str]
    """To a function that returns nothing; what a meter is given decides nothing."""
    carried: set[str]
    """Read first, decided by or passed, and set."""


def loop_around(frame: FrameType) -> Loop | None:
    """Return the loop whose body follows once `frame` has the run's next item.

    That is not the loop of a generator, such as tqdm's, which passes the item on. Without a source
    there is none.

    Raises ConfigError if a break or return leaves it.
    """
    headers: list[ast.expr] = []
    for each, tree in _sources(frame):
        line = each.f_lineno
        loops = _loops_at(line, tree)
        waiting = [node for node in loops if isinstance(node, ast.For) and _is_at(line, node.iter)]
        for over in waiting[-1:]:
            headers.append(over.iter)
            _refuse_early_exits(over, each)
        # Without a `for` over the items, `next` is called in the body, or in a function of that.
        for node in waiting[-1:] or loops[:1]:
            if not any(isinstance(part, ast.Yield) for part in ast.walk(node)):
                target = getattr(node, "target", ast.Constant(None))
                outer = loops[loops.index(node) - 1].body if node is not loops[0] else []
                before = [part for part in outer if part.lineno < node.lineno]
                after = [part for part in outer if part.lineno > node.lineno]
                return Loop(each, node.body, target, headers, before, after)
    return None


def begun_anew(frame: FrameType, loop: Loop, method: str) -> Iterator[str]:
    """Yield what starts over if a run is resumed while `frame` iterates `run.METHOD()`.

    That is what enumerate and zip put beside the items, and what is set before the loop, changed
    in it, and used or recorded after it.
    """
    set_before = {name for each in _statements(loop.before) for name in _names_of(each)[1]}
    changed = {
        name
        for each in _statements(loop.body)
        for name in (*_names_of(each)[1], *_receivers_of(each))
    }
    read_after = {
        name for each, reads, _ in _acting(loop.after) for name in reads - _receivers_of(each)
    }
    yield from set_before & changed & read_after
    number = getattr(loop.target, "elts", [loop.target])[0]
    nodes = [node for header in loop.headers for node in ast.walk(header)]
    for call in {*nodes, *_calls_around(frame, method)}:
        match call:
            case ast.Call(ast.Name("enumerate"), [_] | [_, ast.Constant()], []):
                if _names_of(ast.Expr(number))[1] & uses_of(loop).used:
                    yield "enumerate"
            case ast.Call(ast.Name("zip"), args):
                run = next((each for each in args if _has_attribute(each, method)), args[0])
                for each in args:
                    if each is not run and not _has_attribute(each, *_PLACES):
                        yield ast.unparse(each)


def uses_of(code: Loop | FunctionType) -> Uses:
    """Return how the body of a loop or of a function uses names."""
    if isinstance(code, Loop):
        body, given = code.body, _names_of(ast.Expr(code.target))[1]
    else:
        body, given = getattr(_tree_of(code).body[0], "body", []), set()
    acting = _acting(body)
    deciding = {
        name
        for statement, reads, stores in acting
        if not isinstance(statement, ast.Expr)
        for name in reads - stores
    }
    passed = {name for statement, reads, _ in acting for name in _passed_by(statement, reads)}
    used = {name for _, reads, _ in acting for name in reads}
    unconditional = {*_statements(body, ast.If)}
    read: set[str] = set()
    stored: set[str] = set()
    for statement in _statements(body):
        reads, stores = _names_of(statement)
        read |= reads - given
        stored |= stores
        if statement in unconditional:
            given |= stores
    return Uses(read, used, deciding, passed, (deciding | passed) & stored & read)


def _sources(frame: FrameType | None) -> Iterator[tuple[FrameType, ast.Module]]:
    """Yield the frames of the user's code from `frame` outwards, with their sources."""
    while frame is not None:
        if is_of_users_file(frame.f_code.co_filename):
            yield frame, _tree_of(frame)
        frame = frame.f_back


def _tree_of(code: FrameType | FunctionType) -> ast.Module:
    """Return the source as a tree, with the line numbers of its file; empty if there is none."""
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):
        return ast.Module([], [])
    ast.increment_lineno(tree, max(first, 1) - 1)
    return tree


def _loops_at(line: int, tree: ast.Module) -> list[ast.For | ast.While]:
    """Return the loops around a line, the outermost first."""
    loops = (node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While))
    return [node for node in loops if _is_at(line, node)]


def _is_at(line: int, node: ast.stmt | ast.expr) -> bool:
    return node.lineno <= line <= (node.end_lineno or line)


def _refuse_early_exits(loop: ast.For, frame: FrameType) -> None:
    outer = _statements(loop.body, ast.For, ast.While)
    breaks = (each for each in outer if isinstance(each, ast.Break))
    returns = (each for each in _statements(loop.body) if isinstance(each, ast.Return))
    for node in chain(breaks, returns):
        raise ConfigError(
            "LOOP",
            f"the loop over the run has a {type(node).__name__.lower()} in line "
            f"{node.lineno} of {frame.f_code.co_filename}, and what follows would never be "
            "trained: call run.stop() there, which ends the loops after the step",
        )


def _calls_around(frame: FrameType, method: str) -> list[ast.Call]:
    """Return the calls that `run.METHOD()` is a part of, in the loop or function that has it."""
    for each, tree in _sources(frame):
        for part in (*reversed(_loops_at(each.f_lineno, tree)), tree):
            calls = [node for node in ast.walk(part) if isinstance(node, ast.Call)]
            if found := [call for call in calls if _has_attribute(call, method)]:
                return found
    return []


def _has_attribute(node: ast.AST, *names: str) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr in names for each in ast.walk(node))


def _acting(body: Sequence[ast.stmt]) -> list[tuple[ast.stmt, set[str], set[str]]]:
    """Return the statements that do more than to print or log, or to set what only those use.

    With each are the names that it reads and sets.
    """
    statements = [(each, *_names_of(each)) for each in _statements(body)]
    used: set[str] = set()
    while True:
        acting = [each for each in statements if _acts(each[0], used)]
        now = {name for _, reads, _ in acting for name in reads}
        if now == used:
            return acting
        used = now


def _acts(statement: ast.stmt, used: set[str]) -> bool:
    """Return whether a statement does more than to print or log, or to set what nothing uses."""
    match statement:
        case ast.If():
            return any(_acts(each, used) for each in (*statement.body, *statement.orelse))
        case ast.Assign() | ast.AugAssign() | ast.AnnAssign():
            items = (each for each in ast.walk(statement) if isinstance(each, ast.Subscript))
            is_item_set = any(isinstance(each.ctx, ast.Store) for each in items)
            return is_item_set or bool(_changed_by(_names_of(statement)[1]) & used)
        case ast.Expr():
            return not _SHOWING.match(ast.unparse(statement))
    return True


def _passed_by(statement: ast.stmt, reads: set[str]) -> set[str]:
    """Return what an expression reads, but for the object whose method it calls."""
    match statement:
        case ast.Expr(ast.Call(called)) if not _dotted(called).endswith(".update"):
            return reads - _receivers_of(statement)
    return set()


def _receivers_of(statement: ast.stmt) -> set[str]:
    """Return the function that an expression calls, and the objects whose method that is."""
    match statement:
        case ast.Expr(ast.Call(called)) if path := _dotted(called):
            return {path[: place.start()] for place in re.finditer(r"\.|$", path)}
    return set()


def _changed_by(stores: set[str]) -> set[str]:
    """Return the names that are set, and the objects whose attributes are set."""
    return stores | {name.partition(".")[0] for name in stores} - {"self"}


def _statements(body: Sequence[ast.stmt], *left_out: type[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body and those in them, but not in functions or in `left_out`."""
    for statement in body:
        yield statement
        if not isinstance(statement, (*left_out, *_DEFINITIONS)):
            for part in _BODIES:
                for nested in getattr(statement, part, []):
                    inner = [nested] if isinstance(nested, ast.stmt) else nested.body
                    yield from _statements(inner, *left_out)


def _names_of(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """Return the names that a statement itself reads and sets, without the statements in it."""
    reads: set[str] = set()
    stores: set[str] = set()
    for part in ast.iter_child_nodes(statement):
        for node in () if isinstance(part, ast.stmt) else ast.walk(part):
            if name := _dotted(node):
                (reads if isinstance(node.ctx, ast.Load) else stores).add(name)  # type: ignore[attr-defined]  # a name has it
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
