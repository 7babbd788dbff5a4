"""Copies of the user's parts for a trial that must not change what is trained later."""

from __future__ import annotations

import copy
from collections import deque
from typing import TypeVar

T = TypeVar("T")


def trial_copy(part: T) -> T:
    """Return a copy that shares the tensors of `part`, but not its containers.

    The copy's attributes, lists, dicts, sets and buffers may be replaced or changed. What cannot be
    copied, such as a class or a module of Python, is returned itself.
    """
    try:
        copied = copy.copy(part)
    except Exception:  # the user's `__copy__` may raise anything
        return part
    if copied is part or not hasattr(copied, "__dict__"):
        return copied
    attributes = vars(copied)
    for name, value in attributes.items():
        if isinstance(value, list | dict | set | deque):
            attributes[name] = copy.copy(value)
    return copied
