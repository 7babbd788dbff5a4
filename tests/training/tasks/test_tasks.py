from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from accel_trainer.core.errors import ConfigError
from accel_trainer.core.types import Batch
from accel_trainer.training.tasks.tasks import (
    ClassificationConfig,
    ClassificationTask,
    MultiLabelTask,
    RegressionTask,
)
from accel_trainer.vision import (
    ImageClassificationConfig,
    ImageClassificationTask,
    SegmentationTask,
)
from recipes.distill import DistillationTask

from ...workload import NUM_CLASSES, SmallNet


def make_batch(num: int = 10, *, soft: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(num, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(NUM_CLASSES, (num,), generator=generator)
    weights = torch.rand(num, NUM_CLASSES, generator=generator, dtype=torch.float64)
    return Batch(
        images, weights / weights.sum(1, keepdim=True) if soft else labels, torch.arange(num)
    )


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return SmallNet(norm="group").double()


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> np.ndarray:
    """Per-sample cross-entropies, by the definition."""
    scores = logits.detach().numpy()
    log_probabilities = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    weights = np.eye(NUM_CLASSES)[targets.numpy()] if targets.ndim == 1 else targets.numpy()
    smoothed = (1 - smoothing) * weights + smoothing / NUM_CLASSES
    return -(smoothed * log_probabilities).sum(1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("soft", [False, True])
def test_the_loss_is_the_cross_entropy_of_each_sample(smoothing: float, soft: bool) -> None:
    model = make_model()
    batch = make_batch(soft=soft)
    output = ClassificationTask(ClassificationConfig(label_smoothing=smoothing)).step(model, batch)
    expected = cross_entropy(model(batch.inputs), batch.targets, smoothing)
    np.testing.assert_allclose(output.losses.detach(), expected, rtol=1e-12)
    assert output.numbers == {}


@pytest.mark.parametrize("soft", [False, True])
def test_train_accuracy_is_the_hits_of_the_largest_target(soft: bool) -> None:
    model = make_model()
    batch = make_batch(50, soft=soft)
    output = ClassificationTask(ClassificationConfig(train_accuracy=True)).step(model, batch)
    labels = batch.targets.argmax(1) if soft else batch.targets
    assert torch.equal(output.numbers["accuracy"], model(batch.inputs).argmax(1) == labels)
    assert not output.numbers["accuracy"].requires_grad


@pytest.mark.parametrize("soft", [False, True])
def test_a_batch_of_nothing_has_no_loss_and_zero_gradients(soft: bool) -> None:
    model = make_model()
    config = ClassificationConfig(label_smoothing=0.1, train_accuracy=True)
    output = ClassificationTask(config).step(model, make_batch(0, soft=soft))
    output.losses.backward(torch.zeros(0, dtype=output.losses.dtype))
    assert output.losses.shape == output.numbers["accuracy"].shape == (0,)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name  # so that it takes part in the sum over processes
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_evaluation_is_the_plain_cross_entropy_of_each_sample() -> None:
    model = make_model()
    batch = make_batch()
    output = ClassificationTask(ClassificationConfig(label_smoothing=0.5)).eval_step(model, batch)
    assert torch.equal(output.outputs, model(batch.inputs))
    np.testing.assert_allclose(
        output.losses.detach(), cross_entropy(output.outputs, batch.targets), rtol=1e-12
    )


def test_the_default_task_is_plain() -> None:
    assert ClassificationTask().config == ClassificationConfig(
        label_smoothing=0.0, train_accuracy=False
    )


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_a_smoothing_outside_its_range_is_named(value: float) -> None:
    with pytest.raises(
        ConfigError, match=f"label_smoothing is {value}: set it to at least 0 and below 1"
    ):
        ClassificationConfig(label_smoothing=value)


class Gives(nn.Module):
    """A model whose output was decided on before."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, inputs: Tensor) -> Any:
        return self.output


LOGITS, LABELS = torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])
WRONG = {
    "per pixel": (
        torch.zeros(4, 3, 2, 2),
        LABELS[:, None, None].expand(4, 2, 2),
        r"float32 \[4, 3, 2, 2\] .*needs your own task",
    ),
    "one class": (LOGITS[:, :1], LABELS * 0, r"the cross-entropy of one class is always 0"),
    "no classes": (
        LOGITS[:, 0],
        LABELS,
        r"float32 \[4\] for targets int64 \[4\]: a classifier returns logits",
    ),
    "a column": (
        LOGITS,
        LABELS[:, None],
        r"int64 \[4, 1\]: give labels \[B\], as labels.squeeze\(1\) does",
    ),
    "narrow weights": (
        LOGITS,
        LOGITS[:, :2],
        r"float32 \[4, 2\]: .*, or float weights \[B, K\] of the classes$",
    ),
    "one-hot integers": (
        LOGITS,
        LOGITS.long(),
        r"int64 \[4, 3\]: .*, or float weights \[B, K\] of the classes$",
    ),
    "float labels": (
        LOGITS,
        LABELS.float(),
        r"float32 \[4\]: give labels int64 \[B\], as labels.long\(\) does",
    ),
    "short labels": (LOGITS, LABELS.int(), r"int32 \[4\]: give labels int64 \[B\]"),
    "too few labels": (LOGITS, LABELS[:3], r"int64 \[3\]: give each sample one target"),
    "a list of labels": (LOGITS, [0, 1, 2, 0], r"of type list: give each sample one target"),
    "a tuple": (
        (LOGITS, LOGITS),
        LABELS,
        r"returns an object of type tuple for targets int64 \[4\]: return only the logits",
    ),
    "a dict": (
        {"logits": LOGITS, "aux": LOGITS},
        LABELS,
        r"returns an object of type dict with logits, aux for targets",
    ),
}


@pytest.mark.parametrize(("output", "targets", "said"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize(
    "task", [ClassificationTask(), ImageClassificationTask(ImageClassificationConfig(tta="flip"))]
)
def test_shapes_that_do_not_fit_are_named_in_one_line_with_the_fix(
    output: Any, targets: Any, said: str, task: ClassificationTask
) -> None:
    model = Gives(output)
    batch = Batch(torch.zeros(4, 3, 8, 8), targets, torch.arange(4))
    for step in (task.step, task.eval_step):
        with pytest.raises(ConfigError, match=said) as caught:
            step(model, batch)
        assert "\n" not in str(caught.value)


def test_class_weights_are_factors_on_the_losses_of_their_classes() -> None:
    model = make_model()
    batch = make_batch()
    weights = torch.tensor([0.5, 1.0, 2.0, 4.0])
    output = ClassificationTask(class_weights=weights).step(model, batch)
    each = torch.tensor(cross_entropy(model(batch.inputs), batch.targets))
    expected = each * weights[batch.targets]
    np.testing.assert_allclose(output.losses.detach(), expected, rtol=1e-12)


# --- other tasks ---


def of(outputs: Tensor) -> nn.Module:
    """A model that gives `outputs`."""

    class Fixed(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return outputs

    return Fixed()


def batch_of(targets: Tensor) -> Batch:
    return Batch(torch.zeros(len(targets), 1), targets, torch.arange(len(targets)))


def test_regression_is_the_mean_squared_error_of_each_sample() -> None:
    outputs, targets = torch.randn(6, 2), torch.randn(6, 2)
    result = RegressionTask().step(of(outputs), batch_of(targets))
    assert torch.allclose(result.losses, ((outputs - targets) ** 2).mean(1))


def test_multi_label_is_the_binary_cross_entropy_over_the_classes() -> None:
    logits, targets = torch.randn(6, 4), torch.randint(0, 2, (6, 4))
    result = MultiLabelTask().step(of(logits), batch_of(targets))
    p = logits.sigmoid()
    expected = -(targets * p.log() + (1 - targets) * (1 - p).log()).mean(1)
    assert torch.allclose(result.losses, expected, atol=1e-6)


def test_present_classes_weigh_as_in_torchs_loss() -> None:
    logits, targets = torch.randn(6, 4), torch.rand(6, 4)
    weights = [1.0, 2.0, 0.0, 30.0]
    expected = nn.BCEWithLogitsLoss(reduction="none", pos_weight=torch.tensor(weights))
    for given in (weights, torch.tensor(weights), torch.tensor(weights, dtype=torch.float64)):
        result = MultiLabelTask(pos_weight=given).step(of(logits), batch_of(targets))
        assert torch.equal(result.losses, expected(logits, targets).mean(1))
    plain, other = MultiLabelTask(), MultiLabelTask(pos_weight=[1.0, 1.0, 1.0, 2.0])
    assert plain.fingerprint() == ""
    assert (
        len({each.fingerprint() for each in (plain, other, MultiLabelTask(pos_weight=weights))})
        == 3
    )


@pytest.mark.parametrize("weights", [[-1.0, 2.0], [math.nan, 1.0], [math.inf, 1.0], [0.0, 0.0]])
def test_weights_of_present_classes_that_are_no_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="pos_weight range from .* use finite weights"):
        MultiLabelTask(pos_weight=weights)


def test_weights_of_a_different_number_of_classes_are_refused() -> None:
    task = MultiLabelTask(pos_weight=[1.0, 2.0])
    with pytest.raises(ConfigError, match=r"SHAPES.*pos_weight are .*\[2\] for logits .*\[6, 4\]"):
        task.step(of(torch.zeros(6, 4)), batch_of(torch.zeros(6, 4)))


def test_distillation_adds_the_divergence_from_the_teacher() -> None:
    student = make_model()
    teacher = make_model()
    batch = make_batch()
    with torch.no_grad():
        teacher.layers[9].weight.mul_(3)
    task = DistillationTask(teacher, weight=0.3, temperature=2.0)
    mine, theirs = (model(batch.inputs).detach() for model in (student, teacher))
    p, q = (theirs / 2).softmax(1), (mine / 2).softmax(1)
    divergence = 4 * (p * (p.log() - q.log())).sum(1)
    expected = 0.7 * cross_entropy(mine, batch.targets) + 0.3 * divergence.numpy()
    output = task.step(student, batch)
    np.testing.assert_allclose(output.losses.detach(), expected, rtol=1e-10)
    output.losses.sum().backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_targets_keep_their_precision_beside_outputs_in_half_precision(dtype: torch.dtype) -> None:
    targets = torch.tensor([[100.3], [70_000.0]])
    output = RegressionTask().step(of(torch.zeros(2, 1, dtype=dtype)), batch_of(targets))
    assert torch.equal(output.losses, targets.square()[:, 0])
    chances = torch.full((2, 4), 0.3)
    output = MultiLabelTask().step(of(torch.zeros(2, 4, dtype=dtype)), batch_of(chances))
    assert torch.equal(output.losses, torch.full((2,), math.log(2)))


def test_another_teacher_is_another_task() -> None:
    teacher = make_model()
    other = make_model()
    assert DistillationTask(teacher).fingerprint() == DistillationTask(other).fingerprint()
    with torch.no_grad():
        other.layers[9].bias[0] += 1e-9
    assert DistillationTask(teacher).fingerprint() != DistillationTask(other).fingerprint()
    assert (
        DistillationTask(teacher).fingerprint()
        != DistillationTask(teacher, weight=0.1).fingerprint()
    )


@pytest.mark.parametrize(
    ("task", "outputs", "targets"),
    [
        (RegressionTask(), torch.zeros(6, 1), torch.zeros(6)),
        (MultiLabelTask(), torch.zeros(6, 4), torch.zeros(6)),
        (SegmentationTask(), torch.zeros(6, 4, 5, 5), torch.zeros(6, 4, 4, dtype=torch.int64)),
    ],
)
def test_other_shapes_are_named_with_both(task: Any, outputs: Tensor, targets: Tensor) -> None:
    with pytest.raises(ConfigError, match=r"the model returns float32 \[6, .* for targets"):
        task.step(of(outputs), batch_of(targets))


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        ((torch.zeros(6, 1), None), torch.zeros(6, 1)),
        (torch.zeros(6, 1), {"height": torch.zeros(6, 1)}),
        (torch.zeros(6, 1), ["a"] * 6),
    ],
)
def test_outputs_and_targets_that_are_no_tensors_are_named(outputs: Any, targets: Any) -> None:
    batch = Batch(torch.zeros(6), targets, torch.arange(6))
    with pytest.raises(ConfigError, match="an object of type .*both must have the same shape"):
        RegressionTask().step(of(outputs), batch)


@pytest.mark.parametrize("weights", [torch.ones(2), [1.0, 1.0]])
def test_class_weights_that_are_not_one_for_each_class_are_named(weights: Any) -> None:
    batch = Batch(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), torch.arange(4))
    with pytest.raises(ConfigError, match=r"class_weights are .* for logits float32 \[4, 3\]"):
        ClassificationTask(class_weights=weights).step(nn.Identity(), batch)


def test_numbers_to_predict_may_be_integers() -> None:
    layer = nn.Linear(2, 1)
    targets = torch.tensor([[3], [5]])
    batches = [
        Batch(torch.ones(2, 2), numbers, torch.arange(2)) for numbers in (targets, targets.float())
    ]
    losses = [RegressionTask().step(layer, batch).losses for batch in batches]
    assert torch.equal(*losses)
    losses[0].sum().backward()
    assert layer.weight.grad is not None


def test_other_class_weights_are_another_task() -> None:
    plain, even, other = (
        ClassificationTask(class_weights=weights)
        for weights in (None, torch.ones(3), torch.tensor([1.0, 1.0, 2.0]))
    )
    assert plain.fingerprint() == ""
    assert even.fingerprint() == ClassificationTask(class_weights=torch.ones(3)).fingerprint() != ""
    assert even.fingerprint() != other.fingerprint()
