"""State that no checkpoint holds: attributes, globals and generators of the user's objects."""

from __future__ import annotations

import argparse
import array
import ctypes
import gc
import inspect
import io
import itertools
import operator
import os
import queue
import random
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import cache, partial
from multiprocessing.sharedctypes import SynchronizedBase
from numbers import Number
from pathlib import Path
from types import FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..core.digest import bytes_of
from ..core.shards import local_part
from ..core.tensor_memory import quick_digest
from ..core.user_code import LIBRARIES
from .model_watch import hooks_of

_MAX_ITEMS = 1000
_MAX_BYTES = 2**16
_MAX_DIGESTED_BYTES = 2**26
QUEUES = (queue.Queue, queue.SimpleQueue)
_IN_BYTES = (bytearray, array.array, ctypes.c_int.__mro__[2])
# What shows the value of an object, by its type.
_CONTENT: dict[tuple[type, ...], Callable[[Any], object]] = {
    (type(None), Number, str, bytes, np.generic): repr,
    (random.Random, np.random.Generator, np.random.RandomState): (
        lambda each: repr(getattr(each, "_bit_generator", each).__reduce__())
    ),
    (torch.Generator,): lambda each: bytes_of(each.get_state()).numpy().tobytes(),
    _IN_BYTES: bytes,
    QUEUES: lambda each: each.qsize(),
}
# Objects of which another one shows the value.
_HOLDING = (SynchronizedBase, ContextVar, SimpleNamespace, argparse.Namespace, threading.local)
_INSTALLED = {"site-packages", "dist-packages"}
_FOLDERS = (f"{sysconfig.get_path('stdlib')}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")
_CACHED = type(cache(int))
_CODE = (FunctionType, MethodType, ModuleType, type, _CACHED)

Parts = Mapping[str, object]
"""What a run is built from, or keeps, by name."""

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
    parts: Parts,
    *,
    model: nn.Module | None = None,
    stored: Sequence[object] = (),
    has_defaults: bool = False,
) -> dict[str, Mark]:
    """Return marks, by name, of the values that `parts` keep where no checkpoint has them.

    **Host sync** for tensors on a device.

    These values are:

    - attributes of the parts, and of torch's modules and objects of the user's classes in them,
      which a class may have as a default (with `has_defaults`),
    - whether parameters are trained,
    - attributes of their classes, and the state of optimizers inside of them,
    - what functions among them, and the hooks of modules, close over,
    - globals of the files that define these classes and functions, and of the user's files and
      classes that these name.

    Left out are tensors of the `model`, what is `stored` otherwise, attributes that libraries set,
    tensors that autograd has computed, arrays that are files, and names in the
    `unsaved_attributes` of an object, class or file, which no resume needs.
    """
    return Walk(parts, model, stored, has_defaults=has_defaults).marks


