"""Whole-step capture: forward, backward and update recorded as one CUDA graph, and replayed for the steps like it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .compilation import Stopwatch
from .nonfinite import Attempt
from .seeding import seed_forward
from .trainer import Trainer
from .types import Batch, StepOutput, Window
from .update import Outcome

_logger = logging.getLogger(__name__)

_WARM_UP_STEPS = 3  # in which libraries and the optimizer set themselves up, as in torch's make_graphed_callables


class StepValues(NamedTuple):
    """What a step leaves for its report: tensors [], which each replay writes anew."""

    loss_sum: Tensor
    sums: Mapping[str, Tensor]
    grad_norm: Tensor | None


class Record(Protocol):
    """Records what `work` does on the device, without doing it."""

    def __call__(self, work: Callable[[], StepValues]) -> tuple[Callable[[], None], StepValues]:
        """Return what replays the work, and the values that a replay writes. Raises if it cannot be recorded."""


def record_cuda_graph(work: Callable[[], StepValues]) -> tuple[Callable[[], None], StepValues]:
    """Record a CUDA graph. Other threads, such as the writer of checkpoints, may use the GPU meanwhile."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        values = work()
    return graph.replay, values


def obstacles_to_capture(trainer: Trainer) -> list[str]:
    """Return what is in the way of recording the steps of `trainer`."""
    accelerator = trainer.accelerator
    obstacles = {
        "needs a CUDA GPU": accelerator.device.type != "cuda",
        "is for one process": accelerator.num_processes > 1,
        "needs --mixed-precision bf16 or no": accelerator.scaler is not None,
        "needs --on-nonfinite stop": trainer.config.on_nonfinite == "skip",
        "needs an optimizer with fused kernels": not all(g.get("fused") for g in trainer.optimizer.param_groups),
        "needs deterministic kernels": not torch.are_deterministic_algorithms_enabled(),
        "needs a step without --accumulate": trainer.loader.plan.accumulation_steps > 1,
    }
    return [reason for reason, holds in obstacles.items() if holds]


