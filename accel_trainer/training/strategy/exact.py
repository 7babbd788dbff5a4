"""`--reduce exact`: gradients with the same bits on any number of processes, added up in pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from ...core.buffers import StepBuffers
from ...core.errors import ConfigError
from ...core.pairwise import PairwiseSum, sum_rows
from ...core.parameters import Optimizers
from ...core.rng import fold_in
from ...core.types import StepSums
from ...distributed.collectives import exchange_flattened, sum_pairwise
from .base import Strategy, add_up


@dataclass(eq=False)
class ExactStrategy(Strategy):
    """Adds up the micro-batches of all processes in pairs.

    Gradients, running statistics and logged numbers are taken from each micro-batch by itself. A
    parameter that gets no gradient in any micro-batch has none. Each micro-batch starts from the
    buffers at the beginning of the step and normalises by itself; afterwards the running statistics
    are the mean over the micro-batches. Update rules of running statistics are linear,
    so this equals one update by the mean of all means and variances. For integers see
    `_merge_counters`.

    `num_micro_batches` is the number in a step, over all processes.
    """

    num_micro_batches: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gradient_factor = 1  # gradients are added up, not averaged
        self._forward_key = fold_in(self.seed, 0)
        # The place of this process's first micro-batch in a step.
        places = self.accelerator.process_index * self.num_micro_batches
        self._offset = places // self.accelerator.num_processes

    def refuse(self, flags: Sequence[str]) -> None:
        """Raise ConfigError if gradients are to be scaled."""
        if "--mixed-precision fp16" in flags:
            raise ConfigError(
                "REDUCE",
                "--reduce exact does not work with --mixed-precision fp16: remove one of them",
            )

    def prepare(self, model: nn.Module, optimizers: Optimizers) -> nn.Module:
        """Return the model without a wrapper, with the main process's weights. **Collective.**

        Raises:
            ConfigError: the model has a SyncBatchNorm, or its `summed_buffers` names a buffer that
                is not an integer one.
        """
        if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
            raise ConfigError(
                "REDUCE",
                "--reduce exact normalises each micro-batch by itself, and the model has a "
                "SyncBatchNorm: use BatchNorm instead",
            )
        # DDP would add up in another order.
        self._model = model = super().prepare(model, optimizers)
        # A forward may update a copy of the weights before it reads them: in the first step that
        # copy does not change yet.
        self._num_checks_left = 2
        buffers = dict(model.named_buffers())
        self._names = [*buffers]
        self._counters = [
            name
            for name, buffer in buffers.items()
            if not (buffer.is_floating_point() or buffer.is_complex())
        ]
        self._statistics = [name for name in buffers if name not in self._counters]
        self._summed = getattr(model, "summed_buffers", ())
        counters = [name for name in self._counters if buffers[name].dtype != torch.bool]
        for name in self._summed:
            if name not in counters:
                raise ConfigError(
                    "REDUCE",
                    f"the model's summed_buffers contains {name}, which is not an integer buffer: "
                    f"list some of {counters}, or none",
                )
        return model

    def begin(self, buffers: StepBuffers) -> None:
        """Begin the micro-batches of a step, which all start from these `buffers`."""
        self._buffers = buffers
        self._tree = PairwiseSum()
        self._has_gradient = [False] * len(self._parameters)
        self._changes: list[Tensor] = []
        self._before = self._watched_copies()

    def begin_forward(self, optimizer_step: int, index: int) -> None:
        """Restore the buffers, and seed by the step and the micro-batch's place in it."""
        self._buffers.restore()
        super().begin_forward(optimizer_step, self._offset + index)

    @torch.no_grad()
    def end_backward(self, num_samples: int) -> None:
        """Move the gradients and running statistics of the micro-batch into the pairwise sum.

        Without samples, zeros and the statistics from the beginning of the step take their place.
        """
        before = self._by_name(self._buffers.saved)
        now = self._by_name(self._buffers.current) if num_samples else before
        gradients = []
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad if num_samples else None
            self._has_gradient[index] |= gradient is not None
            gradients.append(torch.zeros_like(parameter) if gradient is None else gradient)
            parameter.grad = None
        self._tree.add([*gradients, *(now[name].clone() for name in self._statistics)])
        changes = [(now[name].long() - before[name].long()).reshape(-1) for name in self._counters]
        count = torch.tensor([num_samples], device=self.accelerator.device)
        self._changes.append(torch.cat([*changes, count]))

    @torch.no_grad()
    def finish(self, micro_sums: Sequence[StepSums]) -> tuple[StepSums, Tensor | None]:
        """Return the numbers of the step on the main process, zeros on the others. **Collective.**

        **Host sync** if a parameter has no gradient on this process.

        Raises:
            ConfigError: the micro-batches changed a buffer in ways that cannot be merged, or a
                forward of the first steps changed state that is not a buffer.
        """
        self._refuse_unmerged_changes()
        sums = add_up(micro_sums, sum_rows)
        num_items = sums.num_items
        numbers = [sums.loss, *sums.numbers.values()]
        if num_items is not None:
            numbers.append(num_items)
        counts = sums.loss.new_tensor(self._has_gradient)
        numbers.append(counts)
        totals = self._tree.total()
        if self.accelerator.num_processes > 1:
            exchange_flattened(
                [*totals, *numbers], lambda flat: sum_pairwise(flat, self.accelerator)
            )
        num_parameters = len(self._parameters)
        has_gradient = self._has_gradient if all(self._has_gradient) else counts.tolist()
        rows = zip(self._parameters, totals[:num_parameters], has_gradient, strict=True)
        for parameter, gradient, has_one in rows:
            parameter.grad = gradient if has_one else None
        self._buffers.restore()
        buffers = self._by_name(self._buffers.current)
        for name, total in zip(self._statistics, totals[num_parameters:], strict=True):
            if buffers[name].shape != total.shape:
                raise ConfigError(
                    "REDUCE",
                    f"a forward changes the shape of the buffer {name} from "
                    f"{list(buffers[name].shape)} to {list(total.shape)}: "
                    "let it keep its shape for --reduce exact, or use --reduce float",
                )
            buffers[name].copy_(total / self.num_micro_batches)
        self._merge_counters(buffers)
        if not self.accelerator.is_main_process:
            sums = recursively_apply(torch.zeros_like, sums)
        return sums, num_items

    def _by_name(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self._names, tensors, strict=True))

    def _watched_copies(self) -> dict[str, Tensor]:
        """Return copies of the parameters and the extra state, by name.

        After the first steps of a start there are none: changes are then no longer looked for.
        """
        state = self._model.state_dict() if self._num_checks_left > 0 else {}
        return {name: value.clone() for name, value in state.items() if name not in self._names}

    def _refuse_unmerged_changes(self) -> None:
        now = self._watched_copies()
        for name, value in self._before.items():
            if not torch.equal(now[name], value):
                raise ConfigError(
                    "REDUCE",
                    f"a forward changes {name}, which is not a buffer, in each micro-batch: "
                    "change it after the step, in on_step_end of a callback, make it a buffer, "
                    "or use --reduce float",
                )
        self._num_checks_left -= 1

    def _merge_counters(self, buffers: Mapping[str, Tensor]) -> None:
        """Apply the step's changes of integer buffers: counters, pointers, flags.

        **Collective. Host sync.**

        The sum of the micro-batches' changes would be wrong for a pointer, and a single change
        would be wrong for a counter of samples. So a change is applied once if it is the same in
        all micro-batches that have samples, and the sum is applied to the buffers that the model
        names in `summed_buffers`. Without integer buffers there is no collective here.

        Raises:
            ConfigError: micro-batches change a buffer differently, and `summed_buffers` does not
                name it.
        """
        if not self._counters:
            return
        # A row per micro-batch: its changes, and its number of samples in the last column.
        rows = self.accelerator.gather(torch.stack(self._changes))
        rows = rows[rows[:, -1] > 0]
        changes = rows[:, :-1].split([buffers[name].numel() for name in self._counters], dim=1)
        for name, change in zip(self._counters, changes, strict=True):
            is_summed = name in self._summed
            if not is_summed and (differs := (change != change[0]).any(0)).any():
                few, many = change[:, differs][:, 0].aminmax()
                fix = f"set summed_buffers = ({name!r},) on the model if the changes add up"
                if buffers[name].dtype == torch.bool:
                    fix = "set this flag alike in all of them, or count in an integer buffer"
                raise ConfigError(
                    "REDUCE",
                    f"the integer buffer {name} changes by {few} in one micro-batch "
                    f"of a step and by {many} in a different one, which --reduce exact cannot "
                    f"merge: {fix}, or use --reduce float",
                )
            change = change.sum(0) if is_summed else change[0]
            buffers[name].copy_(buffers[name].long() + change.view(buffers[name].shape))
