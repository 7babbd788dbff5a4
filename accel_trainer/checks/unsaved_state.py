"""State that no checkpoint holds: attributes, globals and generators of the user's objects."""

from __future__ import annotations

import inspect
import itertools
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ..core.digest import bytes_of
from ..core.shards import local_part
from ..core.tensor_memory import sum_of_bits
from ..core.user_code import LIBRARIES
from .model_watch import hooks_of

_MAX_ITEMS = 1000
_MAX_BYTES = 2**16
_MAX_SUMMED_BYTES = 2**24
# Types whose `repr`, or whose `__reduce__`, shows their value.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)
_REDUCED = (itertools.count, random.Random, np.random.Generator)
_INSTALLED = {"site-packages", "dist-packages"}
_CODE = (type, ModuleType, property, classmethod, staticmethod)

Mark = tuple[Any, object]
"""Shows whether a value has changed: its type (of a tensor with dtype and shape), and its
content."""


@cache
def _set_by_libraries() -> frozenset[str]:
    """Attributes that every module and optimizer has, or that schedulers and scalers set.

    Asked for late: the first optimizer of a process imports torch's compiler, for a second or two.
    """
    optimizer = SGD([torch.zeros(1)], lr=0.1)
    return frozenset(
        {*vars(nn.Module()), *vars(optimizer), "found_inf", "grad_scale", "_opt_called"}
    )


def mark_unsaved(
    parts: Mapping[str, object], *, model: nn.Module, stored: Sequence[object] = ()
) -> dict[str, Mark]:
    """Return marks, by name, of the values that `parts` keep where no checkpoint has them.

    **Host sync** for tensors on a device.

    These values are:

    - attributes of the parts, and of torch's modules and objects of the user's classes in them,
    - whether parameters are trained,
    - attributes of their classes, and the state of optimizers inside of them,
    - what functions among them, and the hooks of modules, close over,
    - globals of the files that define these classes and functions.

    Left out are the model's tensors, what is `stored` otherwise, attributes that libraries set,
    tensors that autograd has computed, arrays that are files, and names in the
    `unsaved_attributes` of an object, class or file, which no resume needs.
    """
    walk = _Walk(model, parts, stored)
    for name, part in parts.items():
        walk.visit(name, part)
    for function in walk.functions:  # a part that one closes over has its own name
        walk.visit_code(function)
    return walk.marks


