"""Every process has the whole model: DDP averages the gradients in the order that is fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...core.buffers import BufferHistory
from ...core.errors import ConfigError
from ...core.rng import fold_in, seed_forward
from ...core.tensor_memory import copy_model
from ...core.types import StepOutput
from ...distributed.collectives import SINGLE_PROCESS, Peers
from ...distributed.placement import place_model

if TYPE_CHECKING:
    from ...distributed.accelerator import RuntimeConfig


class PlainStrategy:
    """Lets backward add up the micro-batches, and DDP average over the processes during the last backward.

    The backward of a micro-batch is that of `loss_sum * loss_scale / num_samples`, with the samples
    of all processes.
    """

    has_collective_forward = False
    """Whether a forward waits for the other processes."""

    def __init__(self, accelerator: Accelerator, *, seed: int) -> None:
        self.accelerator = accelerator
        self.loss_scale = accelerator.num_processes
        self._process_key = fold_in(seed, accelerator.process_index)
        self._needs_all = False  # until the first step has shown that all parameters have gradients

    # --- the model and its state ---

    def refuse(self, options: Mapping[str, object]) -> None:
        """Raise ConfigError for the first of `options`, by flag, that is on and does not work with this strategy."""

    def place(self, model: nn.Module, config: RuntimeConfig) -> nn.Module:
        """Return `model` on the device, as `prepare` and compilation need it.

        Raises ConfigError.
        """
        return place_model(model, self.accelerator, config)

    def copy(self, model: nn.Module) -> nn.Module:
        """Return a copy of a placed model, for its average.

        Call it before `prepare`. **Collective** with shards.
        """
        return copy_model(model)

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Return both, prepared by accelerate, with the main process's weights. **Collective.**

        Raises:
            ConfigError: the model or the optimizer does not fit the strategy.
        """
        if self.accelerator.num_processes > 1:
            _keep_strides(model)
        prepared, prepared_optimizer = self.accelerator.prepare(model, optimizer)
        if isinstance(prepared, DistributedDataParallel):
            self._needs_all = not (prepared.find_unused_parameters or prepared.static_graph)
            self._named_parameters = dict(model.named_parameters())
            _settle_buckets(prepared)
            for parameter in model.parameters():
                parameter.grad = None
        return prepared, prepared_optimizer

    def gather(self, pieces: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state that the main process stores. **Collective** with shards."""
        return dict(pieces)

    def checkpoint_peers(self, *, timeout_s: float) -> Peers:
        """Return the processes that write a checkpoint. **Collective.**"""
        return SINGLE_PROCESS

    # --- a step ---

    def begin(self, buffers: BufferHistory) -> None:
        """Begin a step, just before `buffers` are saved. **Collective** with shards."""

    def begin_forward(self, optimizer_step: int, index: int) -> None:
        """Seed what is random in the forward of micro-batch `index` of this process."""
        device = self.accelerator.device
        seed_forward(
            self._process_key, optimizer_step=optimizer_step, micro_batch=index, device=device
        )

    def end_backward(self, num_samples: int) -> None:
        """End a micro-batch of `num_samples`, which may be none: backward has added up the gradients."""

    def finish(
        self,
        losses: Sequence[Tensor],
        sums: Sequence[Mapping[str, Tensor]],
        counts: Sequence[Tensor],
    ) -> tuple[StepOutput, Tensor | None]:
        """Let the parameters have the step's gradients, and add up the micro-batches' numbers ([] each).

        Return the sums to report, which are those of the step when added up over the processes, and
        the items of all processes if they are counted. **Collective** if they are.

        Raises:
            ConfigError: DDP does not average the gradients, as some parameter has none.
        """
        if self._needs_all:
            self._refuse_unused()
            self._needs_all = False
        num_items = total(counts) if counts else None
        named = {name: total([part[name] for part in sums]) for name in sums[0]}
        output = StepOutput(total(losses), named, num_items)
        if num_items is None:
            return output, None
        return output, self.accelerator.reduce(num_items, reduction="sum")

    def _refuse_unused(self) -> None:
        unused = [
            name
            for name, each in self._named_parameters.items()
            if each.requires_grad and each.grad is None
        ]
        if unused:
            fact = f"{', '.join(unused[:3])}{' ...' * (len(unused) > 3)} took no part in the loss of the first step"
            fix = "freeze such parameters (requires_grad=False), remove them, or set --runtime.find-unused-parameters"
            raise ConfigError(
                "UNUSED_PARAMETERS", f"{fact}, and DDP then averages no gradients: {fix}"
            )

    def local_parts(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return what this process has of each gradient, or norm."""
        return gradients

    def is_found_anywhere(self, flag: Tensor) -> Tensor:
        """Return a flag [] that is 1 on all processes if `flag` is on one.

        **Collective** with shards.
        """
        return flag  # averaged gradients are the same on all


def total(values: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape, of a single one without an operation."""
    return values[0] if len(values) == 1 else torch.stack(list(values)).sum(0)


def _keep_strides(model: nn.Module) -> None:
    """Let the gradients of filters that are laid out both ways have the filter's strides.

    Filters of one channel or of 1x1 have the same memory in both layouts, and only the strides tell
    them apart. DDP warns of a gradient with the other strides (torch 2.13), and those of a filter
    decide how it is computed.
    """
    for parameter in model.parameters():
        is_both = parameter.ndim == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
        if parameter.requires_grad and is_both and parameter.is_contiguous():
            parameter.register_hook(partial(_with_strides, strides=parameter.stride()))


def _with_strides(gradient: Tensor, *, strides: tuple[int, ...]) -> Tensor:
    return gradient.contiguous().as_strided(gradient.shape, strides)


def _settle_buckets(model: DistributedDataParallel) -> None:
    """Let DDP rebuild its gradient buckets before the first step. **Collective.**

    DDP rebuilds them after its first backward, and with three or more processes the order of
    summation depends on the place in a bucket: the first step after a resume would round
    differently from the same step without one (torch 2.13). So this runs a backward that trains
    nothing and reaches the parameters from the last to the first.
    """
    if model.find_unused_parameters or model.static_graph:
        return  # the first never rebuilds; the second must see the graph of a real step first
    model.reducer.prepare_for_backward([])
    summed = torch.zeros((), device=model.device)
    for parameter in model.parameters():
        if parameter.requires_grad:
            summed += parameter.sum().abs()  # of a complex one, too
    summed.backward()
    model.reducer._rebuild_buckets()
