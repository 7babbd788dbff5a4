"""Mistakes that people make in code of their own: a small recipe, and parts of it that are
wrong."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from accel_trainer import (
    Batch,
    Callback,
    ClassificationTask,
    MeanLoss,
    RecipeConfig,
    RunResult,
    StepOutput,
    TopKAccuracy,
    Trainer,
    build_trainer,
    start_run,
)
from accel_trainer.core.types import StepBatch, StepReport
from accel_trainer.training.callback import TrainerView

INPUTS = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(24) % 3
DATA = TensorDataset(INPUTS, LABELS)
ROWS = {"features": INPUTS.tolist(), "label": LABELS.tolist()}


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def train(config: RecipeConfig, **changes: Any) -> RunResult:
    """Train a small net for two epochs; `changes` replace its parts."""
    parts = {
        "model": make_net(),
        "task": ClassificationTask(),
        "train_set": DATA,
        "eval_sets": DATA,
        "metrics": [MeanLoss(), TopKAccuracy()],
    }
    with start_run(config, recipe="mistakes") as run:
        return build_trainer(run, **(parts | changes)).fit()


# --- recipes ---


class ReturnsNoReport(Trainer):
    def train_step(self, step_batch: StepBatch) -> StepReport:
        super().train_step(step_batch)
        return None  # type: ignore[return-value]


def trains_after_the_run(config: RecipeConfig) -> RunResult:
    with start_run(config, recipe="mistakes") as run:
        trainer = build_trainer(
            run, model=make_net(), task=ClassificationTask(), train_set=DATA, eval_sets=DATA
        )
    return trainer.fit()


def forgets_with(config: RecipeConfig) -> RunResult:
    run: Any = start_run(config, recipe="mistakes")
    return build_trainer(
        run, model=make_net(), task=ClassificationTask(), train_set=DATA, eval_sets=DATA
    ).fit()


def misspells_a_name(config: RecipeConfig) -> RunResult:
    return train(config, model=nn.Linear(6, num_clases))  # noqa: F821


def misspells_a_setting(config: RecipeConfig) -> RunResult:
    return train(config, model=nn.Linear(6, config.trainer.classes))


def misspells_an_argument(config: RecipeConfig) -> RunResult:
    return train(config, modle=make_net())


def opens_a_missing_file(config: RecipeConfig) -> RunResult:
    return train(config, model=torch.load(Path("weights.pt")))


def forgets_to_return(config: RecipeConfig) -> None:
    train(config)


def asserts(config: RecipeConfig) -> RunResult:
    assert config.seed == 1, "this recipe needs seed 1"
    return train(config)


def wraps_an_error_of_its_own(config: RecipeConfig) -> RunResult:
    try:
        return misspells_a_name(config)
    except NameError as error:
        raise RuntimeError("the net cannot be built") from error


# --- tasks ---


class ReturnsATensor(ClassificationTask):
    def step(self, model: nn.Module, batch: Batch) -> Any:
        return F.cross_entropy(model(batch.inputs), batch.targets)


class ReturnsALossDict(ClassificationTask):
    def step(self, model: nn.Module, batch: Batch) -> Any:
        return {"loss": F.cross_entropy(model(batch.inputs), batch.targets)}


class ReturnsAMeanLoss(ClassificationTask):
    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return StepOutput(F.cross_entropy(model(batch.inputs), batch.targets))


class OverridesTrainStep(ClassificationTask):
    """Would train with the cross-entropy."""

    def train_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        raise AssertionError("nothing calls it")


class HasANumberAsStep:
    step = 0


class DetachesItsLoss(ClassificationTask):
    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return StepOutput(super().step(model, batch).losses.detach())


class KeepsItsGraph(ClassificationTask):
    """Adds up the losses of all steps, with their graphs."""

    total: Any = 0

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        self.total = self.total + super().step(model, batch).losses
        return StepOutput(self.total)


class MisspellsTargets(ClassificationTask):
    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return StepOutput(F.cross_entropy(model(batch.inputs), batch.target, reduction="none"))  # type: ignore[attr-defined]


class EvaluatesToATensor(ClassificationTask):
    def eval_step(self, model: nn.Module, batch: Batch) -> Any:
        return F.cross_entropy(model(batch.inputs), batch.targets, reduction="none")


class FailsInEvaluation(ClassificationTask):
    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        raise KeyError("logits")


class AssignsToTheBatch(ClassificationTask):
    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        batch.position = 0  # type: ignore[misc, assignment]
        return super().step(model, batch)


class HasNoItems(ClassificationTask):
    """Trains on nothing."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return StepOutput.from_mean(super().step(model, batch).losses.mean(), num_items=0)

    eval_step = step


