"""The types that flow through the engine, and the protocols that users implement.

At runtime, this module imports nothing of this package that depends on others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Protocol

import torch
from accelerate.utils import is_torch_tensor, recursively_apply
from torch import Tensor, nn

from .errors import ConfigError
from .extremes import extremes, note_extremes

if TYPE_CHECKING:
    from .batch_plan import BatchPlan


class Position(NamedTuple):
    """Where a batch stands in the training.

    `step` counts the optimizer steps before it, and `epoch` the epochs. `progress` is the fraction
    of all steps that are done, from 0 to 1; the epochs or steps of the config are 1, even if the
    run stops earlier. With `--schedule.shape trunk` it is 0 until the decay, and the fraction of
    the decay from there. `step_in_epoch` counts the steps before it in the epoch, which has
    `steps_per_epoch`.
    """

    step: int = 0
    epoch: int = 0
    progress: float = 0.0
    step_in_epoch: int = 0
    steps_per_epoch: int = 0


START = Position()

Directions = Mapping[str, bool]
"""The numbers that can select the best checkpoint, the preferred one first; False: lower is better.
"""

Results = Mapping[str, Any]
"""What an evaluation measures by name: numbers, and perhaps texts, lists, dicts and tensors."""

Turn = str | tuple[str, ...]
"""The name of the optimizer that steps, or the names of several; "": all of them."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch: the samples of one forward on one process.

    `inputs` [B, ...] and `targets` [B] int64 class ids or [B, K] float class weights lie on the
    device of the run; each may be a tensor, an object that moves itself with `to(device)`, such as
    a graph, or a dict, list or tuple of these, to any depth. `sample_ids` int64 [B] are the
    samples' positions in their dataset: they seed the randomness of each sample, and errors name
    them. B may be 0: a process without samples in a short step batch still takes part in its
    collectives. `position` is where the training stands; a task may depend on it, and a resumed run
    sees the same positions. `turn` is what the task's `turn` returned for this step, or one of its
    `updates`: the optimizers that have it; "" in an evaluation, and for a task without turns.
    """

    inputs: Any
    targets: Any
    sample_ids: Tensor
    position: Position = START
    turn: Turn = ""

    def __len__(self) -> int:
        return self.sample_ids.shape[0]

    def __getitem__(self, _: object) -> NoReturn:
        """Raise ConfigError, also for `x, y = batch`."""
        raise ConfigError("BATCH", "a batch has no items: read batch.inputs and batch.targets")

    def map(
        self, change: Callable[[Any], Any], of: Callable[[Any], bool] = is_torch_tensor
    ) -> Batch:
        """Return the batch with `change` applied to every tensor, or to what `of` is true for."""
        parts = (self.inputs, self.targets, self.sample_ids)
        inputs, targets, sample_ids = recursively_apply(change, parts, test_type=of)
        return Batch(inputs, targets, sample_ids, self.position, self.turn)

    def at(self, position: Position, turn: Turn = "") -> Batch:
        """Return the same batch at `position`, in the `turn` that it is for."""
        return Batch(self.inputs, self.targets, self.sample_ids, position, turn)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`; copies from pinned memory do not block the host.

        Other objects, such as graphs, move themselves with a method `to(device)`, if they have one.
        """
        moved = self.sent_to(device)
        return moved.map(lambda value: value.to(device), lambda value: hasattr(value, "to"))

    def sent_to(self, device: torch.device) -> Batch:
        """Return the batch with its tensors on `device`, and nothing else moved."""
        sent = self.map(lambda tensor: tensor.to(device, non_blocking=True))
        note_extremes(sent.targets, extremes(self.targets))
        return sent

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory.

        torch's DataLoader calls this in its pinning thread.
        """
        return self.map(Tensor.pin_memory)


class LazyBatches(Sequence[Batch]):
    """`length` micro-batches, each made by `make(index)` when it is indexed.

    So only one at a time needs to be on the device.
    """

    def __init__(self, make: Callable[[int], Batch], length: int) -> None:
        self._make = make
        self._indices = range(length)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        found = self._indices[index]
        return self._make(found) if isinstance(found, int) else [self._make(each) for each in found]


class StepBatch(NamedTuple):
    """This process's micro-batches of one optimizer step.

    `micro_batches` is never empty: every process runs the backward that synchronises gradients.
    `num_samples` counts the samples of all processes; it comes from the plan, without a collective.
    `position` and `turn` are set by the trainer, for all micro-batches.
    """

    micro_batches: Sequence[Batch]
    num_samples: int
    position: Position = START
    turn: Turn = ""

    def copied(self) -> StepBatch:
        """Return the step batch with copies of the micro-batches, made when they are indexed."""
        given = self.micro_batches
        return self._replace(
            micro_batches=LazyBatches(lambda index: given[index].map(Tensor.clone), len(given))
        )


class StepOutput(NamedTuple):
    """What a Task returns for a micro-batch of B samples, in training and in evaluation.

    `losses` [B] has one loss for each sample, in training with its graph. The engine trains on the
    mean over the samples of the whole step, on all processes. `outputs` is what metrics read: a
    tensor [B, ...], or a dict, list or tuple of tensors. In training they are dropped at once.

    `num_items` [B] is the number of items of each sample if the loss is a mean over something other
    than samples, such as the tokens without padding: `losses` are then sums over the items of a
    sample. The engine adds up the items of all micro-batches and processes, with one collective per
    step. A Task returns them for every micro-batch or for none.

    `numbers` [B] each (detached) are further numbers of the samples, such as whether the prediction
    is right. In training, rows report their means as they report that of the losses, as
    `train/<name>`; in evaluation, `MeanNumber` does.

    `reduction` "sum": the engine trains on the sum of the losses over the step, as a VAE or a
    detector does; it is the same for each micro-batch, and excludes `num_items`. Rows and
    evaluations still report the mean over the samples.

    `is_per_sample` is False for the output of `from_mean`, whose `losses` and `num_items` are [].
    """

    losses: Tensor
    outputs: Any = None
    num_items: Tensor | None = None
    numbers: Mapping[str, Tensor] = MappingProxyType({})
    is_per_sample: bool = True
    reduction: Literal["mean", "sum"] = "mean"

    @classmethod
    def from_mean(
        cls,
        loss: Tensor,
        *,
        num_items: Tensor | int,
        outputs: Any = None,
        numbers: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> StepOutput:
        """Return the output of a model that computes only the mean loss [] over `num_items`.

        These are the samples of the micro-batch, or its items, such as the tokens without padding.
        The step is right for any number of processes and micro-batches, but what needs the loss of
        each sample cannot use it. `numbers` are still those of each sample, [B].
        """
        if not isinstance(loss, Tensor) or not isinstance(num_items, Tensor | int | float):
            # The engine refuses it in one line.
            return cls(loss, outputs, num_items, numbers, is_per_sample=False)
        if not isinstance(num_items, Tensor):
            num_items = torch.full((), num_items, device=loss.device)
        # Not in bfloat16, which cannot represent 257, nor in float16, which ends at 65504.
        loss_sum = loss.to(torch.promote_types(loss.dtype, torch.float)) * num_items
        # The mean over nothing is NaN.
        loss_sum = loss_sum.masked_fill(num_items == 0, 0)
        return cls(loss_sum, outputs, num_items, numbers, is_per_sample=False)

    def detached(self) -> StepOutput:
        """Return the same numbers without their graph."""
        return StepOutput(
            self.losses.detach(),
            _detached(self.outputs),
            _detached(self.num_items),
            _detached(self.numbers),
            self.is_per_sample,
            self.reduction,
        )


def _detached(value: Any) -> Any:
    # accelerate's walk through a tree takes ten times as long as what most of them are: a leaf.
    if isinstance(value, Tensor):
        return value.detach()
    return recursively_apply(Tensor.detach, value) if value else value


class StepSums(NamedTuple):
    """The numbers of a StepOutput, each summed over the samples to a tensor [] without its graph.

    `num_items` is None if the task does not count items. `kind` says, in words, what the losses of
    a step are divided by, if not by its samples.
    """

    loss: Tensor
    numbers: Mapping[str, Tensor]
    num_items: Tensor | None
    kind: str = ""

    @classmethod
    def of(cls, output: StepOutput) -> StepSums:
        """Return the sums of what a task returned, of half precision in float32."""
        numbers = {name: _sum(values) for name, values in output.numbers.items()}
        if output.num_items is not None:
            return cls(_sum(output.losses), numbers, _sum(output.num_items), "num_items")
        kind = "" if output.reduction == "mean" else "reduction='sum'"
        return cls(_sum(output.losses), numbers, None, kind)


def _sum(values: Tensor) -> Tensor:
    # In bfloat16, 256 + 1 is 256, and float16 ends at 65504.
    return values.detach().sum(dtype=torch.float32 if values.itemsize == 2 else None)


@dataclass(slots=True, eq=False)
class Gradients(Mapping[str, "Tensor | None"]):
    """The gradients of an optimizer step, by the names of the model's parameters.

    They are those of the mean loss over the step batch of all processes, or of its sum, without
    loss scaling, the same on each process; with shards, each process has its part. None: the loss
    of no sample depends on the parameter, or its optimizer has no turn. The other attributes are of
    this process: `losses` has the sum [] of each micro-batch, and `sample_ids` its samples, int64
    [B].
    """

    tensors: Mapping[str, Tensor | None]
    sums: StepSums
    step_batch: StepBatch
    losses: Sequence[Tensor]
    sample_ids: Sequence[Tensor]

    def __getitem__(self, name: str) -> Tensor | None:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def map(self, change: Callable[[Tensor], Tensor]) -> Gradients:
        """Return the gradients with `change` applied to each that there is."""
        changed = {
            name: None if tensor is None else change(tensor)
            for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=changed)


class StepReport(NamedTuple):
    """The report of one optimizer step. Tensors stay on the device: reading one is a host sync.

    `optimizer_step` is the step just finished (the first is 1). `loss_sum` [] and `sums` cover this
    process's samples; with `--reduce exact`, they cover the whole step on the main process, and are
    zero on the others. `num_samples` counts the samples of all processes. `grad_norm` [] is the
    global norm before clipping, or None if nothing asked for it. `was_skipped`: the weights did not
    change, because of an fp16 overflow, NaN or inf. `num_items` [] is the divisor of this process's
    `loss_sum` and `sums`, or None if they are divided by the number of samples. `sample_ids` int64
    [B] each are those of this process's micro-batches. `turn` has the optimizers that stepped.

    A step of a task with `updates` has a report of each, in order; the numbers of the step are then
    those of its last one, but `loss_sum` has the losses of all, and `was_skipped` is true if one of
    them was.
    """

    optimizer_step: int
    epoch: int
    learning_rate: float
    loss_sum: Tensor
    sums: Mapping[str, Tensor]
    num_samples: int
    grad_norm: Tensor | None
    was_skipped: bool
    num_items: Tensor | None = None
    sample_ids: Sequence[Tensor] = ()
    turn: Turn = ""
    updates: Sequence[StepReport] = ()


class Task(Protocol):
    """Turns a batch into losses.

    The model's forward is called once per batch, through `model(...)`. If evaluation differs from
    training, the task also has `eval_step(model, batch)`, which evaluations call instead of `step`.
    A task may name its usual metrics in an attribute `metrics`.

    If the loss of a sample depends on the other samples of its micro-batch, as in contrastive
    learning, the attribute `couples_batch` of the task says so. True: each micro-batch sees only
    its own pairs, and several of them in a step are an error. "gathered": `step` gets the samples
    of all processes from `gather_with_gradient`, and only several micro-batches of a process in a
    step are an error. Both need an `eval_step` whose losses do not depend on other
    samples, since evaluation batches are split in another way. If "gathered", all processes call it
    equally often, perhaps with empty batches.

    A task whose networks step in turn has a method `turn(position)`, which returns the name of the
    optimizer that steps, or a tuple of names, from the position alone. The parameters of the others
    do not require gradients in that step. A task whose networks step one after the other on the
    same step batch has `updates(position)` instead: a list of turns, each with gradients of its
    own, from the same random numbers and at the weights that the one before it has left.
    """

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the losses of the samples, and outputs for the metrics.

        Called under autocast; in evaluation without gradients.
        """


