"""What user code changes in a model besides training it, and what a step uses of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..core.parameters import parameters_of
from ..core.tensor_memory import quick_digest

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)


def hooks_of(owner: nn.Module | Tensor) -> list[Any]:
    """Return the hooks of a module or parameter."""
    return [hook for kind in _HOOKS for hook in (getattr(owner, kind, None) or {}).values()]


def mark_model(model: nn.Module) -> dict[str, Any]:
    """Return marks, by name, of what only a step is to change in a model. **Host sync.**

    These are its weights and which of them are trained, and of each module the object, its parts,
    its forward, its hooks and whether it is in training mode.
    """
    marks = weights_in(model)
    for name, module in model.named_modules(prefix="model"):
        forward = getattr(module.forward, "__func__", module.forward)
        marks[name] = [*map(id, (module, forward, *module.children()))]
        marks[f"{name}.hooks"] = [*map(id, hooks_of(module))]
        marks[f"{name}.training"] = module.training
    for name, weight in model.named_parameters(prefix="model"):
        marks[f"{name}.hooks"] = [*map(id, hooks_of(weight))]
        marks[f"{name}.requires_grad"] = weight.requires_grad
    return marks


def weights_in(model: nn.Module, prefix: str = "model") -> dict[str, Any]:
    """Return digests, by name, of the parameters of a model. **Host sync.**"""
    return {name: quick_digest(each) for name, each in model.named_parameters(prefix=prefix)}


class StepUse(NamedTuple):
    """The marks of a model before and after a step, and the flags that the step has used.

    The first forward of a module uses its `training`. A parameter's `requires_grad` is used as
    whether it had a gradient, in a step of its optimizer.
    """

    before: dict[str, Any]
    used: dict[str, bool]
    after: dict[str, Any]

    def changed_late(self, following: StepUse) -> set[str]:
        """Return the flags that this step changed after their use, for that in the `following` one.

        A resume in between begins without the change.
        """
        return {
            name
            for name, used in self.used.items()
            if self.before.get(name) == used != self.after.get(name) == following.used.get(name)
        }


@contextmanager
def flags_noted(model: nn.Module, used: dict[str, bool]) -> Iterator[None]:
    """Note in `used` what the block, a step, uses of the flags of the plain `model`.

    Modes are not noted in a compiled model, which would be compiled again.
    """
    modes = {id(module): f"{name}.training" for name, module in model.named_modules(prefix="model")}
    weights = {f"{name}.requires_grad": each for name, each in model.named_parameters("model")}

    def note_mode(module: nn.Module, inputs: Any) -> None:
        if id(module) in modes:
            used.setdefault(modes[id(module)], module.training)

    def note_gradients(optimizer: Optimizer, *_: Any) -> None:
        stepped = {*parameters_of(optimizer)}
        used.update(
            {name: each.grad is not None for name, each in weights.items() if each in stepped}
        )

    is_compiled = any(getattr(each, "_compiled_call_impl", None) for each in model.modules())
    with (
        nullcontext() if is_compiled else register_module_forward_pre_hook(note_mode),
        register_optimizer_step_pre_hook(note_gradients),
    ):
        yield


@contextmanager
def watched_read(owner: object, key: str, name: str, read: set[str]) -> Iterator[None]:
    """Add `name` to `read` if the block reads the value that `key` of `owner` has now."""
    kind: Any = type(owner)
    plain = kind.__getattribute__
    value = plain(owner, key)

    def get(each: object, attribute: str) -> Any:
        found = plain(each, attribute)
        if each is owner and attribute == key and found is value:
            read.add(name)
        return found

    kind.__getattribute__ = get
    try:
        yield
    finally:
        kind.__getattribute__ = plain