class _Walk:
    def __init__(
        self, model: nn.Module, parts: Mapping[str, object], stored: Sequence[object]
    ) -> None:
        self._parts = parts.values()
        self.marks: dict[str, Mark] = {}
        self.functions: list[FunctionType] = []
        known = itertools.chain(model.parameters(), model.buffers(), stored)
        self._seen = {id(each) for each in known}

    def visit(self, name: str, value: Any) -> None:
        """Mark `value`, or the values in an object. What raises when it is read is left out."""
        if isinstance(value, partial):
            called = {"func": value.func, "args": value.args, **value.keywords}
            self._visit_all(name, value, called)
            return
        if isinstance(value, MethodType):
            self.visit(name, value.__self__)
            value = value.__func__
        if isinstance(value, FunctionType):
            self.functions.append(value)
            return
        is_users = is_of_user(type(value))
        has_attributes = hasattr(value, "__dict__") or bool(getattr(value, "__slots__", ()))
        if isinstance(value, nn.Module | Optimizer) or (is_users and has_attributes):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._visit_object(name, value, is_users=is_users)
            return
        with suppress(Exception):
            if (mark := self._mark(value)) is not None:
                self.marks[name] = mark

    def _visit_object(self, name: str, value: Any, *, is_users: bool) -> None:
        if isinstance(value, nn.Module):
            hooks = hooks_of(value)
            owned = {
                **value._parameters,
                **value._buffers,
                **value._modules,
                "requires_grad": [each.requires_grad for each in value.parameters(recurse=False)],
                "num_hooks": len(hooks),
            }
            self._visit_all(name, value, owned)
            for hook in hooks:
                self.visit(f"{name}.hook", hook)
            if type(value).get_extra_state is not nn.Module.get_extra_state:
                return  # it stores its attributes itself
        if isinstance(value, Optimizer) and not any(value is part for part in self._parts):
            self.visit(f"{name}.state", value.state)
        if is_users or type(value).__module__.startswith("torch.nn."):  # as `p` of a dropout
            values = _values_in(value)
            own = {key: each for key, each in values.items() if key not in _set_by_libraries()}
            self._visit_all(name, value, own)
        self.visit_code(*type(value).__mro__)

    def _visit_all(self, name: str, owner: object, values: Mapping[str, Any]) -> None:
        unneeded = getattr(owner, "unsaved_attributes", ())
        for key, value in list(values.items()):
            if key.startswith("__") or key in unneeded:
                continue
            is_code = inspect.isroutine(value) or isinstance(value, _CODE)
            if not is_code or isinstance(value, FunctionType | MethodType):
                self.visit(f"{name}.{key}", value)

    def visit_code(self, *found: type | FunctionType) -> None:
        """Visit what the user's classes and functions have, and the globals of their files."""
        for code in found:
            if is_of_user(code):
                module = sys.modules.get(code.__module__)
                for name, owner in ((code.__qualname__, code), (code.__module__, module)):
                    if owner is not None and id(owner) not in self._seen:
                        self._seen.add(id(owner))
                        self._visit_all(name, owner, _values_in(owner))

    def _mark(self, value: Any) -> Mark | None:
        if isinstance(value, torch.Generator):
            value = value.get_state()
        if isinstance(value, np.ndarray) and not isinstance(value, np.memmap):
            value = torch.from_numpy(value)
        if isinstance(value, Tensor):
            if id(value) in self._seen or value.grad_fn is not None:
                return None
            if value.nbytes > _MAX_SUMMED_BYTES:  # such as data in memory: a sum takes seconds
                value = local_part(value).reshape(-1)[:: value.nbytes // _MAX_BYTES]
            return mark_tensor(value)
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
    """Mark a tensor by the sum of its elements' bits, and by a sample of its bytes.

    Of a small tensor the sample has all bytes; of a large one, such as a teacher's, only a few.
    """
    flat = local_part(tensor.detach()).reshape(-1).contiguous()
    sample = flat[:: flat.nbytes // _MAX_BYTES + 1].cpu().contiguous()
    kind = (type(tensor), tensor.dtype, tensor.shape)
    return kind, (int(sum_of_bits(flat)), bytes_of(sample).numpy().tobytes())


def _values_in(owner: Any) -> dict[str, Any]:
    """Return the attributes of an object, and what a function closes over."""
    if isinstance(owner, FunctionType):
        closed = dict[str, Any](defaults=owner.__defaults__)
        with suppress(ValueError):  # of a cell that is still empty
            closed |= inspect.getclosurevars(owner).nonlocals
        return {**vars(owner), **closed}
    slots = [name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ())]
    held = {name: getattr(owner, name) for name in slots if hasattr(owner, name)}
    return {**getattr(owner, "__dict__", {}), **held}


def is_of_user(code: type | FunctionType) -> bool:
    """Return whether a class or function is defined in the user's code."""
    return _is_users(str(code.__module__))  # None of some that are made while a program runs


@cache
def _is_users(module: str) -> bool:
    """Whether a module is the user's: not Python's, not installed, and not of this package."""
    if module.partition(".")[0] in LIBRARIES:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module == "__main__"  # a notebook
    path = Path(file)
    if not _INSTALLED.isdisjoint(path.parts):
        return False  # installed in this environment, or in one of the system or the user
    folders = (sysconfig.get_paths()["stdlib"], Path(__file__).parents[1])
    return not any(path.is_relative_to(folder) for folder in folders)
