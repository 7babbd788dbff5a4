"""An evaluation is anything with `run`; `run_evaluation` is what surrounds each call of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from accelerate import Accelerator
from torch import nn

from ...core.buffers import BufferCopy, buffer_places
from ...core.errors import ConfigError, PartFailed
from ...core.history import check_name, is_number
from ...core.rng import preserved_generators, seed_evaluation
from ...core.training_mode import evaluation_mode
from ...core.types import START, Directions, Position, Results
from ...distributed.collectives import broadcast_from_main, run_on_main
from ...fault_tolerance.preemption import StopFlag
from ..plain_values import is_detail, plain_values

TEST = "test"
"""The name of the evaluation on the test set, once, at the end; the others begin with `eval`."""


class EvaluationFailed(PartFailed):
    """An evaluation failed, and all processes know it; none has a result."""


class EvaluationRefused(EvaluationFailed, ConfigError):
    """An evaluation cannot give what is needed: one line with a fix, on all processes."""


@runtime_checkable
class Evaluation(Protocol):
    """Measures a model, such as on the samples of a set, or by the neighbours of its features.

    If `run` has an argument `limit`, it is also called before the first step, with `limit=1`: it
    should then look at one batch. If the attribute `weights` is "model", the averaged weights of
    `--ema` are not measured.
    """

    @property
    def monitors(self) -> Directions:
        """The numbers that can select the best checkpoint, the preferred one first; {} for none.

        False: lower is better.
        """

    def run(self, model: nn.Module, position: Position, stop_flag: StopFlag) -> Results:
        """Return numbers by name; those of the main process count. **Collective.**

        Values may also be None, texts, lists, dicts and tensors, which select nothing.

        `model` is the plain module, without DDP. `run_evaluation` says what surrounds the call. A
        signal ends `run` in a loop over `stop_flag.until_preempted(batches)`, by an exception after
        the same round on all processes.
        """


Evaluations = Mapping[str, Evaluation]
"""The evaluations of a run by name, such as `eval_hard`; the first one is preferred."""


def run_evaluation(
    evaluation: Evaluation,
    model: nn.Module,
    accelerator: Accelerator,
    *,
    seed: int = 0,
    position: Position = START,
    stop_flag: StopFlag | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Return what `evaluation` measures, the same numbers and texts on every process.

    **Collective. Host sync.**

    The model is in evaluation mode and has the main process's buffers; there are no gradients, and
    the generators of Python, numpy and torch are seeded by `seed`. Afterwards mode, buffers and
    generators are as before. `limit` is passed on.

    Raises:
        ConfigError: `run` returned something other than numbers, texts, lists, dicts and tensors by
            name.
        EvaluationStopped: some process got a signal.
    """
    stop_flag = stop_flag or StopFlag()
    limited = {} if limit is None else {"limit": limit}
    # Running statistics differ between processes where norms are not synchronised.
    broadcast_from_main([*model.buffers()], accelerator)
    buffers = BufferCopy(buffer_places(model))
    # Not inference mode: tensors that a forward caches there, or FSDP gathers, cannot be trained on
    # (torch 2.13).
    try:
        with evaluation_mode(model), preserved_generators(accelerator.device), torch.no_grad():
            seed_evaluation(seed, 0, accelerator.device)
            found = evaluation.run(model, position, stop_flag, **limited)
    finally:
        # A forward may change buffers in evaluation, too, even into tensors that cannot be trained.
        # After an error, the run is saved without these changes.
        buffers.put_back()
    values = plain_values(found, f"run of {type(evaluation).__name__}")
    single = {name: value for name, value in values.items() if not is_detail(value)}
    return {**values, **run_on_main(lambda: single, accelerator)}


def groups_of(name: str, evaluation: Evaluation) -> list[str]:
    """Return the groups of the numbers of an evaluation: its name, then that for the average."""
    if name == TEST or getattr(evaluation, "weights", None) == "model":
        return [name]
    return [name, name.replace("eval", "eval_ema", 1)]


def check_directions(part: object, attribute: str) -> None:
    """Raise ConfigError unless an attribute of `part` says which numbers can select the best."""
    found = getattr(part, attribute, None)
    owner = f"{attribute} of {type(part).__name__}"
    if not (isinstance(found, Mapping) and {*map(type, found.values())} <= {bool}):
        raise ConfigError(
            "METRIC",
            f"{owner} is {found!r}: declare which numbers can select the best checkpoint, "
            'as in {"loss": False}, or {} for none',
        )
    for name in found:
        check_name(name, owner)


def check_monitored(values: Results, name: str) -> float:
    """Return the number that decides the best checkpoint, NaN for None.

    Raises EvaluationRefused if it is missing, or not a single number.
    """
    if name not in values:
        raise EvaluationRefused(
            "METRIC",
            f"{name} decides the best checkpoint, and the metrics computed "
            f"{', '.join(values) or 'nothing'}: "
            "name it alike in `compute` and `higher_is_better` of the metric, or in `run` and "
            "`monitors` of the evaluation",
        )
    value = values[name]
    if value is None:
        return math.nan
    if not is_number(value):
        raise EvaluationRefused(
            "METRIC",
            f"{name} decides the best checkpoint, and is of type {type(value).__name__}: "
            "set --trainer.monitor to a single number, such as eval/loss",
        )
    return value


def nonfinite_loss(numbers: Results) -> str | None:
    """Return the name and value of a loss that is NaN or inf; None if there is no such loss."""
    for name, value in numbers.items():
        if name.endswith("/loss") and is_number(value) and not math.isfinite(value):
            return f"{name} is {value}"
    return None
