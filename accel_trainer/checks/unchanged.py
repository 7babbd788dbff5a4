"""Refuses what user code leaves changed in a model that it was only to look at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn

from .model_watch import hooks_of, mark_model, weights_in
from .subject import refuse_changes
from .unsaved_state import is_of_user


@contextmanager
def left_unchanged(what: str, model: nn.Module, average: nn.Module | None = None) -> Iterator[None]:
    """Check that `what`, in the block, puts back what it changes in the models. **Host sync.**

    These are weights and which of them are trained and, in `model`, its modules and the user's
    hooks. Modes and buffers are put back after an evaluation in any case. Call it once a forward
    has set up what a model sets up late.

    Raises CheckpointError for what is not as it was.
    """

    def mark() -> dict[str, Any]:
        # The first forward of an average may set up the rest.
        return _mark(model) | ({} if average is None else weights_in(average, "average_model"))

    before = mark()
    yield
    refuse_changes(
        what,
        before,
        mark(),
        "put it back before the call returns, since a run that is killed evaluates more often",
    )


def _mark(model: nn.Module) -> dict[str, Any]:
    kept = {key: each for key, each in mark_model(model).items() if not key.endswith(".training")}
    for name, module in model.named_modules(prefix="model"):
        # A library may add hooks of its own when it is asked for something.
        kept[f"{name}.hooks"] = [id(hook) for hook in hooks_of(module) if _is_users(hook)]
    return kept


def _is_users(hook: Any) -> bool:
    code = hook.func if isinstance(hook, partial) else hook
    code = getattr(code, "__func__", code)
    return is_of_user(code if isinstance(code, FunctionType) else type(code))