def eval_step_of(task: Task) -> Callable[[nn.Module, Batch], StepOutput]:
    """Return what an evaluation calls: the task's `eval_step`, or `step` if it has none."""
    return getattr(task, "eval_step", task.step)


class Samples(Protocol):
    """A map-style dataset: it also has a length. A DataLoader is none."""

    def __getitem__(self, index: int, /) -> Any:
        """Return a sample, usually `(input, target)`."""


class Loader(Protocol):
    """A source of step batches from any step on: the same samples for any number of processes.

    A run prints the loader's attribute `description` at its start, if it has one.
    """

    plan: BatchPlan
    """The arithmetic that splits an epoch into step batches."""

    def step_batches(self, epoch: int, first_step: int) -> Iterator[StepBatch]:
        """Yield this process's step batches of `epoch` from its step `first_step` on.

        Earlier samples need not be read.
        """


class EvalSource(Protocol):
    """A source of evaluation batches: each sample exactly once over all processes.

    The sample ids are 0 to `num_samples - 1`.
    """

    @property
    def num_samples(self) -> int:
        """The number of samples in an evaluation, over all processes."""

    def batches(self) -> Iterator[Batch]:
        """Yield this process's part of the samples, which may be empty."""


class Metric(Protocol):
    """Sums over samples that add up over batches and processes, and the numbers computed from them.

    Sums are float64: counts are exact up to 2**53. For a device without float64 the sums, the
    batches and the outputs are on the CPU.
    """

    @property
    def higher_is_better(self) -> Directions:
        """The numbers of `compute` that can select the best checkpoint, the preferred one first.

        False: lower is better.
        """

    def empty(self, device: torch.device) -> Tensor:
        """Return zeroed sums, float64 of any fixed shape, on `device`."""

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        """Add a batch to `sums` in place.

        No host sync. Raises ConfigError for a batch that it cannot measure.
        """

    def compute(self, sums: Tensor) -> Results:
        """Return named numbers from the merged sums, which are on the CPU.

        Values may also be texts, lists and dicts, which are not logged.
        """
