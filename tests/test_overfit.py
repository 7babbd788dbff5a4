"""`--overfit N`: a few batches learnt by heart, or what to suspect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import TensorDataset

from accel_trainer import (
    BatchConfig,
    ClassificationConfig,
    ClassificationTask,
    MeanLoss,
    RecipeConfig,
    RunResult,
    TopKAccuracy,
    build_dataset_loaders,
    build_trainer,
    main,
    start_run,
)
from accel_trainer.callbacks.overfit import FewWindows
from recipes import cifar
from tests import processes, workload
from tests.test_exactness import final_files


def make_config(folder: Path, *, num_batches: int = 2, epochs: int = 40) -> RecipeConfig:
    config = workload.make_config(folder)
    trainer = replace(config.trainer, num_epochs=epochs, ema_decay=None, evaluate_every_n_epochs=100)
    batch = BatchConfig(global_batch_size=16, per_device_batch_size=16, overfit=num_batches)
    return replace(config, trainer=trainer, batch=batch)


def train(
    config: RecipeConfig,
    *,
    change: Callable[[torch.Tensor, torch.Tensor], None] = lambda inputs, labels: None,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    dropout: float = 0.0,
    task: ClassificationTask | None = None,
) -> RunResult:
    """Train on points whose label is a linear function of them; `change` and `prepare` make a mistake."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(80, 6, generator=generator)
    labels = (inputs @ torch.randn(6, 3, generator=generator)).argmax(1)
    change(inputs, labels)
    data = TensorDataset(inputs, labels)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 3))
    prepare(model)
    with start_run(config, recipe="overfit") as run:
        loader, eval_loader = build_dataset_loaders(
            data, data, run.config.batch, seed=config.seed, accelerator=run.accelerator
        )
        return build_trainer(
            run, model=model, task=task or ClassificationTask(), loader=loader, eval_loader=eval_loader,
            metrics=[MeanLoss(), TopKAccuracy()],
        ).fit()  # fmt: skip


def test_the_first_windows_come_again_in_every_epoch_and_can_be_sought() -> None:
    data = TensorDataset(torch.arange(40.0)[:, None], torch.zeros(40, dtype=torch.int64))
    batch = BatchConfig(global_batch_size=8, per_device_batch_size=4)
    whole, _ = build_dataset_loaders(data, data, batch, seed=5, accelerator=Accelerator(cpu=True))

    def ids(windows: object) -> list[list[int]]:
        return [[i for batch in window.micro_batches for i in batch.sample_ids.tolist()] for window in windows]

    few, first = FewWindows(whole, 2), ids(whole.windows(0, 0))[:2]
    assert ids(few.windows(0, 0)) == ids(few.windows(7, 0)) == [*first, *first, first[0]]
    assert ids(few.windows(3, 4)) == [first[0]]
    assert ids(FewWindows(whole, 99).windows(1, 0)) == ids(whole.windows(0, 0))


def test_a_sound_recipe_learns_them_by_heart_and_stops_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(make_config(tmp_path / "run"))
    assert result.stop_reason == "the loss is close to 0"
    assert result.position.optimizer_step < 100
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("overfit ok: loss 1.")
    assert said.endswith(f" in {result.position.optimizer_step} steps on 2 batches")


def contradict(inputs: torch.Tensor, labels: torch.Tensor) -> None:
    inputs[:] = inputs[0]


def forget_to_normalise(inputs: torch.Tensor, labels: torch.Tensor) -> None:
    inputs.mul_(1000).add_(5000)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ({"change": contradict}, "suspect: equal inputs with different labels"),
        ({"change": forget_to_normalise}, "suspect: inputs with mean "),
        ({"prepare": lambda net: net[0].requires_grad_(False)}, "suspect: 2 frozen parameters"),
        ({"dropout": 0.9}, "suspect: dropout"),
        ({"task": ClassificationTask(ClassificationConfig(label_smoothing=0.2))}, "suspect: label smoothing 0.2"),
        ({}, "suspect: too few steps, since the loss was falling"),
    ],
    ids=["labels", "inputs", "frozen", "dropout", "smoothing", "short"],
)  # fmt: skip
def test_what_does_not_come_to_it_is_suspected_of_its_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mistake: dict[str, object], said: str
) -> None:
    result = train(make_config(tmp_path / "run", epochs=3), **mistake)
    assert result.stop_reason == "num_epochs reached"
    shown = capsys.readouterr().out
    assert "\noverfit FAILED: loss " in shown
    assert said in shown
    assert shown.count("suspect: ") <= 2, "nothing else is suspected but the course of the loss"


def test_an_interrupted_one_stops_at_the_same_step_with_the_same_weights(tmp_path: Path) -> None:
    config = make_config(tmp_path / "parts")
    whole = train(make_config(tmp_path / "whole"))
    for max_steps in (1, 17, None):
        part = train(replace(config, trainer=replace(config.trainer, max_steps=max_steps)))
    assert part.position == whole.position
    assert final_files(tmp_path / "parts") == final_files(tmp_path / "whole")


def overfit_in_two(folder: Path) -> None:
    config = make_config(folder)
    train(replace(config, batch=replace(config.batch, per_device_batch_size=8)))


def test_two_processes_stop_together(tmp_path: Path) -> None:
    job = processes.run(overfit_in_two, tmp_path / "run", num_processes=2, folder=tmp_path / "logs")
    assert [job.output(rank).count("overfit ok: ") for rank in (0, 1)] == [1, 0]


def test_images_are_learnt_by_heart_without_augmentation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--dataset", "digits", "--model", "resnet8", "--augment.mixup", "0.5", "--overfit", "1"]
    places = ["--cache-dir", str(tmp_path / "cache"), "--output-dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as ended:
        main(cifar.train, cifar.Config, description="", argv=[*flags, *places, "--batch-size", "32"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("overfit ok: ")
