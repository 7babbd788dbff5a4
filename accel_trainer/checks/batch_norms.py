"""Finds norms over the samples of a forward that would once get a single one.

torch refuses a single value for a channel, in the last step of an epoch perhaps. Norms over several
places of a sample, such as pixels, have more values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from ..core.batch_plan import BatchPlan
from ..core.errors import ConfigError
from ..training.config import TrainerConfig


def has_lone_sample(plan: BatchPlan) -> bool:
    """Whether a process has a forward with a single sample in some step."""
    smallest = partial(plan.smallest_forward, over_processes=False)
    return 1 in map(smallest, (0, plan.steps_per_epoch - 1))


@contextmanager
def lone_samples_refused(
    model: nn.Module, plan: BatchPlan, config: TrainerConfig
) -> Iterator[None]:
    """Watch forwards in the block; `model` is in training mode.

    Raises ConfigError afterwards if training would give one of its norms a single value.
    """
    norms = {
        norm: name
        for name, norm in model.named_modules()
        if isinstance(norm, _BatchNorm) and norm.training
    }
    found: dict[str, bool] = {}

    def note(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if norm in norms and inputs and inputs[0].numel() == math.prod(inputs[0].shape[:2]):
            # As `convert_sync_batch_norm` makes them.
            found[norms[norm]] = isinstance(norm, nn.SyncBatchNorm) or "forward" in vars(norm)

    with register_module_forward_pre_hook(note):
        yield
    last = min(plan.steps_per_epoch, config.last_step(plan.steps_per_epoch)) - 1
    for name, is_over_processes in found.items():
        smallest = partial(plan.smallest_forward, over_processes=is_over_processes)
        if 1 in map(smallest, (0, last)):
            fix = "leave the last samples of an epoch out with --batch.drop-last"
            if smallest(0) == 1:
                fix = "set --batch-size so that each forward has at least 2"
            raise ConfigError(
                "BATCH_SIZE",
                f"{name or 'the model'} normalises over the batch, but a forward has only "
                f"1 sample: {fix}",
            )
