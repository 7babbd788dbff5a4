"""Refuses sets whose first reading uses them up, such as an open file or a generator made once.

Each epoch, evaluation and resume starts a set again, and would have other samples. Whether it does
begin again can only be read; that is tried if the iterator was at hand before. A function that
makes its iterator anew is called once, as it would be without this check.
"""

from __future__ import annotations

import io
import queue
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import ConfigError
from ..core.rng import preserved_generators, seed_generators
from ..core.types import Batch, StepBatch
from ..data.fingerprint import hash_value
from .unsaved_state import is_of_user

_NUM_COMPARED = 3  # samples: the first may be a header
_MAX_VISITED = 1000  # objects
_CPU = torch.device("cpu")

Named = tuple[str, Any]


def start_again(name: str, function: Callable[..., Iterable[Any]], *arguments: Any) -> Any:
    """Return what `function(*arguments)` returns, which starts to read the set of this `name`.

    Raises ConfigError if its next call would go on where this one has stopped.
    """
    opened = function(*arguments)
    goes_on = isinstance(opened, Iterator) or hasattr(opened, "seek")
    fresh = object()  # which nothing else refers to
    if goes_on and sys.getrefcount(opened) > sys.getrefcount(fresh):
        held = ("what it returns", opened)
    elif (found := find_iterator(function)) is not None:
        held = found
    else:
        return opened
    with preserved_generators(_CPU):
        if _first_of(opened) == _first_of(function(*arguments)):
            return function(*arguments)
    raise ConfigError(
        "DATA_STREAM",
        f"{name} cannot be read from its start a second time, as an epoch, an evaluation or a "
        f"resume does: the first reading uses up {held[0]} ({type(held[1]).__name__}): open or "
        "make it anew in each call, as in StreamReader(lambda epoch: open(path))",
    )


def _first_of(opened: Any) -> bytes:
    """Return a hash of the first samples; leave `opened` as a reading further on would."""
    seed_generators(0)
    samples = [*islice(opened, _NUM_COMPARED)]
    if hasattr(opened, "seek") and not isinstance(opened, io.IOBase):
        opened.seek(1)
    parts = [each.micro_batches if isinstance(each, StepBatch) else [each] for each in samples]
    batches = [part for each in parts for part in each]
    plain = [(each.inputs, each.targets) if isinstance(each, Batch) else each for each in batches]
    try:
        return hash_value(plain)
    except Exception:  # of what cannot be pickled
        return b""


def find_iterator(function: Callable[..., Any]) -> Named | None:
    """Return the name and the value of an iterator, readable file or queue that `function` uses.

    It is looked for in what the function and those that it names close over, in their globals, and
    in the attributes of objects among these.
    """
    seen: set[int] = set()
    found = deque[Named]([("it", function)])
    while found and len(seen) < _MAX_VISITED:
        name, value = found.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _is_used_up(value):
            return name, value
        found += _held_by(value)
    return None


def _is_used_up(value: Any) -> bool:
    if isinstance(value, io.IOBase):
        return not value.closed and value.readable()
    # A class has the methods of its instances.
    is_iterator = isinstance(value, Iterator | queue.Queue | queue.SimpleQueue)
    return is_iterator and not isinstance(value, type)


def _held_by(value: Any) -> list[Named]:
    """Return the values that an object of the user's has at hand, by name."""
    if isinstance(value, partial):
        return [("it", value.func), *_by_place(value.args), *value.keywords.items()]
    if isinstance(value, MethodType):
        return [("self", value.__self__), ("it", value.__func__)]
    if isinstance(value, FunctionType):
        return _used_by(value) if is_of_user(value) else []
    if isinstance(value, list | tuple | set | frozenset | deque):
        return _by_place(value) if len(value) < _MAX_VISITED else []
    if isinstance(value, Mapping):
        return [(str(key), each) for key, each in value.items()][:_MAX_VISITED]
    kind = value if isinstance(value, type) else type(value)
    if kind.__module__.partition(".")[0] in ("accel_trainer", "accelerate", "builtins"):
        return []
    if isinstance(value, nn.Module | Tensor | ModuleType):
        return []
    of_classes = [dict(vars(each)) for each in kind.__mro__ if is_of_user(each)]
    held = [] if isinstance(value, type) else [getattr(value, "__dict__", {})]
    return [pair for each in (*held, *of_classes) for pair in each.items()]


def _by_place(values: Iterable[Any]) -> list[Named]:
    """Return the values, named by their place."""
    return [(f"item {place}", each) for place, each in enumerate(values)]


def _used_by(function: FunctionType) -> list[Named]:
    """Return what a function closes over, and the globals that it names, also in modules."""
    code = function.__code__
    names = _names_in(code)
    used = [(name, function.__globals__[name]) for name in names if name in function.__globals__]
    for _, module in [*used]:
        if isinstance(module, ModuleType):
            used += [(name, vars(module)[name]) for name in names if name in vars(module)]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            used.append((name, cell.cell_contents))
        except ValueError:  # it is still empty
            continue
    return [
        *used,
        *_by_place(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).items(),
    ]


def _names_in(code: CodeType) -> set[str]:
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*inner)
