"""The first step finds a task that returns the mean of a loss, and no task that returns a sum."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel_trainer import (
    ClassificationConfig,
    ClassificationTask,
    DistillationTask,
    MultiLabelTask,
    RegressionTask,
    StepOutput,
)
from accel_trainer.core.errors import ConfigError
from accel_trainer.core.types import Batch, EvalOutput
from accel_trainer.distributed.accelerator import RuntimeConfig, start_accelerator
from accel_trainer.training import rehearsal
from accel_trainer.training.first_step import FirstStep
from accel_trainer.vision import SegmentationTask

from .. import workload

Loss = Callable[[nn.Module, Batch], StepOutput]
NUM_CLASSES = 10


class Own:
    """A task of two functions; without the second, its evaluation is a cross-entropy."""

    def __init__(
        self, train: Loss, evaluate: Callable[[nn.Module, Batch], EvalOutput] | None = None
    ) -> None:
        self.train_step = train
        self.eval_step = evaluate or ClassificationTask().eval_step


def entropy(model: nn.Module, batch: Batch, **options: Any) -> Tensor:
    return F.cross_entropy(model(batch.inputs), batch.targets, **options)


def own(loss: Callable[[nn.Module, Batch], Tensor], evaluate: Any = None) -> Own:
    return Own(lambda model, batch: StepOutput(loss(model, batch)), evaluate)


def net(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), *layers, nn.Linear(16, NUM_CLASSES))


def batch_of(size: int, targets: Tensor | None = None) -> Batch:
    generator = torch.Generator().manual_seed(size)
    labels = torch.randint(NUM_CLASSES, (size,), generator=generator)
    inputs = torch.randn(size, 6, generator=generator)
    return Batch(inputs, labels if targets is None else targets, torch.arange(size))


def first_step(task: Any, model: nn.Module, batch: Batch) -> None:
    step = FirstStep(task, model, start_accelerator(RuntimeConfig(num_threads=1)))
    output = step.train_step(model, batch)
    output.loss_sum.backward()
    step.check_loss_is_sum()


# --- per token, as language models ---

TOKENS = torch.randint(5, (8, 12), generator=torch.Generator().manual_seed(1))


def token_losses(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the losses of the tokens [B, T] without padding (0), and which tokens are counted."""
    logits = model(batch.inputs).view(len(batch), 12, 5)
    counted = batch.targets > 0
    return F.cross_entropy(
        logits.transpose(1, 2), batch.targets, reduction="none"
    ) * counted, counted


def eval_tokens(model: nn.Module, batch: Batch) -> EvalOutput:
    losses, counted = token_losses(model, batch)
    return EvalOutput(losses.sum(1), losses, counted.sum(1))


def sum_of_tokens(model: nn.Module, batch: Batch) -> StepOutput:
    losses, counted = token_losses(model, batch)
    return StepOutput(losses.sum(), num_items=counted.sum())


def mean_of_tokens(model: nn.Module, batch: Batch) -> StepOutput:
    losses, counted = token_losses(model, batch)
    return StepOutput(losses.sum() / counted.sum())


def mean_of_tokens_with_count(model: nn.Module, batch: Batch) -> StepOutput:
    return StepOutput(mean_of_tokens(model, batch).loss_sum, num_items=(batch.targets > 0).sum())


def token_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 60)


# --- honest tasks ---


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = net()[0]
        self.head = net()[1]
        self.other = net()[1]

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.stem(inputs)
        return self.head(features), self.other(features).tanh()


def with_auxiliary(model: nn.Module, batch: Batch) -> Tensor:
    main, other = model(batch.inputs)
    return F.cross_entropy(main, batch.targets, reduction="sum") + 0.4 * F.cross_entropy(
        other, batch.targets, reduction="sum"
    )


def eval_main(model: nn.Module, batch: Batch) -> EvalOutput:
    main, _ = model(batch.inputs)
    return EvalOutput(F.cross_entropy(main, batch.targets, reduction="none"), main)


def pairs(model: nn.Module, batch: Batch) -> StepOutput:
    """A loss over pairs has no sum over samples: the mean over micro-batches is meant."""
    return StepOutput(entropy(model, batch), num_items=torch.ones(()))


def consistency(model: nn.Module, batch: Batch) -> Tensor:
    logits, noisy = model(batch.inputs), model(batch.inputs + 0.1)
    return (
        F.cross_entropy(logits, batch.targets, reduction="sum")
        + (logits - noisy).square().mean(1).sum()
    )


def focal(model: nn.Module, batch: Batch) -> Tensor:
    losses = entropy(model, batch, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).sum()


def mean_of_numbers(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch.inputs) - batch.targets).square().mean(1).sum()


