"""Every process has the whole model, and DDP averages the gradients during the last backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...core.errors import ConfigError, listed
from .base import StepSums, Strategy


class PlainStrategy(Strategy):
    """Trains with DDP, or with the model itself if there is one process."""

    # Parameters that need a gradient in the first step: DDP averages none if one of them has none.
    _unchecked_parameters: Mapping[str, nn.Parameter] = {}

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Return the model in accelerate's wrapper, with the main process's weights.

        **Collective.**
        """
        if self.accelerator.num_processes > 1:
            _keep_strides(model)
        prepared, _ = self.accelerator.prepare(model, optimizer)
        if isinstance(prepared, DistributedDataParallel):
            # With this option DDP never rebuilds its buckets.
            if not prepared.find_unused_parameters:
                self._unchecked_parameters = dict(model.named_parameters())
                _settle_buckets(prepared)
            for parameter in model.parameters():
                parameter.grad = None
        return prepared  # type: ignore[no-any-return]  # accelerate is untyped

    def finish(self, micro_sums: Sequence[StepSums]) -> tuple[StepSums, Tensor | None]:
        """Add up the `micro_sums` of the micro-batches. **Collective** if items are counted.

        Raises:
            ConfigError: some parameter has no gradient, and DDP has therefore averaged none.
        """
        if self._unchecked_parameters:
            self._refuse_unused()
        return super().finish(micro_sums)

    def _refuse_unused(self) -> None:
        unused = [
            name
            for name, parameter in self._unchecked_parameters.items()
            if parameter.requires_grad and parameter.grad is None
        ]
        if unused:
            raise ConfigError(
                "UNUSED_PARAMETERS",
                f"{listed(unused)} took no part in the loss of the first step, and DDP then "
                "averages no gradients: freeze such parameters (requires_grad=False), remove them, "
                "or set --runtime.find-unused-parameters",
            )
        self._unchecked_parameters = {}


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


def _settle_buckets(model: DistributedDataParallel) -> None:
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
