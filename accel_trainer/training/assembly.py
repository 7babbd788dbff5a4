"""Puts the parts of a training together, in the order that they need."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from ..checkpoint.manager import Checkpointer
from ..checkpoint.state_dict import training_state
from ..core.parameters import Optimizers
from ..core.registry import Registry
from ..core.types import Task
from ..fault_tolerance.activity import Activity
from ..optim.ema import Ema
from ..optim.optimizers import make_ready
from .config import TrainerConfig
from .step.nonfinite_report import NonfiniteReport
from .step.optimizer_step import OptimizerStep
from .strategy.base import Strategy


class Assembly(NamedTuple):
    """What trains a model, averages it and stores it."""

    step: OptimizerStep
    average: Ema | None
    kept_in_evaluation: Collection[nn.Module]
    """The modules that no training mode reaches."""
    states: Registry
    """The parts of a checkpoint that belong to the model and its optimizers."""
    checkpointer: Checkpointer

    def set_training_mode(self) -> None:
        """Call `train` of the model, and `eval` of what is kept in evaluation mode.

        Nothing follows from `requires_grad`: a momentum encoder is frozen, and its norms train.
        """
        self.step.wrapped_model.train()
        for module in self.kept_in_evaluation:
            module.eval()


def assemble(
    config: TrainerConfig,
    *,
    strategy: Strategy,
    model: nn.Module,
    optimizers: Optimizers,
    task: Task,
    checkpointer: Checkpointer,
    activity: Activity,
    kept_in_evaluation: Collection[nn.Module] = (),
    states: Mapping[str, Any] = MappingProxyType({}),
) -> Assembly:
    """Return the parts that train `model`, placed by `strategy`, and store it. **Collective.**

    Raises:
        ConfigError: the model or an optimizer does not fit the strategy.
    """
    # The order matters.
    # 1. The average is a copy of a model that is not wrapped yet.
    copied = None if config.ema_decay is None else strategy.copy(model)
    # 2. `prepare` wraps the model, and copies the main process's weights and buffers to all.
    wrapped_model = strategy.prepare(model, optimizers)
    average = None
    if copied is not None and config.ema_decay is not None:
        average = Ema(
            model,
            copied,
            decay=config.ema_decay,
            optimizers=optimizers,
            every_n_steps=config.ema_every_n_steps,
            warmup_steps=config.ema_warmup_steps,
        )
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
        max_grad_value=config.max_grad_value,
        check_every_n_steps=config.check_every_n_steps,
    )
    trained = training_state(model, optimizers, average, strategy.accelerator.scaler, states)
    return Assembly(step, average, kept_in_evaluation, trained, checkpointer)
