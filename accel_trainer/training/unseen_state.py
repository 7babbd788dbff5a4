"""State that no checkpoint holds: what a user's objects keep in attributes, classes, globals and generators."""

from __future__ import annotations

import inspect
import itertools
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ..core.shards import local_part
from ..core.user_code import LIBRARIES

_LISTED = 5
_MAX_ITEMS = 1000
_MAX_BYTES = 2**16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)
_REDUCED = (itertools.count, random.Random, np.random.Generator)
_INSTALLED = {"site-packages", "dist-packages"}
_CODE = (type, ModuleType, property, classmethod, staticmethod)
# What every module and every optimizer has, and what schedulers and gradient scalers set.
_NOT_OWN = {
    *vars(nn.Module()),
    *vars(SGD([torch.zeros(1)], lr=0.1)),
    "found_inf",
    "grad_scale",
    "_opt_called",
}

Mark = tuple[object, object]
Marks = Mapping[str, Mark]
"""What shows whether a value has changed: its type, of a tensor with dtype and shape, and its
content."""


def mark_unseen(parts: Mapping[str, object], *, model: nn.Module) -> dict[str, Mark]:
    """Return a mark of each value that `parts` keep outside the model's tensors and an optimizer's state, by its name.

    These are attributes, those of the parts' classes, and the globals of the files that define
    them. What libraries' classes keep for themselves is left out, what autograd has computed, and
    what the names in the `unsaved_attributes` of an object, class or file say that no resume needs.
    **Host sync** for tensors of a device.
    """
    walk = _Walk(model)
    for name, part in parts.items():
        walk.visit(name, part)
    return walk.marks


def listed(names: Iterable[str]) -> str:
    """Return the first of `names` in a text, and how many are left out."""
    found = sorted(names)
    return ", ".join(found[:_LISTED]) + f" and {len(found) - _LISTED} more" * (len(found) > _LISTED)


class _Walk:
    def __init__(self, model: nn.Module) -> None:
        self.marks: dict[str, Mark] = {}
        self._seen = {id(tensor) for tensor in itertools.chain(model.parameters(), model.buffers())}

    def visit(self, name: str, value: Any) -> None:
        """Mark what `value` holds. What fails when it is looked at is left out."""
        is_users = _is_users(type(value).__module__)
        if isinstance(value, nn.Module | Optimizer) or (is_users and hasattr(value, "__dict__")):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._visit_object(name, value, is_users=is_users)
            return
        with suppress(Exception):
            if (mark := self._mark(value)) is not None:
                self.marks[name] = mark

    def _visit_object(self, name: str, value: Any, *, is_users: bool) -> None:
        if isinstance(value, nn.Module):
            tensors = itertools.chain(
                value.named_parameters(recurse=False), value.named_buffers(recurse=False)
            )
            self._visit_all(name, value, dict(itertools.chain(tensors, value.named_children())))
            if type(value).get_extra_state is not nn.Module.get_extra_state:
                return  # it stores its attributes itself
        if is_users:
            own = {key: each for key, each in vars(value).items() if key not in _NOT_OWN}
            self._visit_all(name, value, own)
            self._visit_classes(type(value))

    def _visit_all(self, name: str, owner: object, values: Mapping[str, Any]) -> None:
        unneeded = getattr(owner, "unsaved_attributes", ())
        for key, value in list(values.items()):
            if not (
                key.startswith("__")
                or key in unneeded
                or inspect.isroutine(value)
                or isinstance(value, _CODE)
            ):
                self.visit(f"{name}.{key}", value)

    def _visit_classes(self, found: type) -> None:
        """Visit the attributes of a user's class and of its bases, and the globals of their files."""
        for base in found.__mro__:
            if _is_users(base.__module__):
                for name, owner in (
                    (base.__qualname__, base),
                    (base.__module__, sys.modules.get(base.__module__)),
                ):
                    if owner is not None and id(owner) not in self._seen:
                        self._seen.add(id(owner))
                        self._visit_all(name, owner, vars(owner))

    def _mark(self, value: Any) -> Mark | None:
        if isinstance(value, torch.Generator):
            value = value.get_state()
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if isinstance(value, Tensor):
            return (
                None if id(value) in self._seen or value.grad_fn is not None else mark_tensor(value)
            )
        if isinstance(value, _PLAIN):
            return type(value), repr(value)
        if isinstance(value, _REDUCED):
            return type(value), repr(getattr(value, "bit_generator", value).__reduce__())
        if not isinstance(value, list | tuple | set | frozenset | deque | Mapping):
            return None
        if len(value) > _MAX_ITEMS:
            return type(value), len(value)
        items = value.items() if isinstance(value, Mapping) else value
        return type(value), [self._mark(item) for item in items]


def mark_tensor(tensor: Tensor) -> Mark:
    """Mark a tensor by its bytes; a large one by their sum and a sample, so that a large teacher costs little."""
    flat = local_part(tensor.detach()).reshape(-1).contiguous()
    sample = flat[:: flat.nbytes // _MAX_BYTES + 1].cpu().contiguous()
    return (Tensor, tensor.dtype, tensor.shape), (
        int(sum_of_bits(flat)),
        sample.view(torch.uint8).numpy().tobytes(),
    )


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum [] int64 of the elements, their bits read as integers: the same on any number of threads."""
    flat = tensor.detach().reshape(-1)
    return flat.view(_INTEGERS.get(flat.itemsize, torch.int64)).sum()


@cache
def _is_users(module: str) -> bool:
    """Whether a file is the user's: neither Python's, nor installed in any environment, nor of this package."""
    if module.partition(".")[0] in LIBRARIES:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module == "__main__"  # a notebook
    path = Path(file)
    if not _INSTALLED.isdisjoint(path.parts):
        return False  # of this environment, of the system's that it sees, or of the user's own
    return not any(
        path.is_relative_to(folder)
        for folder in (sysconfig.get_paths()["stdlib"], Path(__file__).parents[1])
    )
