"""Checks the parts of a recipe (model, task, loaders, ...) before they are used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..core.errors import ConfigError

_NEEDED = {
    "model": ("forward", "named_parameters"),
    "task": ("step",),
    "train_set": ("plan", "step_batches"),
    "eval_sets": ("num_samples", "batches"),
    "test_set": ("num_samples", "batches"),
    "metrics": ("empty", "update", "compute"),
    "callbacks": ("on_fit_start", "on_step_end", "state_dict"),
}
_VALUES = ("plan", "num_samples")  # the others are methods
_LISTS = ("metrics", "callbacks")


def check_parts(**parts: Any) -> None:
    """Raise ConfigError if an argument of `build_trainer` cannot be what its name says.

    Of `metrics` and `callbacks`, each item is checked.
    """
    for name, part in parts.items():
        if name in _LISTS and (isinstance(part, str | type) or not isinstance(part, Iterable)):
            raise ConfigError("CONFIG", f"{name}= is no list: put it in brackets")
        for item in part if name in _LISTS else [part]:
            check_part(name, item)


def check_part(name: str, part: Any) -> None:
    """Raise ConfigError if `part` cannot be what the argument `name` needs."""
    if isinstance(part, type):
        raise ConfigError(
            "CONFIG",
            f"{name}= has the class {part.__name__}: give an instance of it, {part.__name__}()",
        )
    missing = [
        needed
        for needed in _NEEDED[name]
        if not (
            hasattr(part, needed) if needed in _VALUES else callable(getattr(part, needed, None))
        )
    ]
    if missing:
        raise ConfigError(
            "CONFIG",
            f"{name}= has an object of type {type(part).__name__}, without "
            f"{' and '.join(missing)}: see the documentation of build_trainer for what it can be",
        )
    if name == "task" and hasattr(part, "train_step"):
        # A subclass of a built-in task would train with the loss of that.
        raise ConfigError("CONFIG", "task= has train_step, which nothing calls: name it step")