def mean_of_numbers_at_the_end(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(batch.inputs)
    return F.mse_loss(outputs, batch.targets, reduction="sum") / outputs.shape[1]


def mean_of_pixels(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(batch.inputs)
    return F.l1_loss(outputs, torch.zeros_like(outputs), reduction="sum") / outputs[0, 0].numel()


def eval_sum_of_numbers(model: nn.Module, batch: Batch) -> EvalOutput:
    outputs = model(batch.inputs)
    return EvalOutput((outputs - batch.targets).square().sum(1), outputs)


def eval_sum_of_pixels(model: nn.Module, batch: Batch) -> EvalOutput:
    outputs = model(batch.inputs)
    return EvalOutput(outputs.abs().sum((1, 2, 3)), outputs)


def generator_and_critic(model: nn.Module, batch: Batch) -> Tensor:
    return F.softplus(-model(batch.inputs)).mean(1).sum()


def eval_part(model: nn.Module, batch: Batch) -> EvalOutput:
    outputs = model[1](model[0](batch.inputs))  # type: ignore[index]
    return EvalOutput(outputs.norm(dim=1), outputs)


def eval_zeros(model: nn.Module, batch: Batch) -> EvalOutput:
    return EvalOutput(torch.zeros(len(batch)), model(batch.inputs))


def eval_in_place(model: nn.Module, batch: Batch) -> EvalOutput:
    batch.inputs.zero_()
    logits = model(batch.inputs)
    losses = F.cross_entropy(logits, batch.targets, reduction="none")
    return EvalOutput(losses, logits.zero_())


def eval_with_attributes(model: nn.Module, batch: Batch) -> EvalOutput:
    assert isinstance(model, nn.Module)
    return ClassificationTask().eval_step(model.eval(), batch)


SOFT = torch.full((16, NUM_CLASSES), 0.05)
SOFT[:, 3] = 0.55
KINDS = torch.rand(16, NUM_CLASSES, generator=torch.Generator().manual_seed(2)).round()
WEIGHTS = torch.linspace(0.01, 0.19, NUM_CLASSES)
PIXELS = torch.randint(4, (4, 5, 5), generator=torch.Generator().manual_seed(3))


def pixel_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv2d(2, 4, 1)


HONEST: dict[str, tuple[Any, nn.Module, Batch]] = {
    "cross-entropy": (ClassificationTask(), net(), batch_of(16)),
    "label smoothing": (
        ClassificationTask(ClassificationConfig(label_smoothing=0.1)),
        net(),
        batch_of(16),
    ),
    "mixup": (ClassificationTask(), net(), batch_of(16, SOFT)),
    "test-time views": (own(lambda m, b: entropy(m, b, reduction="sum")), net(), batch_of(8)),
    "class weights that add up to 1": (
        ClassificationTask(class_weights=WEIGHTS),
        net(),
        batch_of(10),
    ),
    "distillation": (DistillationTask(net(nn.ReLU())), net(), batch_of(16)),
    "distillation from itself": (DistillationTask(net(), weight=0.5), net(), batch_of(2)),
    "dropout": (ClassificationTask(), net(nn.Dropout(0.5)), batch_of(16)),
    "batch norm": (ClassificationTask(), net(nn.BatchNorm1d(16)), batch_of(16)),
    "half the loss of two samples": (
        own(lambda m, b: 0.5 * entropy(m, b, reduction="sum")),
        net(),
        batch_of(2),
    ),
    "a tenth of ten samples": (
        own(lambda m, b: 0.1 * entropy(m, b, reduction="sum")),
        net(),
        batch_of(10),
    ),
    "a hundredth": (own(lambda m, b: 0.01 * entropy(m, b, reduction="sum")), net(), batch_of(64)),
    "auxiliary": (own(with_auxiliary, eval_main), TwoHeads(), batch_of(16)),
    "mean over as many numbers as samples": (
        own(mean_of_numbers, eval_sum_of_numbers),
        nn.Linear(6, 16),
        batch_of(16, torch.randn(16, 16)),
    ),
    "divided by as many numbers as samples": (
        own(mean_of_numbers_at_the_end, eval_sum_of_numbers),
        net(),
        batch_of(10, torch.randn(10, NUM_CLASSES)),
    ),
    "mean over as many pixels as samples": (
        own(mean_of_pixels, eval_sum_of_pixels),
        pixel_net(),
        Batch(torch.randn(25, 2, 5, 5), PIXELS, torch.arange(25)),
    ),
    "one sample": (ClassificationTask(), net(), batch_of(1)),
    "mean of one sample": (own(entropy), net(), batch_of(1)),
    "no sample": (ClassificationTask(), net(), batch_of(0)),
    "regression": (RegressionTask(), net(), batch_of(16, torch.randn(16, NUM_CLASSES))),
    "several labels": (MultiLabelTask(), net(), batch_of(16, KINDS)),
    "segmentation": (
        SegmentationTask(),
        pixel_net(),
        Batch(torch.randn(4, 2, 5, 5), PIXELS, torch.arange(4)),
    ),
    "tokens": (Own(sum_of_tokens, eval_tokens), token_net(), batch_of(8, TOKENS)),
    "pairs": (Own(pairs), net(), batch_of(16)),
    "two forwards": (own(consistency), net(), batch_of(16)),
    "focal": (own(focal), net(), batch_of(16)),
    "GAN": (own(generator_and_critic, eval_part), net(), batch_of(16)),
    "an evaluation without a loss": (own(generator_and_critic, eval_zeros), net(), batch_of(16)),
    "an evaluation in place": (
        own(lambda m, b: entropy(m, b, reduction="sum"), eval_in_place),
        net(),
        batch_of(16),
    ),
    "an evaluation of the class": (own(focal, eval_with_attributes), net(), batch_of(16)),
}


@pytest.mark.parametrize("kind", HONEST)
def test_a_task_that_returns_a_sum_is_not_taken_for_a_mean(kind: str) -> None:
    task, model, batch = HONEST[kind]
    start_accelerator(RuntimeConfig(num_threads=1))  # its first draws a number
    inputs = batch.inputs.clone()
    states = torch.get_rng_state()
    first_step(task, model, batch)
    assert torch.equal(batch.inputs, inputs)
    if kind != "dropout":
        assert torch.equal(torch.get_rng_state(), states)


MEANS: dict[str, tuple[Any, nn.Module, Batch]] = {
    "cross-entropy": (own(entropy), net(), batch_of(16)),
    "of as many samples as classes": (own(entropy), net(), batch_of(NUM_CLASSES)),
    "of three samples": (own(entropy), net(), batch_of(3)),
    "label smoothing": (own(lambda m, b: entropy(m, b, label_smoothing=0.05)), net(), batch_of(64)),
    "dropout and batch norm": (
        own(entropy),
        net(nn.BatchNorm1d(16), nn.Dropout(0.5)),
        batch_of(32),
    ),
    "by hand": (own(lambda m, b: entropy(m, b, reduction="none").mean()), net(), batch_of(16)),
    "divided": (own(lambda m, b: entropy(m, b, reduction="sum") / len(b)), net(), batch_of(16)),
    "times one": (own(lambda m, b: 1.0 * entropy(m, b)), net(), batch_of(16)),
    "squares": (
        own(lambda m, b: F.mse_loss(m(b.inputs), b.targets), RegressionTask().eval_step),
        net(),
        batch_of(16, torch.randn(16, NUM_CLASSES)),
    ),
    "tokens": (Own(mean_of_tokens, eval_tokens), token_net(), batch_of(8, TOKENS)),
    "tokens with their number": (
        Own(mean_of_tokens_with_count, eval_tokens),
        token_net(),
        batch_of(8, TOKENS),
    ),
}


@pytest.mark.parametrize("kind", MEANS)
def test_a_task_that_returns_a_mean_is_refused_with_the_numbers(kind: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"as loss_sum, the mean over \d+ (samples|items); eval_step's losses add up",
    ):
        first_step(*MEANS[kind])


def test_a_mean_loss_ends_the_run_in_its_first_step(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"the mean over 16 samples; .*: return the sum over the batch"
    ):
        workload.train(workload.make_config(tmp_path), task=own(entropy))


def test_the_check_of_the_first_step_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unchecked(FirstStep):
        def __init__(self, task: Any, *unused: object) -> None:
            self.train_step = task.train_step

        def check_loss_is_sum(self) -> None:
            pass

    for name in ("checked", "unchecked"):
        if name == "unchecked":
            monkeypatch.setattr(rehearsal, "FirstStep", Unchecked)
        workload.train(workload.make_config(tmp_path / name), dropout=0.3, norm="batch")
    files = [
        (tmp_path / name / "export" / "model.safetensors").read_bytes()
        for name in ("checked", "unchecked")
    ]
    assert files[0] == files[1]


# --- shapes ---


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (
            lambda m, b: StepOutput(entropy(m, b, reduction="none")),
            r"float32 \[16\] as loss_sum: return one number",
        ),
        (
            lambda m, b: StepOutput(
                entropy(m, b, reduction="sum"), {"hits": m(b.inputs).argmax(1)}
            ),
            r"int64 \[16\] as the sum hits: return one number, summed over the batch",
        ),
    ],
)
def test_a_loss_or_a_sum_of_each_sample_is_refused_in_the_first_step(
    tmp_path: Path, train: Loss, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        workload.train(workload.make_config(tmp_path), task=Own(train))


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda net: nn.Sequential(nn.DataParallel(net))])
def test_a_model_in_data_parallel_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrap: Any
) -> None:
    small = workload.SmallNet
    monkeypatch.setattr(workload, "SmallNet", lambda **options: wrap(small(**options)))
    with pytest.raises(
        ConfigError, match="the model is, or has, a DataParallel: give the plain module"
    ):
        workload.train(workload.make_config(tmp_path))
