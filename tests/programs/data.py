"""Where the samples of programs come from, and what evaluates their models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from accel_trainer import (
    Batch,
    ConfusionMatrix,
    DatasetOptions,
    MeanLoss,
    Position,
    Reader,
    Run,
    StepBatch,
    StepOutput,
    StreamReader,
    TopKAccuracy,
    WholeSetMetric,
)
from accel_trainer.core.filesystem import write_file_atomic

from .draft import NUM_STEPS, NUM_TRAIN, Draft
from .models import NUM_CLASSES, NUM_FEATURES


class Points:
    """Points around the corner of their class, with noise that is drawn at each reading."""

    def __init__(self, size: int, *, seed: int, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = (torch.arange(size) % 5).clamp_max(NUM_CLASSES - 1)
        self.points = torch.randn(size, NUM_FEATURES, generator=generator)
        self.points[torch.arange(size), self.labels] += 1.5
        self.noise = noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point = self.points[index]
        if self.noise:
            point = point + self.noise * torch.randn(NUM_FEATURES)
        return point, self.labels[index]


TRAIN = Points(NUM_TRAIN, seed=1, noise=0.3)
VAL = Points(23, seed=2)
TEST = Points(11, seed=3)


class Rows(Reader):
    """Reads a batch of points at a time, with noise by the sample and the epoch."""

    def __init__(self, points: Points) -> None:
        self.points = points

    def __len__(self) -> int:
        return len(self.points)

    def read(self, ids: Iterable[Tensor], epoch: int | None) -> Iterator[Batch]:
        for batch_ids in ids:
            places = batch_ids % len(self)
            inputs = self.points.points[places]
            if epoch is not None:
                inputs = inputs + 0.1 * torch.sin(batch_ids[:, None] * 7.0 + epoch)
            yield Batch(inputs, self.points.labels[places], batch_ids)


def stream(epoch: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the training samples in another order in each epoch."""
    order = torch.randperm(NUM_TRAIN, generator=torch.Generator().manual_seed(epoch or 0))
    for index in order.tolist():
        yield TRAIN.points[index], TRAIN.labels[index]


def forever(epoch: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    for number in count():
        yield from stream(number)


class Seekable:
    """A stream that a resume can begin at a position."""

    def __init__(self, epoch: int | None) -> None:
        self.samples = [*stream(epoch)]

    def seek(self, position: int) -> None:
        self.samples = self.samples[position:]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.samples)


class SmallFirst:
    """A loader of one's own: the samples by their distance from a point that turns by epochs."""

    def __init__(self, run: Run) -> None:
        self.plan = run.config.batch.plan(NUM_TRAIN, num_processes=run.accelerator.num_processes)
        self.process = run.accelerator.process_index

    def step_batches(self, epoch: int, first_step: int) -> Iterator[StepBatch]:
        order = (TRAIN.points[:, epoch % NUM_FEATURES]).argsort()
        for step in range(first_step, self.plan.steps_per_epoch):
            parts = [order[[*part]] for part in self.plan.micro_batches(step, self.process)]
            batches = [Batch(TRAIN.points[ids], TRAIN.labels[ids], ids) for ids in parts]
            yield StepBatch(batches, self.plan.step_batch_size(step))


def dataset(draft: Draft) -> None:
    draft.train_set = lambda run: TRAIN


def workers(draft: Draft) -> None:
    dataset(draft)
    draft.set("batch", num_workers=2)


def reader(draft: Draft) -> None:
    draft.train_set = lambda run: Rows(TRAIN)


def stream_with_length(draft: Draft) -> None:
    draft.train_set = lambda run: StreamReader(stream, NUM_TRAIN)


def stream_that_seeks(draft: Draft) -> None:
    draft.train_set = lambda run: StreamReader(Seekable, NUM_TRAIN)


def endless_stream(draft: Draft) -> None:
    draft.train_set = lambda run: StreamReader(forever)
    draft.set("trainer", num_epochs=None, num_steps=NUM_STEPS, evaluate_every="4steps")


def balanced(draft: Draft) -> None:
    dataset(draft)
    draft.set("batch", order="balanced", drop_last=True)


def stored(draft: Draft) -> None:
    dataset(draft)
    draft.set("batch", order="stored", drop_last=True)


def left_out(draft: Draft) -> None:
    dataset(draft)
    folder = draft.config.run.output_dir
    assert folder is not None
    names = folder.parent / "left-out.txt"
    write_file_atomic(names, b"0\n7  # a comment\n30\n")
    draft.set("batch", leave_out=names)