class FailsInFingerprint(ClassificationTask):
    def fingerprint(self) -> str:
        return self.weights  # type: ignore[attr-defined, no-any-return]


# --- models ---


class MisspellsALayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.layr(rows)  # type: ignore[no-any-return, operator]


class FeedsALayerTheWrongShape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.layer(rows[:, :5])  # type: ignore[no-any-return]


class ForgetsSuper(nn.Module):
    def __init__(self) -> None:
        self.layer = nn.Linear(6, 3)


class ChangesAnActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, rows: Tensor) -> Tensor:
        activation = self.layer(rows).sigmoid()
        scaled = activation * 2
        activation += 1
        return scaled  # type: ignore[no-any-return]


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.scale  # type: ignore[no-any-return]


class HasABadBackward(nn.Linear):
    def forward(self, rows: Tensor) -> Tensor:
        return FailsInBackward.apply(super().forward(rows))  # type: ignore[no-any-return, no-untyped-call]


class CallsItself(nn.Linear):
    def forward(self, rows: Tensor) -> Tensor:
        return self.forward(rows)


# --- metrics and callbacks ---


class WithoutItsKey(MeanLoss):
    def compute(self, sums: Tensor) -> dict[str, Any]:
        return {"los": super().compute(sums)["loss"]}


class FailsInUpdate(MeanLoss):
    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        sums += output.logits.sum()  # type: ignore[attr-defined]


class FailsInCompute(MeanLoss):
    def compute(self, sums: Tensor) -> dict[str, Any]:
        return {"loss": 1 / 0}


class FailsInEmpty(MeanLoss):
    def empty(self, device: torch.device) -> Tensor:
        return torch.zeros(self.size)  # type: ignore[attr-defined, no-any-return]


class ReturnsANumber(MeanLoss):
    def compute(self, sums: Tensor) -> Any:
        return 0.5


class NotAMetric:
    higher_is_better: Mapping[str, bool] = {}


class FailsAtStart(Callback):
    def on_fit_start(self, trainer: TrainerView) -> None:
        self.scheduler.reset()  # type: ignore[attr-defined]


class FailsAtStep(Callback):
    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        print(f"{report.loss:.3f}")  # type: ignore[attr-defined]


class FailsInState(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}  # type: ignore[attr-defined]


class FailsOnTheLastProcess(Callback):
    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        1 / (trainer.accelerator.process_index - trainer.accelerator.num_processes + 1)


class NamesNoHook(Callback):
    """Nothing would call it, and nothing would say so."""

    def on_step_ends(self, trainer: TrainerView, report: StepReport) -> None:
        raise AssertionError("nothing calls it")


class ForgetsToReturnItsState(Callback):
    """A resume would forget the steps that it has seen."""

    seen = 0

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        self.seen += 1

    def state_dict(self) -> Any:
        dict(seen=self.seen)


class AssignsToTheTrainer(Callback):
    def __init__(self, name: str) -> None:
        self.name = name

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        setattr(trainer, self.name, {})


class OfAnotherToolkit:
    def on_train_batch_end(self) -> None: ...


# --- optimizers and schedules ---


def fails_to_build(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), learning_rate=0.1)  # type: ignore[call-arg]


class FailsToStep(SGD):
    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["rate"] *= 0.5


def fails_to_step(model: nn.Module) -> Optimizer:
    return FailsToStep(model.parameters(), lr=0.1)


def fails_later(step: int) -> float:
    return 0.1 if step in (0, 5) else 0.1 / (step - 3)


def forgets_a_step(step: int) -> Any:
    return 0.1 if step in (0, 5) else None


# --- data ---


class NamesAreStrings(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        return INPUTS[index], "abc"[index % 3]


class MisspellsAColumn(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.input[index], LABELS[index]


class IsNotThere(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return Image.open(f"/nonexistent/{index}.png"), 0


class HasNoLength(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return INPUTS[index], LABELS[index]


class HasNoPlan:
    def step_batches(self, epoch: int, first_step: int) -> Iterator[Any]:
        raise AssertionError("nothing calls it")


class Streams(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(INPUTS, LABELS, strict=True))


class YieldsPhotos(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return Image.new("RGB", (4, 4)), index % 3


def collates_wrongly(samples: list[Any]) -> Any:
    return default_collate(samples)["input"]


def table() -> datasets.Dataset:
    return datasets.Dataset.from_dict(ROWS).with_format("torch")


def stream_of_rows() -> datasets.IterableDataset:
    return table().to_iterable_dataset()


def batches() -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=4)


def numbers() -> np.ndarray[Any, Any]:
    return np.array(list(itertools.chain(range(24))))
