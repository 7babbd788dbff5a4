"""What a strategy is: how the processes of a run train one model together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ...core.buffers import StepBuffers
from ...core.parameters import Optimizers, stepped_parameters
from ...core.registry import Pieces
from ...core.rng import UPDATE, fold_in, seed_generators
from ...core.tensor_memory import copy_model
from ...core.types import StepSums
from ...distributed.collectives import SINGLE_PROCESS, Peers, broadcast_from_main
from ...distributed.placement import place_model

if TYPE_CHECKING:
    from ...distributed.accelerator import RuntimeConfig


@dataclass(eq=False)
class Strategy:
    """How the processes train one model; a step is `begin`, the micro-batches, then `finish`.

    A micro-batch is `begin_forward`, its forward and backward, then `end_backward`. The backward is
    that of `losses.sum() * gradient_factor / num_samples`, with the samples of all processes.

    By default each process has the whole model, and backward adds up its micro-batches. A subclass
    combines the gradients of the processes, in the last backward of a step or in `finish`.
    """

    accelerator: Accelerator
    _: KW_ONLY
    seed: int

    has_collective_forward = False
    """Whether a forward waits for the other processes."""

    def __post_init__(self) -> None:
        # An average divides the sum over the processes by their number.
        self.gradient_factor = self.accelerator.num_processes
        self._device = self.accelerator.device
        self._forward_key = fold_in(self.seed, self.accelerator.process_index)
        self._update_key = fold_in(self.seed, UPDATE)

    # --- the model and its state ---

    def refuse(self, flags: Sequence[str]) -> None:
        """Raise ConfigError for the first of the `flags` in use that does not work with this."""

    def place(self, model: nn.Module, config: RuntimeConfig) -> nn.Module:
        """Return `model` on the device, ready for compilation and `prepare`.

        Raises ConfigError if the model does not fit `config` or the strategy.
        """
        return place_model(model, self.accelerator, config)

    def copy(self, model: nn.Module) -> nn.Module:
        """Return a copy of a placed model, for its average.

        Call it before `prepare`. **Collective** with shards.
        """
        return copy_model(model)

    def prepare(self, model: nn.Module, optimizers: Optimizers) -> nn.Module:
        """Return the model as the steps call it, with the main process's weights. **Collective.**

        The optimizers are prepared in place. Here, the model has no wrapper.

        Raises ConfigError if the model or an optimizer does not fit the strategy.
        """
        model = self.accelerator.prepare_model(model, evaluation_mode=True)
        # One at a time, so that there is never a second copy of the model.
        for parameter in model.parameters():
            broadcast_from_main([parameter], self.accelerator)
        broadcast_from_main([*model.buffers()], self.accelerator)
        self._parameters = [*stepped_parameters(model, optimizers).values()]
        return model

    def gather(self, pieces: Pieces) -> dict[str, Any]:
        """Return the state that the main process stores. **Collective** with shards."""
        return dict(pieces)

    def checkpoint_peers(self, *, timeout_s: float) -> Peers:
        """Return the processes that write a checkpoint together. **Collective** with shards."""
        return SINGLE_PROCESS

    # --- a step ---

    def begin(self, buffers: StepBuffers) -> None:
        """Begin the micro-batches of a step, whose `buffers` are those at its beginning.

        The main process's, which a checkpoint stores, are copied to all. **Collective.**
        """
        broadcast_from_main(buffers.current, self.accelerator)

    def begin_forward(self, optimizer_step: int, index: int) -> None:
        """Seed what is random in the forward of micro-batch `index` of this process.

        Dropout, and what the task draws from Python's or numpy's generator, thus need no stored
        state.
        """
        key = fold_in(optimizer_step, index, start=self._forward_key)
        seed_generators(key, self._device)

    def begin_update(self, optimizer_step: int) -> None:
        """Seed what is random in an update, the same on all processes."""
        seed_generators(fold_in(optimizer_step, start=self._update_key), self._device)

    def end_backward(self, num_samples: int) -> None:
        """End a micro-batch of `num_samples`, perhaps 0, after its backward."""

    def finish(self, micro_sums: Sequence[StepSums]) -> tuple[StepSums, Tensor | None]:
        """Complete the step's gradients, and add up the `micro_sums` of its micro-batches.

        **Collective** if items are counted.

        Return the sums that this process reports, which over the processes add up to those of the
        step, and the number [] of items of all processes; None if the task does not count items.
        """
        sums = micro_sums[0] if len(micro_sums) == 1 else add_up(micro_sums, torch.sum)
        if sums.num_items is None:
            return sums, None
        return sums, self.accelerator.reduce(sums.num_items)

    def is_on_any_process(self, flag: Tensor) -> Tensor:
        """Return a flag [] that is above 0 on all processes if `flag` is on any of them.

        **Collective** with shards.
        """
        return flag  # averaged gradients are the same on all processes


def add_up(micro_sums: Sequence[StepSums], add: Callable[[Tensor], Tensor]) -> StepSums:
    """Return the sums of micro-batches, of which all or none count items.

    `add` returns the sum [] of numbers [N].
    """
    loss = add(torch.stack([each.loss for each in micro_sums]))
    numbers = {
        name: add(torch.stack([each.numbers[name] for each in micro_sums]))
        for name in micro_sums[0].numbers
    }
    counts = [each.num_items for each in micro_sums if each.num_items is not None]
    return StepSums(loss, numbers, add(torch.stack(counts)) if counts else None)
