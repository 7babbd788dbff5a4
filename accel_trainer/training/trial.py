"""What lets a part of the user's be tried before it is needed, so that nothing that is trained later changes."""

from __future__ import annotations

import copy
from collections import deque
from typing import TypeVar

T = TypeVar("T")


def set_aside(part: T) -> T:
    """Return a copy whose attributes, lists, dicts, sets and buffers may be replaced; tensors are shared.

    What cannot be copied, such as a class or a module, is returned itself.
    """
    try:
        copied = copy.copy(part)
    except Exception:  # the user's part decides what is raised
        return part
    if copied is part or not hasattr(copied, "__dict__"):
        return copied
    attributes = vars(copied)
    for name, value in attributes.items():
        if isinstance(value, list | dict | set | deque):
            attributes[name] = copy.copy(value)
    return copied
