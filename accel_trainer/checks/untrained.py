"""Names an optimizer that has changed none of its parameters in a whole run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..core.errors import listed
from ..core.logger import logger
from ..core.parameters import Optimizers, parameters_of
from ..core.tensor_memory import quick_digest
from ..training.callback import TrainerView


@contextmanager
def untrained_named(optimizers: Optimizers, trainer: TrainerView) -> Iterator[None]:
    """Warn of optimizers whose parameters a run, in the block, leaves as they were. **Host sync.**

    The run must end, after an epoch or more. Of a rate of 0, nobody expects more.
    """
    before = _digests_of(optimizers)
    yield
    after = _digests_of(optimizers) if trainer.is_finished and trainer.state.epoch else {}
    if same := {name for name, each in after.items() if each and each == before.get(name)}:
        logger.warning(
            "[UNTRAINED] the run has changed no parameter of %s: look for a turn that never "
            "comes, a gradient that train_step drops, or a detach() before the loss",
            listed(f"the optimizer {name}".rstrip() for name in same),
        )


def _digests_of(optimizers: Optimizers) -> dict[str, list[object]]:
    """Return digests of what each optimizer is to train."""
    return {
        name: [quick_digest(each) for each in parameters_of(optimizer) if each.requires_grad]
        for name, optimizer in optimizers.items()
        if any(group["lr"] for group in optimizer.param_groups)
    }
