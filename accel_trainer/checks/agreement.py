"""Checks that code, settings and data are the same on all processes of a run."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from ..checkpoint.optimizer_state import OptimizerState
from ..core.digest import flatten
from ..core.errors import ConfigError
from ..core.learning_rate import Schedule
from ..core.wording import describe_tensor
from ..distributed.accelerator import library_versions
from ..distributed.collectives import differing_lines


def describe_identity(settings: str) -> dict[str, str]:
    """Return what must be the same on all processes, by name: versions, sources and settings."""
    sources = [*sorted(Path(__file__).parents[1].rglob("*.py")), Path(sys.argv[0])]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources if path.is_file()))
    return {
        **library_versions(),
        "code": digest.hexdigest(),
        "config": settings,
    }


def check_same_everywhere(values: Mapping[str, str], accelerator: Accelerator) -> None:
    """Raise on all processes if a named value differs from the main process's. **Collective.**

    The message shows the first line that differs if a value has several lines.
    """
    listed = []
    for name, value in values.items():
        if lines := differing_lines(value, accelerator):
            shown = f" ({next(iter(lines.values()))})" if "\n" in value else ""
            listed.append(f"{name} on {', '.join(map(str, lines))}{shown}")
    if listed:
        raise ConfigError(
            "PROCESSES_DIFFER",
            f"not the same as on process 0: {'; '.join(listed)}. Install the same software, copy "
            "the same code and data to every machine, start all processes in the same way, and do "
            "not let the recipe depend on the process or on the order of a set (sort its names)",
        )


def describe_model(model: nn.Module) -> str:
    """Return the class of `model`, and a line for each parameter and buffer."""
    lines = (
        f"{name} {describe_tensor(tensor)}" + " trained" * tensor.requires_grad
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    )
    return "\n".join([type(model).__qualname__, *lines])


def describe_optimizer(optimizer: Optimizer, model: nn.Module) -> str:
    """Return a line for the class of `optimizer`, and for each plain setting of a group."""
    lines = (
        f"{path} {leaf!r}"
        for path, leaf in flatten(OptimizerState(optimizer, model).state_dict()).items()
        if isinstance(leaf, int | float | str)
    )
    return "\n".join(sorted(lines))


def describe_schedule(schedule: Schedule, num_steps: int) -> str:
    """Return a line for the learning rate at the first, the middle and the last step, if any."""
    steps = (0, num_steps // 2, num_steps - 1) if num_steps else ()
    return "\n".join(f"step {at}: {schedule(at)}" for at in steps)
