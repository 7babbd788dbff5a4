"""Only the weights and one file beside the checkpoints grow with the number of classes.

Neither the other content of a checkpoint nor a row nor the result does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from accel_trainer import (
    BatchConfig,
    ClassificationTask,
    ConfusionMatrix,
    MeanLoss,
    RecipeConfig,
    RunConfig,
    RunResult,
    RuntimeConfig,
    TopKAccuracy,
    TrainerConfig,
    build_trainer,
    start_run,
)
from accel_trainer.callbacks.evaluation_file import EVALUATION_FILE, read_details
from accel_trainer.cli.main import main as command_line
from accel_trainer.core.errors import DataError
from accel_trainer.core.types import Batch, StepOutput
from accel_trainer.data.loader import EvalLoader
from accel_trainer.data.workers import SampleReader
from accel_trainer.training.evaluation.evaluation import run_evaluation
from accel_trainer.training.evaluation.evaluator import Evaluator
from accel_trainer.training.plain_values import plain_values

CPU = torch.device("cpu")
NUM_SAMPLES = 60


def samples_of(num_classes: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(num_classes, (NUM_SAMPLES,), generator=generator)
    return TensorDataset(torch.randn(NUM_SAMPLES, 3, generator=generator), labels)


def train(folder: Path, num_classes: int) -> RunResult:
    config = RecipeConfig(
        batch=BatchConfig(per_device_batch_size=20, eval_batch_size=25),
        trainer=TrainerConfig(num_epochs=2, ema_decay=0.9),
        runtime=RuntimeConfig(num_threads=1),
        run=RunConfig(output_dir=folder, quiet=True),
    )
    data = samples_of(num_classes)
    torch.manual_seed(0)
    with start_run(config, recipe="many") as run:
        metrics = [MeanLoss(), TopKAccuracy(), TopKAccuracy(5), ConfusionMatrix(num_classes)]
        return build_trainer(
            run,
            model=nn.Linear(3, num_classes),
            task=ClassificationTask(),
            train_set=data,
            eval_sets=data,
            metrics=metrics,
        ).fit()


def test_checkpoints_of_10000_classes_grow_by_the_weights_only(tmp_path: Path) -> None:
    sizes = {}
    for num_classes in (10_000, 1_000, 10):
        folder = tmp_path / str(num_classes)
        assert train(folder, num_classes).state == "done"
        checkpoint = max((folder / "checkpoints").glob("step-*"))
        sizes[num_classes] = (checkpoint / "trainer.json").stat().st_size
        assert not (checkpoint / "trainer.safetensors").exists()
        assert (folder / "result.json").stat().st_size < 50_000
        assert (folder / "metrics.jsonl").stat().st_size < 5_000
        before = (folder / "result.json").read_bytes(), (folder / EVALUATION_FILE).read_bytes()
        assert train(folder, num_classes).state == "done", "nothing is left to train"
        assert (
            (folder / "result.json").read_bytes(),
            (folder / EVALUATION_FILE).read_bytes(),
        ) == before
    assert max(sizes.values()) - min(sizes.values()) < 200


def test_a_kill_after_the_last_checkpoint_leaves_the_confusion_matrix(tmp_path: Path) -> None:
    train(tmp_path, 10)
    before = json.loads((tmp_path / "result.json").read_text())["metrics"]
    assert len(before["eval_ema/confusion_matrix"]) == 10
    (tmp_path / "result.json").unlink()
    train(tmp_path, 10)
    assert json.loads((tmp_path / "result.json").read_text())["metrics"] == before


def test_report_and_result_of_many_classes_name_the_evaluation_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    train(tmp_path / "run", 10_000)
    step, details = read_details(tmp_path / "run")
    assert step == 6
    pairs = details["eval/confused_pairs"]
    accuracy = details["eval/per_class_accuracy"]
    assert sum(count for _, _, count in pairs) == NUM_SAMPLES
    assert accuracy.shape == (10_000,)
    metrics = json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]
    assert metrics["eval/per_class_accuracy"] == {"file": EVALUATION_FILE, "shape": [10_000]}
    page = tmp_path / "report.html"
    assert command_line(["report", str(tmp_path / "run"), "--to", str(page)]) == 0
    assert "Most confused: true" in page.read_text()
    assert page.stat().st_size < 1_000_000


def measured(num_classes: int, logits: Tensor, labels: Tensor) -> dict[str, Any]:
    """As on two processes."""
    metric = ConfusionMatrix(num_classes).for_samples(len(labels))
    ids = torch.arange(len(labels))
    parts = []
    for part in (ids[::2], ids[1::2]):
        parts.append(metric.empty(CPU))
        output = StepOutput(torch.zeros(len(part)), logits[part])
        metric.update(parts[-1], Batch(None, labels[part], part), output)
    return plain_values(metric.compute(parts[0] + parts[1]))


@pytest.mark.parametrize("num_classes", [2, 256, 257, 1_000])
def test_a_confusion_matrix_counts_each_pair_of_label_and_prediction(num_classes: int) -> None:
    generator = torch.Generator().manual_seed(num_classes)
    logits = torch.randn(200, num_classes, generator=generator)
    labels = torch.randint(num_classes, (200,), generator=generator)
    labels[:20] = 1
    logits[:20, 1] = 9.0
    expected = torch.zeros(num_classes, num_classes, dtype=torch.int64)
    for label, prediction in zip(labels.tolist(), logits.argmax(1).tolist(), strict=True):
        expected[label, prediction] += 1
    found = measured(num_classes, logits, labels)
    if num_classes <= 256:
        matrix = torch.tensor(found["confusion_matrix"])
    else:
        matrix = torch.zeros_like(expected)
        for label, prediction, count in found["confused_pairs"]:
            matrix[label, prediction] = count
    assert torch.equal(matrix, expected)
    assert found["per_class_accuracy"][1] == expected[1, 1] / expected[1].sum()


def test_sums_of_a_confusion_matrix_are_a_number_per_sample() -> None:
    reader = SampleReader(samples_of(20_000), CPU)
    loader = EvalLoader(reader, batch_size=7, device=CPU)
    metrics = [ConfusionMatrix(20_000)]
    evaluator = Evaluator(
        loader, task=ClassificationTask(), metrics=metrics, accelerator=Accelerator(cpu=True)
    )
    assert evaluator.metrics[0].empty(CPU).numel() == NUM_SAMPLES
    found = run_evaluation(evaluator, nn.Linear(3, 20_000), Accelerator(cpu=True))
    assert sum(count for _, _, count in found["confused_pairs"]) == NUM_SAMPLES


def test_a_label_that_is_no_class_of_a_large_confusion_matrix_is_refused() -> None:
    for label in (-100, 300):
        with pytest.raises(DataError, match=rf"sample 0 has the target {label}.* 0 to 299"):
            measured(300, torch.zeros(4, 300), torch.tensor([label, 1, 1, 1]))
