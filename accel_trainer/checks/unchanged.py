"""Refuses what user code leaves changed in a model that it was only to look at."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn

from .model_watch import hooks_of, mark_model
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
    models = {"model": model} if average is None else {"model": model, "average_model": average}
    if hasattr(model, "reshard"):  # as FSDP2's modules, whose import takes 0.5 s
        yield  # FSDP keeps some weights whole after an evaluation
        return

    def mark() -> dict[str, Any]:
        weights = [_mark_weights(name, each) for name, each in models.items()]
        return dict(ChainMap(_mark_structure(model), *weights))

    before = mark()
    yield
    refuse_changes(
        what,
        before,
        mark(),
        "put it back before the call returns, since a run that is killed evaluates more often",
    )


def _mark_weights(prefix: str, model: nn.Module) -> dict[str, Any]:
    names = [name for name, _ in model.named_parameters(prefix=prefix)]
    kept = {*names, *(f"{name}.requires_grad" for name in names)}
    return {name: mark for name, mark in mark_model(model, prefix).items() if name in kept}


def _mark_structure(model: nn.Module) -> dict[str, Any]:
    modules = dict(model.named_modules(prefix="model"))
    marks = {name: mark for name, mark in mark_model(model).items() if name in modules}
    # A library may add hooks of its own when it is asked for something.
    for name, module in modules.items():
        marks[f"{name}.hooks"] = [id(hook) for hook in hooks_of(module) if _is_users(hook)]
    return marks


def _is_users(hook: Any) -> bool:
    code = hook.func if isinstance(hook, partial) else hook
    code = getattr(code, "__func__", code)
    return is_of_user(code if isinstance(code, FunctionType) else type(code))