def weighted(draft: Draft) -> None:
    dataset(draft)
    draft.options = DatasetOptions(weights=1 + torch.arange(NUM_TRAIN) % 4)


def rows_of_pairs(epoch: int) -> Tensor:
    """Each of half of the samples twice in a row, others in each epoch."""
    generator = torch.Generator().manual_seed(epoch)
    return torch.randperm(NUM_TRAIN, generator=generator)[: NUM_TRAIN // 2].repeat_interleave(2)


def own_order(draft: Draft) -> None:
    dataset(draft)
    draft.options = DatasetOptions(order=rows_of_pairs)


def own_loader(draft: Draft) -> None:
    draft.train_set = SmallFirst


DATA: dict[str, Callable[[Draft], None]] = {
    "dataset": dataset,
    "workers": workers,
    "reader": reader,
    "stream": stream_with_length,
    "stream that seeks": stream_that_seeks,
    "endless stream": endless_stream,
    "balanced": balanced,
    "stored": stored,
    "some left out": left_out,
    "weighted": weighted,
    "own order": own_order,
    "own loader": own_loader,
}


# --- evaluations ---


class Distance:
    """An evaluation of one's own: how far the model's outputs are from those of an old point."""

    monitors: Mapping[str, bool] = {"distance": False}

    def run(self, model: nn.Module, position: Position, stop_flag: Any) -> dict[str, Any]:
        outputs = model(VAL.points)
        drawn = model(VAL.points + 0.1 * torch.randn(VAL.points.shape))
        # With shards, each forward is a collective; what it returns is whole.
        return {
            "distance": float((outputs - drawn).norm()),
            "by_step": position.step,
            "outputs": outputs,
        }


class Swapped(Distance):
    """Measures half of the weights, which it puts back."""

    def run(self, model: nn.Module, position: Position, stop_flag: Any) -> dict[str, Any]:
        weights = [*model.parameters()]  # FSDP has others there after a forward
        kept = [each.detach().clone() for each in weights]
        for each in weights:
            each.mul_(0.5)
        found = super().run(model, position, stop_flag)
        for each, value in zip(weights, kept, strict=True):
            each.copy_(value)
        return found


class Margin:
    """A metric of one's own: the mean distance between the two largest outputs."""

    higher_is_better: Mapping[str, bool] = {"margin": True}

    def empty(self, device: torch.device) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=device)

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        first, second = output.outputs.double().topk(2).values.unbind(1)
        sums += torch.stack([(first - second).sum(), sums.new_tensor(len(batch))])

    def compute(self, sums: Tensor) -> Mapping[str, Any]:
        total, number = sums.tolist()
        return {"margin": total / number if number else math.nan}


def spread(outputs: Tensor, targets: Tensor) -> Mapping[str, float]:
    return {"spread": outputs.double().std().item()}


def one_set(draft: Draft) -> None:
    draft.eval_sets = lambda run: VAL


def two_sets_and_test(draft: Draft) -> None:
    draft.eval_sets = lambda run: {"val": VAL, "far": Points(7, seed=5)}
    draft.test_set = TEST


def own_metrics(draft: Draft) -> None:
    one_set(draft)
    whole = WholeSetMetric(spread, num_outputs=NUM_CLASSES, higher_is_better={})
    draft.metrics = [MeanLoss(), TopKAccuracy(), Margin(), ConfusionMatrix(NUM_CLASSES), whole]


def by_reader(draft: Draft) -> None:
    draft.eval_sets = lambda run: Rows(VAL)


def by_stream(draft: Draft) -> None:
    samples = [VAL[index] for index in range(len(VAL))]
    draft.eval_sets = lambda run: StreamReader(lambda epoch: iter(samples), len(samples))


def own_evaluation(draft: Draft) -> None:
    draft.eval_sets = lambda run: {"own": Distance(), "val": VAL}


def swapped_weights(draft: Draft) -> None:
    draft.eval_sets = lambda run: {"val": VAL, "swapped": Swapped()}


EVALUATIONS: dict[str, Callable[[Draft], None]] = {
    "one set": one_set,
    "two sets and a test": two_sets_and_test,
    "own metrics": own_metrics,
    "a reader": by_reader,
    "a stream": by_stream,
    "own": own_evaluation,
    "swapped weights": swapped_weights,
}
