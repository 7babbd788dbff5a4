"""The parts that a recipe gives to the trainer: instances of the right kind, or one line that names the part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..core.errors import ConfigError

_NEEDED = {
    "model": ("forward", "named_parameters"),
    "task": ("train_step", "eval_step"),
    "loader": ("plan", "step_batches"),
    "eval_loader": ("num_samples", "batches"),
    "metrics": ("empty", "update", "compute"),
    "callbacks": ("on_fit_start", "on_step_end", "state_dict"),
}
_LISTS = ("metrics", "callbacks")


def check_parts(**parts: Any) -> None:
    """Raise ConfigError for a part, or an item of `metrics` or `callbacks`, that is not what its name says."""
    for name, part in parts.items():
        if name in _LISTS and (isinstance(part, str | type) or not isinstance(part, Iterable)):
            raise ConfigError("CONFIG", f"{name}= is no list: put it in brackets")
        for item in part if name in _LISTS else [part]:
            _check(name, item)


def _check(name: str, part: Any) -> None:
    if isinstance(part, type):
        raise ConfigError(
            "CONFIG",
            f"{name}= has the class {part.__name__}: give an instance of it, {part.__name__}()",
        )
    if missing := [attribute for attribute in _NEEDED[name] if not hasattr(part, attribute)]:
        fact = (
            f"{name}= has an object of type {type(part).__name__}, without {' and '.join(missing)}"
        )
        raise ConfigError(
            "CONFIG", f"{fact}: see the documentation of build_trainer for what it can be"
        )
