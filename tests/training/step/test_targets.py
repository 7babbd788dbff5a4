"""Targets that mean "no label" count nowhere; targets that no loss can use are refused by id."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from sklearn import metrics as sklearn_metrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset, TensorDataset

from accel_trainer import (
    Batch,
    BatchConfig,
    ClassificationConfig,
    ClassificationTask,
    ConfigError,
    ConfusionMatrix,
    DatasetOptions,
    MeanLoss,
    MeanNumber,
    MultiLabelTask,
    OptimizerConfig,
    RecipeConfig,
    RegressionTask,
    RunConfig,
    ScheduleConfig,
    StepOutput,
    TopKAccuracy,
    TorchMetric,
    TrainerConfig,
    WholeSetMetric,
    build_trainer,
    start_run,
)
from accel_trainer.core.errors import DataError
from accel_trainer.core.rng import epoch_permutation
from accel_trainer.data.loader import EvalLoader
from accel_trainer.data.workers import SampleReader
from accel_trainer.training.evaluation.evaluation import run_evaluation
from accel_trainer.training.evaluation.evaluator import Evaluator
from accel_trainer.vision import SegmentationTask, WorstMistakes
from recipes.distill import DistillationTask

from ... import processes

CPU = torch.device("cpu")
NUM_CLASSES = 4


class Given(nn.Module):
    """Returns its inputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


def batch_of(inputs: Tensor, targets: Tensor, ids: Tensor | None = None) -> Batch:
    return Batch(inputs, targets, torch.arange(len(targets)) if ids is None else ids)


def mean_in_parts(task: Any, inputs: Tensor, targets: Tensor, sizes: list[int]) -> Tensor:
    """Return the loss of a step whose micro-batches have `sizes`, as the engine divides it."""
    outputs = [
        task.step(Given(), batch_of(*part))
        for part in zip(inputs.split(sizes), targets.split(sizes), strict=True)
    ]
    counts = [len(each.losses) if each.num_items is None else each.num_items for each in outputs]
    total = sum(count if isinstance(count, int) else count.sum() for count in counts)
    return sum(each.losses.sum() for each in outputs) / total  # type: ignore[no-any-return]


def random_sizes(num: int, generator: torch.Generator) -> list[int]:
    cuts = sorted(torch.randint(num + 1, (3,), generator=generator).tolist())
    return [end - start for start, end in itertools.pairwise([0, *cuts, num])]


def test_a_step_is_torchs_cross_entropy_for_any_split_of_it() -> None:
    all_weights = (None, torch.tensor([1.0, 5.0, 0.25, 2.0]), torch.tensor([100, 500, 25, 0]))
    cases = itertools.product((None, -100, -1, 2, 255), all_weights, (0.0, 0.2))
    for seed, (ignored, weights, smoothing) in enumerate(cases):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(23, NUM_CLASSES, dtype=torch.float64, generator=generator)
        logits.requires_grad_()
        labels = torch.randint(NUM_CLASSES, (23,), generator=generator)
        if ignored is not None:
            labels[torch.rand(23, generator=generator) < 0.4] = ignored
        if ignored == 255:
            labels = labels.to(torch.uint8)
        weight = None if weights is None else weights.double()
        kept = -100 if ignored is None else ignored
        expected = F.cross_entropy(
            logits, labels.long(), weight, ignore_index=kept, label_smoothing=smoothing
        )
        task = ClassificationTask(
            ClassificationConfig(label_smoothing=smoothing, train_accuracy=True),
            class_weights=weights,
            ignore_index=ignored,
        )
        found = mean_in_parts(task, logits, labels, random_sizes(23, generator))
        assert found.item() == pytest.approx(expected.item(), rel=1e-12), (ignored, weights)
        gradients = [torch.autograd.grad(each, logits)[0] for each in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


def test_soft_targets_with_class_weights_are_torchs_too() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, noise = (torch.randn(9, 3, generator=generator).double() for _ in range(2))
    targets, weights = noise.softmax(1), torch.tensor([1.0, 4.0, 0.5])
    found = mean_in_parts(
        ClassificationTask(class_weights=weights, ignore_index=-100), logits, targets, [4, 0, 5]
    )
    expected = F.cross_entropy(logits, targets, weights.double())
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)


