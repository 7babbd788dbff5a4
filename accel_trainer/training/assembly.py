"""Puts the parts of a training together, in the order that they need."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from ..checkpoint.manager import Checkpointer
from ..checkpoint.state_dict import training_state
from ..core.activity import Activity
from ..core.parameters import Optimizers
from ..core.registry import Registry
from ..core.types import Task
from ..optim.ema import Ema
from ..optim.optimizers import make_ready
from .config import TrainerConfig
from .nonfinite_report import NonfiniteReport
from .rehearsal import Rehearsal
from .step import OptimizerStep
from .strategy.base import Strategy


class Assembly(NamedTuple):
    """What trains a model, averages it and stores it."""

    step: OptimizerStep
    average: Ema | None
    states: Registry
    """The parts of a checkpoint that belong to the model and its optimizers."""
    rehearsal: Rehearsal
    checkpointer: Checkpointer


def assemble(
    config: TrainerConfig,
    *,
    strategy: Strategy,
    model: nn.Module,
    optimizers: Optimizers,
    task: Task,
    parts: Mapping[str, object],
    train_set: object,
    checkpointer: Checkpointer,
    activity: Activity,
    states: Mapping[str, Any] = MappingProxyType({}),
) -> Assembly:
    """Return the parts that train `model`, placed by `strategy`, and store it. **Collective.**

    `parts` and `train_set` are all that a resume builds again: the rehearsal looks at their state.

    Raises:
        ConfigError: the model or an optimizer does not fit the strategy.
        CheckpointError: the model has state that cannot be stored or loaded.
    """
    # The order matters.
    # 1. The average is a copy of a model that is not wrapped yet.
    copied = None if config.ema_decay is None else strategy.copy(model)
    # 2. `prepare` wraps the model, and copies the main process's weights and buffers to all.
    wrapped_model = strategy.prepare(model, optimizers)
    average = None
    if copied is not None and config.ema_decay is not None:
        average = Ema(model, copied, decay=config.ema_decay, optimizers=optimizers)
    # 3. The optimizers are made ready, which may depend on shards.
    for optimizer in optimizers.values():
        make_ready(optimizer)
    # 4. Gradients, buffers and the average belong to the plain model, whose tensors `prepare` has
    # placed; the step trains the wrapped one.
    nonfinite = NonfiniteReport(
        strategy,
        may_skip=config.on_nonfinite == "skip",
        model=model,
        task=task,
        folder=checkpointer.run_folder,
    )
    step = OptimizerStep(
        strategy,
        task=task,
        model=model,
        wrapped_model=wrapped_model,
        optimizers=optimizers,
        nonfinite=nonfinite,
        activity=activity,
        max_grad_norm=config.max_grad_norm,
        check_every_n_steps=config.check_every_n_steps,
    )
    # 5. What the run starts with is recorded before anything is restored or trained.
    trained = training_state(model, optimizers, copied, strategy.accelerator.scaler, states)
    rehearsal = Rehearsal(
        model=model,
        optimizers=optimizers,
        parts=parts,
        train_set=train_set,
        accelerator=strategy.accelerator,
        checkpointer=checkpointer,
        states=states,
    )
    return Assembly(step, average, trained, rehearsal, checkpointer)
