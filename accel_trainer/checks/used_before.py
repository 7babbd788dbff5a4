"""Names what an earlier run in this process has changed, and a new run begins with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..core.errors import listed
from ..core.logger import logger
from .model_watch import weights_in
from .unsaved_state import Parts, mark_unsaved

_left: WeakKeyDictionary[object, dict[str, Any]] = WeakKeyDictionary()
"""What the last run has left in the objects that it changed."""


@contextmanager
def noted_changes(parts: Parts, *, is_new: bool) -> Iterator[None]:
    """Note what the run in the block changes in its `parts`; warn of those that one has changed.

    A run that is not new takes what it needs from its checkpoint. An object that was set back, or
    changed by somebody else since, is as a new one. **Host sync.**
    """
    before = {name: _mark(part) for name, part in parts.items()}
    used = {name for name, part in parts.items() if before[name] and _seen(part) == before[name]}
    if used and is_new:
        logger.warning(
            "[USED_BEFORE] this run starts with %s as an earlier run in this process left it: "
            "make a new one for each run, or name the earlier run with --init-from",
            listed(used),
        )
    yield
    for name, part in parts.items():
        with suppress(TypeError):  # of an object without weak references, or without a hash
            _left.pop(part, None)
            if (after := _mark(part)) != before[name]:
                _left[part] = after


def _seen(part: object) -> dict[str, Any] | None:
    with suppress(TypeError):  # as above
        return _left.get(part)
    return None


def _mark(part: object) -> dict[str, Any]:
    """Return marks of an object's own values; of the files that it comes from, others have some."""
    if isinstance(part, nn.Module):
        return weights_in(part)
    marks = mark_unsaved({"own": part})
    return {name: mark for name, mark in marks.items() if name.startswith("own.")}