def test_pixels_without_a_label_are_torchs_too() -> None:
    for seed, ignored in enumerate((255, -100, 0)):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(7, 3, 5, 4, generator=generator).double()
        targets = torch.randint(3, (7, 5, 4), generator=generator)
        targets[torch.rand(7, 5, 4, generator=generator) < 0.3] = ignored
        targets[2] = ignored
        found = mean_in_parts(
            SegmentationTask(ignored=ignored), logits, targets, random_sizes(7, generator)
        )
        expected = F.cross_entropy(logits, targets, ignore_index=ignored)
        assert found.item() == pytest.approx(expected.item(), rel=1e-12)


def test_train_accuracy_leaves_out_what_is_ignored() -> None:
    logits = torch.eye(3)[[0, 1, 2, 0]]
    task = ClassificationTask(ClassificationConfig(train_accuracy=True, ignore_index=-1))
    output = task.step(Given(), batch_of(logits, torch.tensor([0, 2, -1, -1])))
    assert output.num_items is not None
    assert output.numbers["accuracy"].sum() / output.num_items.sum() == 0.5


@pytest.mark.parametrize("weights", [None, torch.tensor([1.0, 3.0, 0.5, 0.0])])
def test_distillation_leaves_ignored_samples_out_twice(weights: Tensor | None) -> None:
    teacher = nn.Linear(NUM_CLASSES, NUM_CLASSES).double()
    inputs = torch.randn(12, NUM_CLASSES).double()
    labels = torch.arange(12) % NUM_CLASSES
    keep = torch.rand(12) < 0.6
    keep[:4] = True
    labels_task = ClassificationTask(ignore_index=-100, class_weights=weights)
    task = DistillationTask(teacher, labels=labels_task)
    ignoring = labels.masked_fill(~keep, -100)
    found = mean_in_parts(task, inputs, ignoring, [5, 7])
    assert found.item() == pytest.approx(
        mean_in_parts(task, inputs[keep], labels[keep], [int(keep.sum())]).item(), rel=1e-12
    )
    fingerprints = {
        each.fingerprint()
        for each in (task, DistillationTask(teacher, labels=ClassificationTask()))
    }
    assert len(fingerprints) == 2


# --- metrics ---


class Counted(MeanLoss):
    """A metric of one's own, as people write them: it knows nothing of ignored samples."""

    higher_is_better = {"mean_confidence": False}  # noqa: RUF012

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        sums[0] += output.outputs.softmax(1).amax(1).sum()
        sums[1] += len(batch)

    def compute(self, sums: Tensor) -> dict[str, Any]:
        return {"mean_confidence": float(sums[0] / sums[1])}


class Pictures:
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples


class WithNumber(ClassificationTask):
    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().eval_step(model, batch)
        counts = 1 if output.num_items is None else output.num_items
        return output._replace(numbers={"margin": output.outputs.amax(1) * counts})


def macro_f1(logits: Tensor, labels: Tensor) -> dict[str, float]:
    predicted = logits.argmax(1)
    return {"f1": float(sklearn_metrics.f1_score(labels, predicted, average="macro"))}


def measure(logits: Tensor, labels: Tensor, batch_size: int = 7) -> dict[str, Any]:
    torchmetrics = pytest.importorskip("torchmetrics").classification
    metrics = [
        MeanLoss(),
        TopKAccuracy(),
        TopKAccuracy(2),
        ConfusionMatrix(NUM_CLASSES),
        MeanNumber("margin"),
        WholeSetMetric(macro_f1, num_outputs=NUM_CLASSES),
        TorchMetric("recall", torchmetrics.MulticlassRecall(NUM_CLASSES)),
        Counted(),
        WorstMistakes(Path(), Pictures(len(labels)), ()),  # type: ignore[arg-type]
    ]
    reader = SampleReader(TensorDataset(logits, labels), CPU)
    loader = EvalLoader(reader, batch_size=batch_size, device=CPU)
    evaluator = Evaluator(
        loader,
        task=WithNumber(ignore_index=-100),
        metrics=metrics,
        accelerator=Accelerator(cpu=True),
    )
    found = run_evaluation(evaluator, Given(), Accelerator(cpu=True))
    for sample in found["worst_mistakes"] + found["predictions"]:
        sample.pop("id", None)  # some are in both
    return found


