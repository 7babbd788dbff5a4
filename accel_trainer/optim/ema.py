"""An exponential moving average of a model's parameters and buffers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from itertools import starmap

import torch
from torch import Tensor, nn

from ..core.buffers import NOTHING, are_same, buffer_places, buffers_at
from ..core.errors import ConfigError
from ..core.parameters import Optimizers, parameters_of
from ..core.shards import is_shard, local_part
from ..core.tensor_memory import address_of
from ..core.training_mode import switching

Pairs = list[tuple[Tensor, Tensor]]
"""Averages, and what they are averages of."""


class Ema:
    """Keeps `model`, a copy whose weights are averages of those of `source`.

    In each update, average = decay * average + (1 - decay) * source. The decay is
    (1 + step) / (10 + step) until that reaches `decay`: the random initial weights fade, as in
    Tensorflow's ExponentialMovingAverage. torch's AveragedModel would sync the host in each update.
    Parameters of one of the `optimizers` are averaged only after its steps, whose number is the
    `step` of their decay. With `every_n_steps`, only multiples of it count, and in the
    `warmup_steps` the average is a copy.

    `copied` is a copy of `source`. If the weights are sharded, both are sharded in the same way.
    What no optimizer steps shares its memory with its average, until either is written. Integer
    buffers, and those that begin with inf or NaN, such as a mask of -inf, are copied.

    Raises ConfigError for a decay that is too close to 1 for the dtype of a stepped parameter.
    """

    def __init__(
        self,
        source: nn.Module,
        copied: nn.Module,
        *,
        decay: float,
        optimizers: Optimizers,
        every_n_steps: int = 1,
        warmup_steps: int = 0,
    ) -> None:
        self.decay = decay
        self._every = every_n_steps
        self._warmup_steps = warmup_steps
        self._owners = {
            parameter: name
            for name, optimizer in optimizers.items()
            for parameter in parameters_of(optimizer)
        }
        for parameter in self._owners:
            # Differences below a sixteenth of a weight would be rounded away.
            if 1 - decay < 8 * torch.finfo(parameter.dtype).eps:
                raise ConfigError(
                    "CONFIG",
                    f"--ema {decay} does not move an average of {parameter.dtype}: lower it, or "
                    "keep the weights in float32, and use --mixed-precision for the forwards",
                )
        self.model = copied.eval().requires_grad_(False)
        self._has_switching = bool(switching(self.model))
        self.settle()
        self._parameters = list(zip(self.model.parameters(), source.parameters(), strict=True))
        self._has_shards = any(is_shard(average) for average, _ in self._parameters)
        self._average_places = buffer_places(self.model)
        self._source_places = buffer_places(source)
        # A resume finds the same: it creates the average before it loads the checkpoint.
        self._is_finite = [
            bool(local_part(each).isfinite().all())
            for each in (*source.parameters(), *buffers_at(self._source_places))
        ]
        self._look_up()

    def evaluated(self) -> nn.Module:
        """Return the model, whose modules compute anew what they keep in evaluation mode."""
        self.model.train()
        return self.model.eval()

    def settle(self) -> None:
        """Undo what modules have computed from the averages for an evaluation, if some may."""
        if self._has_switching and not self.model.training:
            self.model.train()

    @torch.no_grad()
    def update(self, num_steps: Mapping[str, int]) -> None:
        """Update the average with the weights after a step; the first step is 1.

        `num_steps` has the number of this step by the name of each optimizer that took it, and by
        "" the number of the run's, for what has no optimizer.
        """
        self.settle()
        num_steps = {name: step for name, step in num_steps.items() if step % self._every == 0}
        if not num_steps:
            return
        buffers = buffers_at([*self._average_places, *self._source_places])
        # A forward may have assigned a new tensor to a buffer, and somebody have written to a
        # parameter that was shared.
        is_same = are_same(buffers, self._buffers) and all(starmap(_is_shared, self._shared))
        if self._has_shards or not is_same:
            self._look_up()
        for name, step in num_steps.items():
            number = step // self._every
            decay = min(self.decay, (1 + number) / (10 + number))
            if step <= self._warmup_steps:
                decay = 0.0
            if pairs := self._averaged[name]:
                averages, sources = zip(*pairs, strict=True)
                torch._foreach_lerp_(averages, sources, 1 - decay)
        if self._copied:
            averages, sources = zip(*self._copied, strict=True)
            torch._foreach_copy_(averages, sources)

    def share(self) -> None:
        """Share the memory of parameters that no optimizer steps and that the average equals.

        The first write to either of them is to a copy (torch's copy on write). **Host sync.**
        """
        for average, source in self._parameters:
            if source in self._owners or is_shard(source) or _is_shared(average, source):
                continue
            if not torch.equal(average, source):
                continue
            # Memory of a file, or of numpy, cannot be shared; another torch may lack the function.
            with suppress(RuntimeError, AttributeError):
                average.data = torch._lazy_clone(source.data)
        self._look_up()

    def _look_up(self) -> None:
        """Collect the tensors that the model and its average have now.

        A buffer whose shape or dtype differs from its average was replaced: the average becomes a
        copy of it.
        """
        averages = buffers_at(self._average_places)
        sources = buffers_at(self._source_places)
        for (owner, name), average, source in zip(
            self._average_places, averages, sources, strict=True
        ):
            if (average.shape, average.dtype) != (source.shape, source.dtype):
                setattr(owner, name, None if source is NOTHING else source.detach().clone())
        averages = buffers_at(self._average_places)
        self._buffers = averages + sources
        self._copied: Pairs = []
        self._shared: Pairs = []
        self._averaged: dict[str, Pairs] = defaultdict(list)
        rows = [*self._parameters, *zip(averages, sources, strict=True)]
        for (average, source), is_finite in zip(rows, self._is_finite, strict=True):
            owned = self._averaged[self._owners.get(source, "")]
            pairs = owned if is_finite and average.is_floating_point() else self._copied
            pair = (local_part(average), local_part(source))
            (self._shared if _is_shared(*pair) else pairs).append(pair)


def _is_shared(average: Tensor, source: Tensor) -> bool:
    return 0 != address_of(average) == address_of(source)
