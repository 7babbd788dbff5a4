"""Every number of a row is the number of its checkpoint, in a process that only loads it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from accel_trainer import (
    BatchConfig,
    CheckpointConfig,
    ClassificationTask,
    ConfusionMatrix,
    MeanLoss,
    Metric,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
    ScheduleConfig,
    TopKAccuracy,
    TorchMetric,
    Trainer,
    TrainerConfig,
    WholeSetMetric,
    build_trainer,
    start_run,
)

from .. import processes
from ..modules_with_modes import SIZE, ZOO
from ..variants import slow

NUM_SAMPLES = 53
DRAWN = torch.Generator().manual_seed(1)
ROWS = torch.randn(NUM_SAMPLES, SIZE, generator=DRAWN)
LABELS = (ROWS.sum(1) > 0).long()
DATA = TensorDataset(ROWS, LABELS)


class Zoo(nn.Module):
    """All modules that compute something when they are evaluated, a norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.Sequential(
            *(make() for make in ZOO), nn.BatchNorm1d(SIZE), nn.Dropout(0.1), nn.Linear(SIZE, 2)
        )

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows)


class Levit(nn.Module):
    """transformers' LeViT, whose attention keeps its biases in evaluation until `train()`."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LevitConfig, LevitForImageClassification

        torch.manual_seed(2)
        down = [["Subsample", 4, 4, 2, 2, 2]] * 2
        config = LevitConfig(
            image_size=32,
            hidden_sizes=[16, 24, 32],
            num_attention_heads=[2, 2, 2],
            depths=[1, 1, 1],
            key_dim=[4, 4, 4],
            drop_path_rate=0,
            mlp_ratio=[2, 2, 2],
            attention_ratio=[2, 2, 2],
            num_labels=2,
            down_ops=down,
        )
        self.net = LevitForImageClassification(config)
        for name, parameter in self.net.named_parameters():
            if "attention_biases" in name:
                parameter.data.normal_()
            if "batch_norm.weight" in name:
                parameter.data.fill_(1)

    def forward(self, rows: Tensor) -> Tensor:
        images = rows.repeat(1, 3 * 32 * 32 // SIZE).view(-1, 3, 32, 32)
        return self.net(pixel_values=images).logits


def margin(outputs: Tensor, labels: Tensor) -> dict[str, float]:
    sides = outputs[:, 1] - outputs[:, 0]
    return {"margin": float(sides[labels == 1].mean() - sides[labels == 0].mean())}


def metrics() -> list[Metric]:
    found: list[Metric] = [MeanLoss(), TopKAccuracy(), ConfusionMatrix(2)]
    found.append(WholeSetMetric(margin, num_outputs=2))
    try:
        from torchmetrics import MetricCollection
        from torchmetrics.classification import (
            BinaryAccuracy,
            BinaryAUROC,
            MulticlassAUROC,
            MulticlassF1Score,
        )
    except ImportError:
        return found

    def one(batch: Any, output: Any) -> tuple[Tensor, Tensor]:
        return output.outputs[:, 1], batch.targets

    several = MetricCollection([MulticlassF1Score(2), MulticlassAUROC(2, thresholds=30)])
    found.append(TorchMetric("all", several))
    found.append(TorchMetric("hits", BinaryAccuracy(), one))
    return [*found, TorchMetric("area", BinaryAUROC(thresholds=30), one)]


def with_trainer(
    folder: Path,
    make: Callable[[], nn.Module],
    use: Callable[[Trainer], Any],
    *,
    eval_batch_size: int,
    resume: str = "auto",
) -> Any:
    config = RecipeConfig(
        batch=BatchConfig(global_batch_size=8, eval_batch_size=eval_batch_size),
        trainer=TrainerConfig(num_epochs=2, evaluate_every="3steps", ema_decay=0.8),
        checkpoint=CheckpointConfig(every_n_steps=1, keep_last_n=50),
        optimizer=OptimizerConfig(name="adamw", learning_rate=0.02),
        schedule=ScheduleConfig(shape="constant"),
        run=RunConfig(output_dir=folder, resume=resume, quiet=True),
    )
    with start_run(config, recipe="numbers") as run:
        trainer = build_trainer(
            run,
            model=make(),
            task=ClassificationTask(),
            train_set=DATA,
            eval_sets=DATA,
            metrics=metrics(),
        )
        return use(trainer)


def evaluate_again(folder: Path, make: Callable[[], nn.Module], name: str, size: int) -> None:
    """Write what a new process measures of a checkpoint."""
    checkpoint = folder / "run" / "checkpoints" / name
    found = with_trainer(
        folder / f"again-{name}",
        make,
        Trainer.evaluate,
        eval_batch_size=size,
        resume=str(checkpoint),
    )
    plain = {key: value for key, value in found.items() if isinstance(value, float)}
    (folder / f"{name}.json").write_text(json.dumps(plain))


def numbers_of_rows(run: Path) -> dict[int, dict[str, float]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {
        row["optimizer_step"]: {key: value for key, value in row.items() if key[:4] == "eval"}
        for row in rows
        if row["event"] == "eval"
    }


@pytest.mark.parametrize(
    ("make", "num_processes"), [(Zoo, None), *slow([(Zoo, 1), (Levit, 1), (Levit, 2), (Zoo, 2)])]
)
def test_a_new_process_measures_of_each_checkpoint_what_its_row_says(
    tmp_path: Path, make: Callable[[], nn.Module], num_processes: int | None
) -> None:
    """None: the objects are new, in the same process."""
    if make is Levit:
        pytest.importorskip("transformers")

    def call(function: Callable[..., None], *arguments: Any) -> None:
        if num_processes is None:
            function(*arguments)
        else:
            folder = tmp_path / "logs"
            processes.run(function, *arguments, num_processes=num_processes, folder=folder)

    size = random.Random(num_processes).randrange(3, 20)
    call(train, tmp_path, make, size)
    rows = numbers_of_rows(tmp_path / "run")
    assert len(rows) > 4
    for step, expected in rows.items():
        found = sorted((tmp_path / "run" / "checkpoints").glob(f"step-{step:010d}-*"))
        for checkpoint in found:
            call(evaluate_again, tmp_path, make, checkpoint.name, size)
            again = json.loads((tmp_path / f"{checkpoint.name}.json").read_text())
            assert {key: again[key] for key in expected} == expected, checkpoint.name
            assert any(key.startswith("eval_ema/") for key in expected)


def train(folder: Path, make: Callable[[], nn.Module], size: int) -> None:
    with_trainer(folder / "run", make, Trainer.fit, eval_batch_size=size)