def test_every_metric_measures_what_has_a_label() -> None:
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(60, NUM_CLASSES, generator=generator)
        labels = torch.randint(NUM_CLASSES, (60,), generator=generator)
        keep = torch.rand(60, generator=generator) < (0.1, 0.5, 0.9)[seed % 3]
        keep[10:17] = False  # a whole batch
        found = measure(logits, labels.masked_fill(~keep, -100))
        expected = measure(logits[keep], labels[keep])
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, float):
                value = pytest.approx(value, rel=1e-6)
            assert found[name] == value, name
        predicted = logits[keep].argmax(1)
        accuracy = sklearn_metrics.accuracy_score(labels[keep], predicted)
        assert found["accuracy"] == pytest.approx(accuracy)
        matrix = sklearn_metrics.confusion_matrix(
            labels[keep], predicted, labels=range(NUM_CLASSES)
        )
        assert np.array_equal(found["confusion_matrix"], matrix)
        loss = F.cross_entropy(logits[keep], labels[keep]).item()
        assert found["loss"] == pytest.approx(loss, rel=1e-6)


def test_an_evaluation_in_which_nothing_has_a_label_is_refused() -> None:
    with pytest.raises(ConfigError, match="NUM_ITEMS.*no sample of an evaluation set counts"):
        measure(torch.randn(9, NUM_CLASSES), torch.full((9,), -100))


# --- targets that are refused ---


def bad_targets(num: int = 30) -> Iterator[tuple[Any, Tensor, Tensor, int, float]]:
    """Yield a task, inputs, targets, and the place and the value of the target that is wrong."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num, 3, generator=generator)
    labels = torch.arange(num) % 3
    hot = F.one_hot(labels, 3).float()
    ignoring = ClassificationTask(ignore_index=-1)
    cases = [
        *((ClassificationTask(), inputs, labels, value) for value in (-100, -1, 3, 255, -(2**40))),
        *((ignoring, inputs, labels.where(labels > 0, -1), value) for value in (-100, -2, 3)),
        *((ClassificationTask(), inputs, hot, value) for value in (math.nan, math.inf, -0.5)),
        *((MultiLabelTask(), inputs, hot, value) for value in (-1.0, math.nan, 2.0, -math.inf)),
        (MultiLabelTask(), inputs, hot.long(), -1),
        *((RegressionTask(), inputs, hot, value) for value in (math.nan, math.inf, -math.inf)),
        (RegressionTask(), inputs[:, 0], hot[:, 0], math.nan),
        (DistillationTask(nn.Linear(3, 3)), inputs, labels, -100),
    ]
    for number, (task, given, targets, value) in enumerate(cases):
        place = (number * 7 + 3) % num
        changed = targets.clone()
        changed.view(num, -1)[place, -1] = value
        yield task, given, changed, place, value


def test_a_target_that_no_loss_can_use_is_refused_by_its_id() -> None:
    for task, inputs, targets, place, value in bad_targets():
        ids = torch.arange(len(inputs)) + 1000
        for step in (task.step, getattr(task, "eval_step", task.step)):
            with pytest.raises(DataError, match=r"DATA_LABEL") as caught:
                step(Given(), batch_of(inputs, targets, ids))
            assert f"sample {place + 1000} " in str(caught.value), value
            assert f"target {value}," in str(caught.value)
            is_classes = targets.ndim == 1 and not isinstance(task, RegressionTask)
            assert (f"ignore_index={value}" in str(caught.value)) == is_classes


def test_a_pixel_that_is_no_class_is_refused() -> None:
    for value, ignored in ((-100, 255), (3, 255), (255, -100)):
        targets = torch.zeros(4, 5, 5, dtype=torch.int64)
        targets[0] = ignored
        targets[2, 3, 1] = value
        with pytest.raises(DataError, match=f"sample 2 has the target {value}, .*ignored={value}"):
            SegmentationTask(ignored=ignored).step(
                Given(), batch_of(torch.zeros(4, 3, 5, 5), targets)
            )


class OwnTask:
    """Ignores -100 in its loss, as torch does by default, and counts no items."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(batch.inputs)
        return StepOutput(F.cross_entropy(logits, batch.targets, reduction="none"), logits)


