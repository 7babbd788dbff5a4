"""Every process has the whole model, and DDP averages the gradients during the last backward."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...core.buffers import StepBuffers
from ...core.errors import ConfigError, listed
from ...core.parameters import Optimizers
from .base import Strategy


class DataParallelStrategy(Strategy):
    """Trains with DDP, or with the model itself if there is one process."""

    # None if a step may leave parameters out.
    _ddp: DistributedDataParallel | None = None

    def prepare(self, model: nn.Module, optimizers: Optimizers) -> nn.Module:
        """Return the model in accelerate's wrapper, with the main process's weights.

        **Collective.**
        """
        if self.accelerator.num_processes > 1:
            _keep_strides(model)
        prepared, *_ = self.accelerator.prepare(model, *optimizers.values())
        # With this option DDP never rebuilds its buckets.
        if isinstance(prepared, DistributedDataParallel) and not prepared.find_unused_parameters:
            self._ddp = prepared
            self._trained = {each for each in model.parameters() if each.requires_grad}
            settle_buckets(prepared)
        return prepared  # type: ignore[no-any-return]  # accelerate is untyped

    def begin(self, buffers: StepBuffers) -> None:
        """Begin the micro-batches of a step: DDP copies buffers before the first forward."""

    def end_backward(self, num_samples: int) -> None:
        """Check, in the last micro-batch of a step, that DDP has averaged the gradients.

        Checked here, because the others may already wait for the gradients of this process.

        Raises:
            ConfigError: some parameter has got no gradient, and DDP has therefore averaged none.
        """
        if self._ddp is None:
            return
        try:
            self._ddp._check_reducer_finalized()
        except RuntimeError as error:
            unused = [
                name
                for name, parameter in self._ddp.module.named_parameters()
                if parameter in self._trained and parameter.grad is None
            ]
            raise ConfigError(
                "UNUSED_PARAMETERS",
                f"{listed(unused or ['a parameter'])} took no part in the loss of a micro-batch of "
                "this process, and DDP then averages no gradients: freeze such parameters "
                "(requires_grad=False) before build_trainer, remove them, or set "
                "--runtime.find-unused-parameters",
            ) from error


def _keep_strides(model: nn.Module) -> None:
    """Give the gradients of filters that are contiguous in both layouts the filters' strides.

    Filters with one channel or of size 1x1 have the same memory in both layouts, and only the
    strides tell the layouts apart. DDP warns of a gradient with other strides (torch 2.13), and the
    strides of a filter decide how it is computed.
    """
    for parameter in model.parameters():
        is_both = parameter.ndim == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
        if parameter.requires_grad and is_both and parameter.is_contiguous():
            parameter.register_hook(partial(_with_strides, strides=parameter.stride()))


def _with_strides(gradient: Tensor, *, strides: tuple[int, ...]) -> Tensor:
    return gradient.contiguous().as_strided(gradient.shape, strides)


def settle_buckets(model: DistributedDataParallel) -> None:
    """Make DDP rebuild its gradient buckets before the first step. **Collective.**

    DDP rebuilds them after its first backward, and with three or more processes the order of
    summation depends on the place in a bucket: the first step after a resume would round
    differently from the same step without one (torch 2.13). So this runs a backward that trains
    nothing and reaches the parameters from the last to the first.
    """
    model.reducer.prepare_for_backward([])
    summed = torch.zeros((), device=model.device)
    for parameter in model.parameters():
        if parameter.requires_grad:
            summed += parameter.sum().abs()  # `abs` makes the sum of a complex parameter real
    summed.backward()
    model.reducer._rebuild_buckets()
    for parameter in model.parameters():
        parameter.grad = None
