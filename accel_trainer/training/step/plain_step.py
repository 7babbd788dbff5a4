"""Steps torch's optimizers without what only profilers and hooks need."""

from __future__ import annotations

import sys
from typing import Any

from torch.autograd import profiler
from torch.optim import Optimizer

_WRAPPER = Optimizer.profile_hook_step(lambda optimizer: None).__code__
_MODULE: Any = sys.modules[Optimizer.__module__]


def take_step(optimizer: Optimizer) -> None:
    """Call `optimizer.step()`, without torch's wrapper where that would do nothing.

    It names the step in a profile, which takes longer than the step of a tiny model (torch 2.13).
    """
    step: Any = type(optimizer).step
    is_plain = getattr(step, "__code__", None) is _WRAPPER
    if is_plain and "step" not in vars(optimizer) and not _is_observed(optimizer):
        step.__wrapped__(optimizer)
    else:
        optimizer.step()


def _is_observed(optimizer: Optimizer) -> bool:
    """Return whether somebody profiles or has hooks; True where torch keeps them elsewhere."""
    try:
        return bool(
            profiler._is_profiler_enabled
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or _MODULE._global_optimizer_pre_hooks
            or _MODULE._global_optimizer_post_hooks
        )
    except AttributeError:
        return True