class StepCapture:
    """Takes the steps of `trainer` by a recording that costs the host one launch, where it leaves the same bits.

    A kind of step (its shapes, the optimizer's settings, what is trained) is recorded once it has come three times
    in a row. Whatever the host computes is fixed in a recording, other than the learning rate and the seed. So the
    next step of the kind is taken both ways: if they leave the same bits, the recording is used from then on; if
    not, or if torch cannot record it, all steps go on as they come, after one warning.

    The device has the learning rate in float32. `preparation` counts the time that recording takes.
    """

    def __init__(self, trainer: Trainer, *, preparation: Stopwatch, record: Record = record_cuda_graph) -> None:
        self._trainer, self._preparation, self._record = trainer, preparation, record
        self._modules = list(trainer.raw_model.modules())
        self._weights = list(trainer.raw_model.parameters())
        self._kind: object = None
        self._num_in_a_row = 0
        self._recorded: _RecordedStep | None = None
        self.is_given_up = False
        for group in trainer.optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=trainer.accelerator.device)
            if "capturable" in group:
                group["capturable"] = True

    def compute(self, window: Window) -> tuple[StepOutput, Outcome]:
        """Do what `Trainer.compute` does."""
        if self.is_given_up or len(window.micro_batches) > 1:
            return self._trainer.compute_as_it_comes(window)
        (batch,) = self._trainer.data_wait.around(window.micro_batches)
        window = Window([batch], window.num_items)
        if not all(isinstance(part, Tensor) for part in _tensors(batch)):
            self._give_up("the inputs or targets of a batch are not one tensor")
            return self._trainer.compute_as_it_comes(window)
        kind = self._kind_of(window)
        self._num_in_a_row = self._num_in_a_row + 1 if kind == self._kind else 1
        self._kind = kind
        step = self._recorded
        if step is not None and step.kind == kind:
            return self._replay(step, window) if step.is_checked else self._take_both_ways(step, window)
        result = self._trainer.compute_as_it_comes(window)
        if self._num_in_a_row == _WARM_UP_STEPS:
            with self._preparation.running():
                self._try_to_record(window)
        return result

    def _kind_of(self, window: Window) -> object:
        """Return what a recording holds fixed: two steps of which it is equal differ in their data alone."""
        layout = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in _tensors(window.micro_batches[0])]
        groups = self._trainer.optimizer.param_groups
        settings = [[value for name, value in group.items() if name not in ("params", "lr")] for group in groups]
        trained = [weight.requires_grad for weight in self._weights], [module.training for module in self._modules]
        return window.num_items, layout, settings, trained

    def _try_to_record(self, window: Window) -> None:
        share, (batch,) = 1 / window.num_items, window.micro_batches
        task, model, update = self._trainer.task, self._trainer.model, self._trainer.update

        def work(batch: Batch) -> StepValues:
            update.begin()
            loss_sum, sums = task.train_step(model, batch)
            update.add_gradients(loss_sum, share)
            return StepValues(loss_sum.detach(), sums, update.apply_unseen())

        self._recorded = None  # its memory is free for the next
        try:
            self._recorded = _RecordedStep(self._kind, batch, work, self._record)
        except Exception as error:
            update.drop_gradients()
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._give_up(f"torch cannot record this step ({reason})")

    def _replay(self, step: _RecordedStep, window: Window) -> tuple[StepOutput, Outcome]:
        trainer, (batch,) = self._trainer, window.micro_batches
        seed_forward(trainer.process_key, optimizer_step=trainer.state.optimizer_step, micro_batch=0)
        loss_sum, sums, grad_norm = step.run(batch)
        trainer.update.look_later(Attempt(trainer.state, window, [loss_sum]))
        return StepOutput(loss_sum, sums), Outcome(grad_norm, was_skipped=False)

    def _take_both_ways(self, step: _RecordedStep, window: Window) -> tuple[StepOutput, Outcome]:
        """Take the step as it comes, and once more from the same start by the recording. **Host sync.**"""
        state = _state_of(self._trainer)
        before = [tensor.detach().clone() for tensor in state]
        output, outcome = self._trainer.compute_as_it_comes(window)
        with self._preparation.running():
            after = [tensor.detach().clone() for tensor in state]
            _put(before, state)
            replayed, _ = self._replay(step, window)
            left, expected = [*state, *_values(replayed)], [*after, *_values(output)]
            step.is_checked = all(map(torch.equal, left, expected))
            if not step.is_checked:
                _put(after, state)
                self._give_up("a recorded step does not leave the bits of the step itself")
        return output, outcome

    def _give_up(self, reason: str) -> None:
        self.is_given_up, self._recorded = True, None
        _logger.warning("--capture: %s, and so each step is taken as it comes", reason)


class _RecordedStep:
    """A step that reads its batch from memory of its own and leaves its values there."""

    def __init__(self, kind: object, batch: Batch, work: Callable[[Batch], StepValues], record: Record) -> None:
        self.kind, self.is_checked = kind, False
        self._batch = Batch(*(tensor.clone() for tensor in _tensors(batch)))
        self._replay, self._values = record(lambda: work(self._batch))

    def run(self, batch: Batch) -> StepValues:
        for mine, theirs in zip(_tensors(self._batch), _tensors(batch), strict=True):
            mine.copy_(theirs, non_blocking=True)
        self._replay()
        loss_sum, sums, grad_norm = self._values
        kept = {name: value.clone() for name, value in sums.items()}
        return StepValues(loss_sum.clone(), kept, None if grad_norm is None else grad_norm.clone())


def _values(output: StepOutput) -> list[Tensor]:
    return [output.loss_sum, *output.sums.values()]


def _tensors(batch: Batch) -> tuple[Tensor, ...]:
    return batch.inputs, batch.targets, batch.sample_ids


def _state_of(trainer: Trainer) -> list[Tensor]:
    """Return the tensors that a step changes."""
    model = trainer.raw_model
    kept = [value for state in trainer.optimizer.state.values() for value in state.values()]
    return [*model.parameters(), *model.buffers(), *(value for value in kept if isinstance(value, Tensor))]


@torch.no_grad()
def _put(values: Sequence[Tensor], state: Sequence[Tensor]) -> None:
    for mine, value in zip(state, values, strict=True):
        mine.copy_(value)
