"""Finds norms over the samples of a forward that would once get a single one.

torch refuses a single value for a channel, in the last step of an epoch perhaps. Norms over several
places of a sample, such as pixels, have more values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.batch_plan import BatchPlan
from ..core.errors import ConfigError
from ..core.training_mode import set_training_mode
from .config import TrainerConfig


def has_lone_sample(plan: BatchPlan) -> bool:
    """Whether a process has a forward with a single sample in some step."""
    steps = (0, plan.steps_per_epoch - 1)
    return any(plan.smallest_forward(step, over_processes=False) == 1 for step in steps)


@contextmanager
def lone_samples_refused(
    model: nn.Module, plan: BatchPlan, config: TrainerConfig
) -> Iterator[None]:
    """Watch forwards in the block; leave `model` in training mode.

    Raises ConfigError afterwards if training would give one of its norms a single value.
    """

    def note(name: str, norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        for values in inputs[:1]:
            if values.numel() == values.shape[0] * values.shape[1]:
                # As `convert_sync_batch_norm` makes them.
                found[name] = isinstance(norm, nn.SyncBatchNorm) or "forward" in vars(norm)

    found: dict[str, bool] = {}
    set_training_mode(model)
    hooks = [
        norm.register_forward_pre_hook(partial(note, name))
        for name, norm in model.named_modules()
        if isinstance(norm, _BatchNorm) and norm.training
    ]
    yield
    for hook in hooks:
        hook.remove()
    last = min(plan.steps_per_epoch, config.num_steps(plan.steps_per_epoch)) - 1
    fixes = (
        (0, "set --batch-size so that each forward has more"),
        (last, "leave the last samples of an epoch out with --batch.drop-last"),
    )
    for (name, is_over_processes), (step, fix) in product(found.items(), fixes):
        if plan.smallest_forward(step, over_processes=is_over_processes) == 1:
            fact = f"{name or 'the model'} normalises over samples, and a forward has only 1"
            raise ConfigError("BATCH_SIZE", f"{fact}: {fix}")
