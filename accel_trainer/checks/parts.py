"""Checks the parts of a recipe (model, task, loaders, ...) before they are used."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from ..core.batch_plan import BatchPlan
from ..core.errors import ConfigError
from ..core.parameters import parameters_of
from ..core.types import START, Task
from ..core.user_code import describe_error
from ..core.wording import counted, describe_tensor
from ..training.callback import Callback
from ..training.callback_runner import HOOKS
from ..training.step.turns import takes_turns, updates_at

_NEEDED = {
    "run": ("config",),
    "model": ("forward", "named_parameters"),
    "task": ("step",),
    "options": ("collate",),
    "train_set": ("plan", "step_batches"),
    "eval_sets": ("num_samples", "batches"),
    "test_set": ("num_samples", "batches"),
    "metrics": ("empty", "update", "compute"),
    "processor": ("save_pretrained",),
    "callbacks": ("on_fit_start", "on_step_end", "state_dict"),
}
_FITTING = {
    "task": "give ClassificationTask(), or an object with step(model, batch) that calls your loss",
    "metrics": "give TopKAccuracy(), MeanLoss(), TorchMetric(...) or a Metric of your own",
    "callbacks": "give an object whose class is a Callback with a hook, such as on_step_end",
}
_NAME = re.compile("[a-z][a-z0-9_]*")
# The names of what checkpoints hold besides.
_TAKEN = {
    "model",
    "training_weights",
    "optimizer",
    "ema",
    "scaler",
    "buffers",
    "trainer",
    "process_buffers",  # this and the next: in a loop of the user's
    "loop",
    "sample_order",
}
_WHOLE_MODELS = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_XPU,
)
_VALUES = ("config", "plan", "num_samples")  # the others are methods


def check_parts(name: str, parts: Any) -> list[Any]:
    """Return `parts` as a list. Raises ConfigError if the argument `name` needs other parts."""
    if isinstance(parts, str | type) or not isinstance(parts, Iterable):
        raise ConfigError("CONFIG", f"{name}= is not a list: put it in brackets")
    listed = [*parts]
    for part in listed:
        check_part(name, part)
    return listed


def check_part(name: str, part: Any) -> None:
    """Raise ConfigError if `part` cannot be what the argument `name` needs."""
    if isinstance(part, type):
        raise ConfigError(
            "CONFIG",
            f"{name}= is {describe_tensor(part)}: give an instance of it, {part.__name__}()",
        )
    missing = [
        needed
        for needed in _NEEDED[name]
        if not (
            hasattr(part, needed) if needed in _VALUES else callable(getattr(part, needed, None))
        )
    ]
    if missing:
        raise ConfigError(
            "CONFIG",
            f"{name}= is {describe_tensor(part)}, which has no {' and '.join(missing)}: "
            + _FITTING.get(name, "see help(build_trainer)"),
        )
    if name == "task" and hasattr(part, "train_step"):
        # A subclass of a built-in task would train with the loss of that.
        raise ConfigError("CONFIG", "task= has train_step, which nothing calls: name it step")
    if name == "callbacks":
        for method in dir(part):
            if method.startswith(HOOKS) and not hasattr(Callback, method):
                raise ConfigError(
                    "CONFIG",
                    f"callbacks= has {type(part).__name__}.{method}, which nothing calls: name it "
                    "as a hook of Callback, or differently",
                )


def check_model(model: nn.Module) -> None:
    """Raise ConfigError for what is no plain module: the names in a wrapped one differ."""
    check_part("model", model)
    for module in model.modules():
        is_wrapper = isinstance(module, nn.DataParallel | DistributedDataParallel | AveragedModel)
        if is_wrapper or hasattr(module, "_orig_mod"):  # of torch.compile
            raise ConfigError(
                "MODEL",
                f"the model is or contains a {type(module).__name__}: pass the plain module, and "
                "start one process for each device, or use --compile or --ema",
            )
    if isinstance(model, nn.ModuleDict | nn.ModuleList):
        raise ConfigError(
            "MODEL",
            f"the model is a {type(model).__name__}, which cannot be called: put the networks into "
            "a Module of your own, whose forward serves each use of them",
        )


def check_optimizers(optimizer: Any, task: Task, accelerator: Accelerator) -> None:
    """Raise ConfigError for names that a checkpoint cannot store, and a first turn of no name.

    **Collective.**
    """
    names = optimizer if isinstance(optimizer, Mapping) else ()
    _check_names("optimizer", names)
    if hasattr(task, "turn") and hasattr(task, "updates"):
        raise ConfigError(
            "TASK",
            f"{type(task).__name__} has turn, for one update in a step, and updates, for several: "
            "remove one of them",
        )
    if takes_turns(task):
        updates_at(START, task, names, accelerator)


def check_trained(
    models: Mapping[str, Any], optimizers: Mapping[str, Any], accelerator: Accelerator
) -> None:
    """Raise ConfigError for other types and names, for parameters that no model has, and shards.

    The only one that has no name is called "".
    """
    if accelerator.distributed_type not in _WHOLE_MODELS:
        raise ConfigError(
            "LOOP",
            f"exact_run does not support {accelerator.distributed_type.value}: each process needs "
            "the whole model, so use build_trainer, which can shard it, or DDP",
        )
    for argument, kind, parts in (
        ("model", nn.Module, models),
        ("optimizer", Optimizer, optimizers),
    ):
        _check_names(argument, {*parts} - {""})
        for part in parts.values():
            if not isinstance(part, kind):
                raise ConfigError(
                    "LOOP",
                    f"{argument}= is or has a {type(part).__name__}: give one {kind.__name__}, or "
                    "a dict of several by name",
                )
    known = {parameter for model in models.values() for parameter in model.parameters()}
    for name, optimizer in optimizers.items():
        if unknown := [each for each in parameters_of(optimizer) if each not in known]:
            raise ConfigError(
                "LOOP",
                f"the optimizer{f' {name}' * bool(name)} has {counted(len(unknown), 'parameter')} "
                "that no model= has: give all models, as model={'generator': ..., 'critic': ...}",
            )


def check_states(states: Any) -> None:
    """Raise ConfigError unless `states` has by name what a checkpoint can store and load."""
    if not isinstance(states, Mapping):
        raise ConfigError("CONFIG", 'states= is not a dict: name each, as in {"centre": centre}')
    _check_names("states", states)
    for name, state in states.items():
        try:
            _ = state.load_state_dict, {**state.state_dict()}
        except Exception as error:
            raise ConfigError(
                "CONFIG",
                f"states= has {name}, which cannot be saved ({describe_error(error)}): give an "
                "object with load_state_dict, and a state_dict that returns a dict. Numbers of a "
                "loop belong in run.row, and loaders are read again",
            ) from error


def _check_names(argument: str, names: Iterable[object]) -> None:
    for name in names:
        if not _NAME.fullmatch(str(name)) or name in _TAKEN:
            raise ConfigError(
                "CONFIG",
                f"{argument}= has the name {name!r}: use small letters, digits and _, "
                f"and none of {', '.join(sorted(_TAKEN))}",
            )


def check_coupling(task: Task, plan: BatchPlan) -> None:
    """Raise ConfigError if a step of `plan` splits the pairs that the loss of `task` needs.

    See `couples_batch` of `Task`.
    """
    coupling = getattr(task, "couples_batch", False)
    if coupling is False:
        return
    name = type(task).__name__
    if coupling is not True and coupling != "gathered":
        raise ConfigError(
            "TASK", f"couples_batch of {name} is {coupling!r}: set it to True, False or 'gathered'"
        )
    if not hasattr(task, "eval_step"):
        raise ConfigError(
            "TASK",
            f"the loss of {name} couples the samples of a batch: "
            "add an eval_step whose losses do not depend on other samples",
        )
    num_processes = plan.num_processes if coupling is True else 1
    if num_processes * plan.accumulation_steps > 1:
        raise ConfigError(
            "BATCH_SIZE",
            f"the loss of {name} couples the samples of a batch, and a step has "
            f"{counted(plan.num_processes, 'process')} x "
            f"{counted(plan.accumulation_steps, 'micro-batch')}: "
            f"set --accumulate 1 --batch-size {plan.global_batch_size // plan.num_processes}"
            + ", and gather_with_gradient (couples_batch = 'gathered')"
            * (num_processes > 1),
        )