@pytest.mark.parametrize("metric", [TopKAccuracy(), TopKAccuracy(2), ConfusionMatrix(3)])
def test_a_metric_refuses_labels_that_the_task_has_not_left_out(metric: Any) -> None:
    data = TensorDataset(torch.randn(6, 3), torch.tensor([0, 1, 2, 0, -100, 1]))
    loader = EvalLoader(SampleReader(data, CPU), batch_size=4, device=CPU)
    evaluator = Evaluator(
        loader, task=OwnTask(), metrics=[metric], accelerator=Accelerator(cpu=True)
    )
    with pytest.raises(ConfigError, match=r"sample 4 has the target -100, .*ignore_index=-100"):
        run_evaluation(evaluator, Given(), Accelerator(cpu=True))


@pytest.mark.parametrize(
    "weights", [torch.zeros(3), torch.tensor([1.0, -1, 2]), torch.tensor([1.0, math.nan, 2])]
)
def test_class_weights_that_are_negative_nan_or_0_are_refused(weights: Tensor) -> None:
    with pytest.raises(ConfigError, match="class_weights range from .*: use finite weights of 0"):
        ClassificationTask(class_weights=weights)


def test_two_different_ignored_labels_are_refused() -> None:
    config = ClassificationConfig(ignore_index=-1)
    assert ClassificationTask(config, ignore_index=-1).fingerprint() != ""
    with pytest.raises(ConfigError, match="two values of ignore_index"):
        ClassificationTask(config, ignore_index=-100)


# --- whole runs ---


def make_config(folder: Path, **batch: Any) -> RecipeConfig:
    return RecipeConfig(
        batch=BatchConfig(**({"per_device_batch_size": 8} | batch)),
        trainer=TrainerConfig(num_epochs=2, log_every_n_steps=1),
        optimizer=OptimizerConfig(
            learning_rate=0.1, momentum=0.0, nesterov=False, weight_decay=0.0
        ),
        schedule=ScheduleConfig(shape="constant", warmup_epochs=0),
        run=RunConfig(output_dir=folder, quiet=True),
    )


def train(config: RecipeConfig, train_set: Any, eval_sets: Any, **parts: Any) -> Any:
    torch.manual_seed(0)
    parts = {"model": nn.Linear(5, 3), "task": ClassificationTask(), **parts}
    with start_run(config, recipe="targets") as run:
        return build_trainer(run, train_set=train_set, eval_sets=eval_sets, **parts).fit()


INPUTS = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(40) % 3
GOOD = TensorDataset(INPUTS, LABELS)


class WithTargets(Dataset[Any]):
    """Has its labels at hand, as torchvision's datasets do; what it gives may be another number."""

    def __init__(self, labels: Tensor, shift: int = 0) -> None:
        self.targets = labels.tolist()
        self.shift = shift

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return INPUTS[index], self.targets[index] - self.shift


class Unlabelled(WithTargets):
    """The same without labels at hand."""

    def __init__(self, labels: Tensor) -> None:
        super().__init__(labels)
        self.found = self.targets
        del self.targets

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return INPUTS[index], self.found[index]


def as_table(labels: Tensor) -> Any:
    datasets = pytest.importorskip("datasets")
    rows = {"features": INPUTS.tolist(), "label": labels.tolist()}
    return datasets.Dataset.from_dict(rows).with_format("torch")


def test_bad_labels_at_hand_are_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    options = DatasetOptions(columns=("features", "label"))
    number = 0
    for value, place in ((-100, 39), (3, 17), (-1, 5)):
        labels = LABELS.clone()
        labels[place] = value
        kinds: list[tuple[Any, Any, dict[str, Any]]] = [
            (TensorDataset(INPUTS, labels), GOOD, {}),
            (Subset(TensorDataset(INPUTS, labels), range(40)), GOOD, {}),
            (WithTargets(labels), GOOD, {}),
            (GOOD, WithTargets(labels), {}),
            (as_table(labels), as_table(LABELS), {"options": options}),
        ]
        for train_set, eval_set, parts in kinds:
            number += 1
            config = make_config(tmp_path / str(number), eval_batch_size=4)
            with pytest.raises(DataError, match=rf"sample {place} has the target {value}, "):
                train(config, train_set, eval_set, **parts)
            assert not list(tmp_path.glob(f"{number}/checkpoints/step-*"))
            assert "train" not in (tmp_path / str(number) / "metrics.jsonl").read_text()


