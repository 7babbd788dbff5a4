"""Names hooks that change what they are called with, or read gradients where there are none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..core.digest import flatten
from ..core.errors import listed
from ..core.logger import logger
from ..core.types import Batch, Gradients, StepOutput, StepReport
from .subject import differing
from .unsaved_state import mark_tensor

_GRADIENT: Any = Tensor.grad
# What the hooks of a step are called with.
_NAMES: Mapping[type, str] = {
    Batch: "batch",
    Gradients: "gradients",
    StepOutput: "output",
    StepReport: "report",
}
_AFTER_BACKWARD = (".before_update", ".on_step_end")


class HookArguments:
    """Watches the hooks of a step: they are to read what they get, and to change nothing of it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._named: set[tuple[str, str]] = set()

    @contextmanager
    def watching(self, name: str, arguments: Sequence[Any]) -> Iterator[None]:
        """Warn of what the hook of this `name`, in the block, changes in place. **Host sync.**"""
        before = self._mark(arguments)
        reads = _GradientReads({*self._model.parameters()})
        with reads:
            yield
        if changed := differing(before, self._mark(arguments)):
            self._warn(
                name,
                f"changes {listed(changed)} in place, which it is only to read: to change "
                "them, override train_step of the trainer, or step of the task",
            )
        if reads.found_none and name.endswith(_AFTER_BACKWARD):
            self._warn(
                name,
                "reads .grad of parameters, which is None there: read the gradients that "
                "before_update gets; --trainer.max-grad-norm clips them",
            )

    def _mark(self, arguments: Sequence[Any]) -> dict[str, Any]:
        tensors = {
            f"grad of {name}": each.grad for name, each in self._model.named_parameters()
        } | {path: each for argument in arguments for path, each in _values_of(argument).items()}
        return {
            name: mark_tensor(each) for name, each in tensors.items() if isinstance(each, Tensor)
        }

    def _warn(self, name: str, fact: str) -> None:
        if (name, fact) not in self._named:
            self._named.add((name, fact))
            logger.warning("[CALLBACK] %s %s", name, fact)


def _values_of(argument: Any) -> Mapping[str, Any]:
    """Return what a hook may reach in an argument, by name."""
    kind = type(argument)
    if kind not in _NAMES:
        return {}
    values = {field: getattr(argument, field) for field in kind.__match_args__}
    gradients = values.pop("tensors", {}).items()  # of Gradients
    named = {f"gradient of {name}": each for name, each in gradients}
    return named | flatten({_NAMES[kind]: values})


class _GradientReads(TorchFunctionMode):
    """Notes whether the user's code reads a gradient that is None."""

    def __init__(self, parameters: set[nn.Parameter]) -> None:
        super().__init__()
        self._parameters = parameters
        self.found_none = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        is_read = found is None and func == _GRADIENT.__get__
        if is_read and args[0] in self._parameters and not _is_called_by_module():
            self.found_none = True
        return found


def _is_called_by_module() -> bool:
    """Whether a method of a module or an optimizer asks, such as `zero_grad` or `to`."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__") == "torch.overrides":
        frame = frame.f_back
    name = str(frame.f_globals.get("__name__"))
    return name.startswith(("torch.nn.modules", "torch.optim", "torch._tensor"))
