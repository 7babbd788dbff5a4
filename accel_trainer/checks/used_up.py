"""Refuses sets whose first reading uses them up, such as an open file or a generator made once.

Each epoch, evaluation and resume starts a set again, and would have other samples. Whether it does
begin again can only be read; that is tried if the iterator was at hand before. A function that
makes its iterator anew is called once, as it would be without this check.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from ..core.errors import ConfigError
from ..core.rng import preserved_generators, seed_generators
from ..core.types import Batch
from ..data.fingerprint import hash_value
from .unsaved_state import QUEUES, mark_unsaved

NUM_FIRST = 3  # samples: the first may be a header


def start_again(name: str, function: Callable[..., Iterable[Any]], *arguments: Any) -> Any:
    """Return what `function(*arguments)` returns, which starts to read the set of this `name`.

    Raises ConfigError if its next call would go on where this one has stopped.
    """
    opened = function(*arguments)
    goes_on = isinstance(opened, Iterator) or hasattr(opened, "seek")
    fresh = object()  # which nothing else refers to
    is_held = goes_on and sys.getrefcount(opened) > sys.getrefcount(fresh)
    held = ("what it returns", type(opened)) if is_held else find_iterator(function)
    if held is None:
        return opened
    with preserved_generators():
        if _first_of(opened) == _first_of(function(*arguments)):
            return function(*arguments)
    raise ConfigError(
        "DATA_STREAM",
        f"{name} cannot be read from its start a second time, as an epoch, an evaluation or a "
        f"resume does: the first reading uses up {held[0]} ({held[1].__name__}): open or "
        "make it anew in each call, as in StreamReader(lambda epoch: open(path))",
    )


def _first_of(opened: Any) -> bytes:
    """Return a hash of the first samples; leave `opened` as a reading further on would."""
    seed_generators(0)
    samples = [*islice(opened, NUM_FIRST)]
    if hasattr(opened, "seek") and not isinstance(opened, io.IOBase):
        opened.seek(1)
    batches = [part for each in samples for part in getattr(each, "micro_batches", [each])]
    plain = [(each.inputs, each.targets) if isinstance(each, Batch) else each for each in batches]
    return hash_of(plain)


def hash_of(sample: Any) -> bytes:
    """Return a hash of a sample, an empty one if it cannot be hashed."""
    try:
        return hash_value(sample)
    except Exception:  # of what cannot be pickled
        return b""


def find_iterator(function: Callable[..., Any]) -> tuple[str, type] | None:
    """Return the name and the type of an iterator, readable file or queue that `function` uses.

    It is one that the function, what it closes over or the user's files have at hand.
    """
    marks = mark_unsaved({"the stream": function}, has_defaults=True)
    if "stdin" in getattr(getattr(function, "__code__", None), "co_names", ()):
        marks["sys.stdin"] = type(sys.stdin), 0
    found = ((name, kind) for name, mark in marks.items() if (kind := _used_up_in(mark)))
    return next(found, None)


def _used_up_in(mark: Any) -> type | None:
    """Return the type in a mark, or in one of its items, that a reading uses up."""
    kind, content = mark or (None, None)
    if kind in QUEUES:
        return kind  # type: ignore[no-any-return]  # it is one of them
    if isinstance(kind, type) and issubclass(kind, Iterator):
        # A file that is written, such as a log, has no place.
        return None if issubclass(kind, io.IOBase) and content is None else kind
    items = content if isinstance(content, list) else ()
    return next(filter(None, map(_used_up_in, items)), None)