def test_a_label_that_is_not_at_hand_is_refused_in_its_batch(tmp_path: Path) -> None:
    labels = LABELS.clone()
    labels[31] = -100
    with pytest.raises(DataError, match="sample 31 has the target -100, "):
        train(make_config(tmp_path), Unlabelled(labels), GOOD)


def test_labels_that_the_dataset_itself_changes_are_no_mistake(tmp_path: Path) -> None:
    result = train(make_config(tmp_path), WithTargets(LABELS + 1, shift=1), GOOD)
    assert result.state == "done"


def test_samples_that_are_left_out_may_have_any_label(tmp_path: Path) -> None:
    labels = LABELS.clone()
    labels[[3, 30]] = -100
    listed = tmp_path / "out.txt"
    listed.write_text("3\n30\n")
    config = make_config(tmp_path / "run", leave_out=listed)
    assert train(config, TensorDataset(INPUTS, labels), GOOD).state == "done"


def test_a_training_set_without_labels_is_refused_after_an_epoch(tmp_path: Path) -> None:
    nothing = TensorDataset(INPUTS, torch.full((40,), -100))
    with pytest.raises(DataError, match="NUM_ITEMS.*no sample of the training set counts"):
        train(make_config(tmp_path), nothing, GOOD, task=ClassificationTask(ignore_index=-100))


HALF = LABELS.clone()
HALF[::2] = -100
HALF[torch.arange(40) % 7 == 0] = -100
WEIGHTS = torch.tensor([1.0, 3.0, 0.5])


def train_half(folder: Path, micro: int, reduce: str) -> None:
    config = make_config(folder, per_device_batch_size=micro, global_batch_size=16, reduce=reduce)
    data = TensorDataset(INPUTS.double(), HALF)
    options = ClassificationConfig(ignore_index=-100, label_smoothing=0.1)
    task = ClassificationTask(options, class_weights=WEIGHTS)
    torch.manual_seed(0)
    train(config, data, data, model=nn.Linear(5, 3, dtype=torch.float64), task=task)


def train_half_by_hand() -> Tensor:
    """Return the weights after torch's own cross-entropy of whole steps of 16."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3, dtype=torch.float64)
    for epoch in range(2):
        for ids in epoch_permutation(40, seed=0, epoch=epoch).split(16):
            loss = F.cross_entropy(
                model(INPUTS[ids].double()),
                HALF[ids],
                WEIGHTS.double(),
                ignore_index=-100,
                label_smoothing=0.1,
            )
            gradients = torch.autograd.grad(loss, [*model.parameters()])
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.data.sub_(0.1 * gradient)
    return model.weight.detach()


@pytest.mark.parametrize(("num_processes", "micro", "reduce"), [(2, 3, "float"), (2, 4, "exact")])
def test_ignored_samples_train_as_in_torch_on_any_processes(
    tmp_path: Path, num_processes: int, micro: int, reduce: str
) -> None:
    folder = tmp_path / "run"
    processes.run(
        train_half, folder, micro, reduce, num_processes=num_processes, folder=tmp_path / "logs"
    )
    checkpoint = max((folder / "checkpoints").glob("step-*"))
    found = load_file(checkpoint / "model.safetensors")["weight"]
    torch.testing.assert_close(found, train_half_by_hand(), rtol=1e-10, atol=1e-12)


def test_the_weights_after_a_step_are_torchs(tmp_path: Path) -> None:
    labels = LABELS.clone()
    labels[::2] = -100
    model = nn.Linear(5, 3)
    plain = nn.Linear(5, 3)
    plain.load_state_dict(model.state_dict())
    config = make_config(tmp_path, per_device_batch_size=10, global_batch_size=40)
    config = replace(config, trainer=replace(config.trainer, max_steps=1))
    task = ClassificationTask(ignore_index=-100)
    train(config, TensorDataset(INPUTS, labels), GOOD, model=model, task=task)
    loss = F.cross_entropy(plain(INPUTS), labels, ignore_index=-100)
    loss.backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(mine, theirs - 0.1 * theirs.grad, rtol=1e-5, atol=1e-7)