class Walk:
    """Finds `marks`, as `mark_unsaved` returns them, and by the same names the `owners`.

    That is whose attribute a value is, and what it is called there.
    """

    def __init__(
        self,
        parts: Parts,
        model: nn.Module | None,
        stored: Sequence[object] = (),
        *,
        has_defaults: bool = False,
    ) -> None:
        self._parts = parts.values()
        self._has_defaults = has_defaults
        self.marks: dict[str, Mark] = {}
        self.owners: dict[str, tuple[object, str]] = {}
        self.functions: list[FunctionType] = []
        tensors = () if model is None else (*model.parameters(), *model.buffers())
        self.seen = {id(each) for each in (*tensors, *stored)}
        for name, part in parts.items():
            self.visit(name, part)
        for function in self.functions:  # a part that one closes over has its own name
            self.visit_code(function)

    def visit(self, name: str, value: Any) -> None:
        """Mark `value`, or the values in an object. What raises when it is read is left out."""
        if isinstance(value, partial):
            called = {"func": value.func, "args": value.args, **value.keywords}
            self._visit_all(name, value, called)
            return
        if isinstance(value, _CODE):
            self._visit_code(name, value)
            return
        if _has_attributes(value):
            if id(value) not in self.seen:
                self.seen.add(id(value))
                self._visit_object(name, value)
            if not isinstance(value, list | dict | set | deque):
                return
        with suppress(Exception):
            # The mark of a list or a dict shows only plain values.
            for key, item in items_in(value).items():
                if _has_attributes(item):
                    self.visit(f"{name}[{key}]", item)
            if (mark := self.mark(value)) is not None:
                # A callback has the name of its class, whose values it may have replaced.
                self.marks.setdefault(name, mark)

    def _visit_code(self, name: str, value: Any) -> None:
        """Visit what a function, a method, a class or a file of the user's has."""
        if isinstance(value, MethodType):
            self.visit(name, value.__self__)
            value = value.__func__
        if isinstance(value, _CACHED):
            cached, value = value, value.__wrapped__
            if _draws(value):
                self.marks[f"{value.__qualname__}.cache_info"] = type(cached), cached.cache_info()
        if isinstance(value, FunctionType):
            self.functions.append(value)
        elif isinstance(value, type):
            self.visit_code(value)
        elif isinstance(value, ModuleType) and _is_users(value.__name__):
            self._visit_owner(value.__name__, value)

    def _visit_object(self, name: str, value: Any) -> None:
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
        if isinstance(value, Iterator):
            self.marks[name] = type(value), None
        if isinstance(value, Optimizer) and not any(value is part for part in self._parts):
            self.visit(f"{name}.state", value.state)
        kind = type(value)
        if is_of_user(kind) or kind.__module__.startswith(("torch.nn.", "torch.optim.lr")):
            values = values_in(value)
            if self._has_defaults:
                values = defaults_of(kind) | values
            own = {key: each for key, each in values.items() if key not in _set_by_libraries()}
            self._visit_all(name, value, own)
        self.visit_code(*kind.__mro__)

    def _visit_all(self, name: str, owner: object, values: Mapping[str, Any]) -> None:
        unneeded = getattr(owner, "unsaved_attributes", ())
        for key, value in list(values.items()):
            if not key.startswith("__") and key not in unneeded:
                self.owners.setdefault(f"{name}.{key}", (owner, key))
                self.visit(f"{name}.{key}", value)

    def visit_code(self, *found: type | FunctionType) -> None:
        """Visit what the user's classes and functions have, and the globals of their files."""
        for code in found:
            if is_of_user(code):
                module = sys.modules.get(code.__module__)
                self._visit_owner(code.__qualname__, code)
                if module is not None:
                    self._visit_owner(code.__module__, module)

    def _visit_owner(self, name: str, owner: Any) -> None:
        if id(owner) not in self.seen:
            self.seen.add(id(owner))
            self._visit_all(name, owner, values_in(owner))

    def mark(self, value: Any) -> Mark | None:
        """Return a mark of a value that is no object of the user's; None if it has none."""
        if type(value) is np.ndarray:
            value = torch.from_numpy(value)
        if isinstance(value, Tensor):
            if id(value) in self.seen or value.grad_fn is not None:
                return None
            if value.nbytes > _MAX_DIGESTED_BYTES:  # such as data in memory
                value = local_part(value).reshape(-1)[:: value.nbytes // _MAX_BYTES]
            return mark_tensor(value)
        for kinds, read in _CONTENT.items():
            if isinstance(value, kinds):
                return type(value), read(value)
        if isinstance(value, _HOLDING):
            return type(value), self.mark(_held_by(value))
        if isinstance(value, Iterator):
            return type(value), self._place_of(value)
        return self._mark_items(value)

    def _mark_items(self, value: Any) -> Mark | None:
        if not isinstance(value, list | tuple | set | frozenset | deque | Mapping):
            return None
        if len(value) > _MAX_ITEMS:
            values = value.values() if isinstance(value, Mapping) else value
            return type(value), hash((*map(id, values),))
        items = value.items() if isinstance(value, Mapping) else value
        return type(value), [self.mark(item) for item in items]

    def _place_of(self, value: Any) -> object:
        """Return what shows how far an iterator, or a file that is read, has come."""
        if isinstance(value, io.IOBase):
            return None if value.writable() else getattr(value, "buffer", value).tell()
        if isinstance(value, GeneratorType):
            if (frame := value.gi_frame) is None:
                return None
            # A loop keeps its iterator on the stack.
            inner = [each for each in gc.get_referents(value) if isinstance(each, Iterator)]
            held = [self.mark(each) for each in (*frame.f_locals.values(), *inner)]
            return frame.f_lasti, held
        if type(value).__module__ not in ("builtins", "itertools"):
            return getattr(value, "_num_yielded", None)  # of torch's loaders
        held = [self.mark(each) for each in gc.get_referents(value)]
        number = repr(value) if isinstance(value, itertools.count) else None
        return operator.length_hint(value), number, held


def mark_tensor(tensor: Tensor) -> Mark:
    """Mark a tensor by its kind and a digest of its bytes."""
    return (type(tensor), tensor.dtype, tensor.shape), quick_digest(tensor)


def _held_by(value: Any) -> object:
    if isinstance(value, SynchronizedBase):
        return value.get_obj()
    return value.get(None) if isinstance(value, ContextVar) else vars(value)


def _has_attributes(value: object) -> bool:
    """Return whether a value is a module, an optimizer, or an object of the user's classes."""
    if isinstance(value, nn.Module | Optimizer | LRScheduler):
        return True
    # A ctypes array belongs to the file that first names its length.
    is_users = is_of_user(type(value)) and not isinstance(value, (*_IN_BYTES, type))
    return is_users and (hasattr(value, "__dict__") or bool(getattr(value, "__slots__", ())))


def _draws(function: Any) -> bool:
    """Return whether a function seems to draw random numbers, which a cache then keeps."""
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    return any("rand" in name or name in ("normal", "uniform", "shuffle") for name in names)


def defaults_of(kind: type) -> dict[str, Any]:
    """Return what an object of the user's class has before it sets an attribute of its own."""
    return {
        name: value
        for each in filter(is_of_user, reversed(kind.__mro__))
        for name, value in vars(each).items()
        if not name.startswith("__")
    }


def items_in(value: Any) -> Mapping[Any, Any]:
    """Return the items of a list, a tuple or a mapping that is not large; of others, none."""
    if not isinstance(value, list | tuple | deque | Mapping) or len(value) > _MAX_ITEMS:
        return {}
    return dict(value if isinstance(value, Mapping) else enumerate(value))


def values_in(owner: Any) -> dict[str, Any]:
    """Return the attributes of an object, and what a function closes over."""
    if isinstance(owner, FunctionType):
        closed = {"defaults": owner.__defaults__, **(owner.__kwdefaults__ or {})}
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
    return module == "__main__" if file is None else is_of_users_file(file)  # None: a notebook


def is_of_users_file(file: str) -> bool:
    """Return whether a file is not Python's, not installed anywhere, and not of this package."""
    # As texts: paths of all that is imported would take as long as ten small steps.
    return _INSTALLED.isdisjoint(file.split(os.sep)) and not file.startswith(_FOLDERS)
