"""What flows through the engine: batches, step batches, step reports, and the protocols people implement.

Knows torch, accelerate's helpers for nested tensors, and nothing else of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn

if TYPE_CHECKING:
    from .batch_plan import BatchPlan


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch: the samples of one forward on one process.

    `inputs` [B, ...] and `targets` [B] int64 class ids or [B, K] float class weights lie on the
    device of the run; each may be a tensor or a dict, list or tuple of tensors, to any depth.
    `sample_ids` int64 [B] are the samples' positions in their dataset: they seed what is random per
    sample, and errors name them. B may be 0: a process with no samples of a short step batch still
    joins its collectives.
    """

    inputs: Any
    targets: Any
    sample_ids: Tensor

    def __len__(self) -> int:
        return self.sample_ids.shape[0]

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with every tensor changed."""
        return Batch(*recursively_apply(change, (self.inputs, self.targets, self.sample_ids)))

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`; copies from pinned memory do not block the host."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory. torch's DataLoader calls this in its pinning thread."""
        return self.map(Tensor.pin_memory)


class LazyBatches(Sequence[Batch]):
    """`length` micro-batches that `make(index)` gives when they are indexed, so that one at a time is in memory."""

    def __init__(self, make: Callable[[int], Batch], length: int) -> None:
        self._make, self._indices = make, range(length)

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        found = self._indices[index]
        return self._make(found) if isinstance(found, int) else [self._make(each) for each in found]


class StepBatch(NamedTuple):
    """What one optimizer step consumes: this process's micro-batches, and the samples of all processes.

    `micro_batches` is never empty: every process runs the backward that synchronises gradients.
    `num_samples` comes from the plan, without a collective.
    """

    micro_batches: Sequence[Batch]
    num_samples: int


NO_SUMS: Mapping[str, Tensor] = MappingProxyType({})


class StepOutput(NamedTuple):
    """What a Task returns for a micro-batch.

    `loss_sum` [] is the loss summed over the micro-batch, with its graph; the engine divides it by
    the samples of the whole step batch. `sums` are further sums ([] each, detached) to report next
    to the loss, such as correct predictions.

    `num_items` [] (detached) replaces the samples as the divisor of the loss and of `sums`: the
    tokens that are not padding, say, or the labelled pixels. The engine adds it up over all
    micro-batches and processes, which takes one collective a step. A Task returns it for every
    micro-batch or for none.
    """

    loss_sum: Tensor
    sums: Mapping[str, Tensor] = NO_SUMS
    num_items: Tensor | None = None


class EvalOutput(NamedTuple):
    """Per-sample results of a micro-batch in evaluation: `losses` [B] and `outputs` [B, ...].

    `num_items` [B] are the items of each sample where the loss is a mean over items, such as
    tokens; None: 1 each.
    """

    losses: Tensor
    outputs: Tensor
    num_items: Tensor | None = None


class StepReport(NamedTuple):
    """The report of one optimizer step. Tensors stay on the device: reading one is a host sync.

    `optimizer_step` is the step just finished (the first is 1). `loss_sum` [] and `sums` cover this
    process's samples (with `--reduce exact`, those of the step on the main process, none on the
    others); `num_samples` all processes'. `grad_norm` [] is the global norm before clipping, None
    if nothing asked for it. `was_skipped`: the weights did not change, because of an fp16 overflow,
    NaN or inf. `num_items` [] is what this process's `loss_sum` and `sums` are divided by, if not
    by samples.
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


class Task(Protocol):
    """Turns a batch into a loss.

    The model's forward is called once per batch, through `model(...)`.
    """

    def train_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the loss summed over the batch. Called under autocast."""

    def eval_step(self, model: nn.Module, batch: Batch) -> EvalOutput:
        """Return per-sample losses and outputs. Called under autocast, without gradients."""


class Loader(Protocol):
    """A seekable source of step batches: the same samples for any number of processes."""

    plan: BatchPlan
    """The arithmetic that splits an epoch into step batches. It may be replaced: the next
    `step_batches` follows it."""

    def step_batches(self, epoch: int, first_step: int) -> Iterator[StepBatch]:
        """Yield this process's step batches of `epoch` from its step `first_step` on.

        Seeking is O(1).
        """


class EvalLoader(Protocol):
    """A source of evaluation batches: each sample exactly once over all processes, with ids from 0 on."""

    @property
    def num_samples(self) -> int:
        """The samples of an evaluation, over all processes."""

    def batches(self) -> Iterator[Batch]:
        """Yield this process's part of the samples, which may be empty."""


class Metric(Protocol):
    """Sums over samples that add up over batches and processes, and the numbers computed from them.

    Sums are float64: counts are exact up to 2**53. For a device without float64 the sums, the
    batches and the outputs are on the CPU.
    """

    @property
    def higher_is_better(self) -> Mapping[str, bool]:
        """The numbers of `compute` that can decide the best checkpoint, preferred first; False: lower is better."""

    def empty(self, device: torch.device) -> Tensor:
        """Return zeroed sums, float64 of any fixed shape, on `device`."""

    def update(self, sums: Tensor, batch: Batch, output: EvalOutput) -> None:
        """Add a batch to `sums` in place.

        No host sync. Raises ConfigError for a batch that it cannot measure.
        """

    def compute(self, sums: Tensor) -> Mapping[str, Any]:
        """Return named numbers from the merged sums, on the CPU; also texts, lists and dicts, which are not logged."""
