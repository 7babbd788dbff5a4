"""Names an optimizer that has changed none of its parameters in a whole run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ..core.errors import listed
from ..core.parameters import Optimizers, parameters_of
from ..core.shards import local_part
from ..core.tensor_memory import sum_of_bits
from ..training.callback import TrainerView

_logger = logging.getLogger(__name__)


@contextmanager
def untrained_named(optimizers: Optimizers, trainer: TrainerView) -> Iterator[None]:
    """Warn of optimizers whose parameters a run, in the block, leaves as they were. **Host sync.**

    The run must end, after an epoch or more. Of a rate of 0, nobody expects more.
    """
    before = _sums_of(optimizers)
    yield
    after = _sums_of(optimizers) if trainer.is_finished and trainer.state.epoch else {}
    if same := {name for name, sums in after.items() if sums and sums == before.get(name)}:
        _logger.warning(
            "[UNTRAINED] the run has changed no parameter of %s: look for a turn that never "
            "comes, a gradient that train_step drops, or a detach() before the loss",
            listed(f"the optimizer {name}".rstrip() for name in same),
        )


def _sums_of(optimizers: Optimizers) -> dict[str, list[int]]:
    """Return the sums of the bits of what each optimizer is to train."""
    return {
        name: [
            int(sum_of_bits(local_part(each)))
            for each in parameters_of(optimizer)
            if each.requires_grad
        ]
        for name, optimizer in optimizers.items()
        if any(group["lr"] for group in optimizer.param_groups)
    }
