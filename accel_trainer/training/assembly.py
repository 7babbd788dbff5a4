"""Puts the parts of a training together, in the order that they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..checkpoint.manager import Checkpointer
from ..checkpoint.state_dict import training_state
from ..core.activity import Activity
from ..core.buffers import BufferHistory
from ..core.callback import Callback
from ..core.learning_rate import Schedule
from ..core.types import Loader, Task
from ..fault_tolerance.preemption import StopFlag
from ..optim.ema import Ema
from ..optim.optimizers import make_ready
from .config import TrainerConfig
from .evaluator import Evaluator
from .nonfinite_guard import NonfiniteGuard
from .rehearsal import Rehearsal
from .step import OptimizerStep
from .strategy.base import Strategy
from .trainer import Trainer


def assemble_trainer(
    config: TrainerConfig,
    *,
    strategy: Strategy,
    model: nn.Module,
    optimizer: Optimizer,
    schedule: Schedule,
    task: Task,
    loader: Loader,
    evaluators: Mapping[str, Evaluator],
    checkpointer: Checkpointer,
    final_test: Callable[[Trainer], Mapping[str, Any]] | None = None,
    stop_flag: StopFlag | None = None,
    activity: Activity | None = None,
    callbacks: Sequence[Callback] = (),
    trainer_class: type[Trainer] = Trainer,
) -> Trainer:
    """Return a trainer of `model`, placed by `strategy`, with its plain optimizer. **Collective.**

    The order matters:

    1. The average is a copy of a model that is not wrapped yet.
    2. `prepare` wraps the model, and copies the main process's weights and buffers to all.
    3. The optimizer is made ready, which may depend on shards.
    4. The copies of buffers and the guard are made from the plain model once `prepare` has placed
       its tensors; the step trains the wrapped model.
    5. The state and the rehearsal record what the run starts with, before anything is restored or
       trained.

    Raises:
        ConfigError: the model or the optimizer does not fit the strategy.
        CheckpointError: the model has state that cannot be stored or loaded.
    """
    copied = None if config.ema_decay is None else strategy.copy(model)
    wrapped_model, prepared_optimizer = strategy.prepare(model, optimizer)
    average = None
    if copied is not None and config.ema_decay is not None:
        average = Ema(model, copied, decay=config.ema_decay)
    make_ready(optimizer)
    buffers = BufferHistory(model)
    guard = NonfiniteGuard(
        strategy,
        may_skip=config.on_nonfinite == "skip",
        model=model,
        optimizer=optimizer,
        buffers=buffers,
        task=task,
        folder=checkpointer.run_folder,
    )
    step = OptimizerStep(
        strategy,
        wrapped_model=wrapped_model,
        optimizer=optimizer,
        prepared_optimizer=prepared_optimizer,
        buffers=buffers,
        guard=guard,
        max_grad_norm=config.max_grad_norm,
    )
    states = training_state(model, optimizer, copied, strategy.accelerator.scaler)
    rehearsal = Rehearsal(
        model=model,
        optimizer=optimizer,
        task=task,
        accelerator=strategy.accelerator,
        checkpointer=checkpointer,
    )
    return trainer_class(
        config,
        model=model,
        task=task,
        loader=loader,
        evaluators=evaluators,
        step=step,
        schedule=schedule,
        states=states,
        checkpointer=checkpointer,
        average=average,
        rehearsal=rehearsal,
        final_test=final_test,
        stop_flag=stop_flag,
        activity=activity,
        callbacks=callbacks,
    )
