"""A step of the trainer, of accelerate's wrappers and of a plain loop give the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from accel_trainer import (
    Batch,
    BatchPlan,
    CheckpointConfig,
    ClassificationTask,
    ConfigError,
    Evaluator,
    StepBatch,
    Trainer,
    TrainerConfig,
)
from accel_trainer.checkpoint.manager import Checkpointer
from accel_trainer.fault_tolerance.activity import Activity
from accel_trainer.fault_tolerance.preemption import StopFlag
from accel_trainer.training.assembly import assemble
from accel_trainer.training.strategy.data_parallel import DataParallelStrategy

BATCH_SIZE = 16


def learning_rate_at(optimizer_step: int) -> float:
    return 0.1 / (1 + optimizer_step)


def make_batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return Batch(
        torch.randn(BATCH_SIZE, 1, 8, 8, generator=generator),
        torch.randint(0, 4, (BATCH_SIZE,), generator=generator),
        torch.arange(BATCH_SIZE),
    )


class Batches:
    """One step batch a step, cut into equal micro-batches."""

    num_samples = BATCH_SIZE

    def __init__(self, num_steps: int, *, accumulation: int = 1) -> None:
        self._micro_batch_size = BATCH_SIZE // accumulation
        self.plan = BatchPlan(
            num_samples=BATCH_SIZE * num_steps,
            global_batch_size=BATCH_SIZE,
            per_device_batch_size=self._micro_batch_size,
        )

    def step_batches(self, epoch: int, first_step: int) -> Iterator[StepBatch]:
        for step in range(first_step, self.plan.steps_per_epoch):
            batch = make_batch(step)
            fields = (batch.inputs, batch.targets, batch.sample_ids)
            parts = zip(*(field.split(self._micro_batch_size) for field in fields), strict=True)
            yield StepBatch([Batch(*part) for part in parts], BATCH_SIZE)

    def batches(self) -> Iterator[Batch]:
        yield make_batch(0)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 4),
    )


def make_trainer(
    config: TrainerConfig,
    folder: Path,
    *,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    loader: Batches,
) -> Trainer:
    """Return a trainer without a run, which evaluates nothing."""
    task = ClassificationTask()
    assembly = assemble(
        config,
        strategy=DataParallelStrategy(accelerator, seed=5),
        model=model,
        optimizers={"": optimizer},
        task=task,
        checkpointer=Checkpointer(folder, config=CheckpointConfig(), header={}),
        activity=Activity(),
    )
    return Trainer(
        config,
        assembly,
        loader=loader,
        evaluations={"eval": Evaluator(loader, task=task, metrics=[], accelerator=accelerator)},
        schedule=learning_rate_at,
        stop_flag=StopFlag(),
        load_best=lambda trainer: "",
    )


def make_optimizer(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=1e-3)


def make_accelerator(*, has_scaler: bool) -> Accelerator:
    accelerator = Accelerator(cpu=True)
    if has_scaler:  # a power of two: scaling is exact
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return accelerator


def train(
    folder: Path,
    *,
    num_steps: int,
    has_scaler: bool = False,
    accumulation: int = 1,
    max_grad_norm: float | None = None,
) -> dict[str, Tensor]:
    model = make_model()
    loader = Batches(num_steps, accumulation=accumulation)
    trainer = make_trainer(
        TrainerConfig(num_epochs=1, evaluate_every="2epochs", max_grad_norm=max_grad_norm),
        folder,
        accelerator=make_accelerator(has_scaler=has_scaler),
        model=model,
        optimizer=make_optimizer(model),
        loader=loader,
    )
    model.train()
    for step_batch in loader.step_batches(0, 0):
        trainer.train_step(step_batch)
    return model.state_dict()


def assert_same_bits(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []


@pytest.mark.parametrize(
    ("has_scaler", "accumulation", "max_grad_norm"),
    [
        (False, 4, None),
        (False, 2, 0.5),
        (True, 4, None),  # accelerate unscales before clipping in fp16 only
    ],
)
def test_a_loop_of_accelerate_gives_the_same_weights(
    tmp_path: Path, has_scaler: bool, accumulation: int, max_grad_norm: float | None
) -> None:
    accelerator = make_accelerator(has_scaler=has_scaler)
    plain = make_model()
    model, optimizer = accelerator.prepare(plain, make_optimizer(plain))
    model.train()
    for step, step_batch in enumerate(Batches(50, accumulation=accumulation).step_batches(0, 0)):
        optimizer.param_groups[0]["lr"] = learning_rate_at(step)
        for batch in step_batch.micro_batches:
            loss_sum = F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum")
            accelerator.backward(loss_sum / BATCH_SIZE)
        if max_grad_norm is not None:
            accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    ours = train(
        tmp_path,
        num_steps=50,
        has_scaler=has_scaler,
        accumulation=accumulation,
        max_grad_norm=max_grad_norm,
    )
    assert_same_bits(ours, model.state_dict())


def test_a_hand_written_loop_gives_the_same_weights(tmp_path: Path) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    model.train()
    for step in range(100):
        optimizer.param_groups[0]["lr"] = learning_rate_at(step)
        batch = make_batch(step)
        F.cross_entropy(model(batch.inputs), batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_bits(train(tmp_path, num_steps=100), model.state_dict())


def test_a_trainer_that_is_made_by_hand_is_one_line_with_the_right_way() -> None:
    class Mine(Trainer):
        pass

    for make in (Trainer, Mine):
        for arguments in ((), (nn.Linear(1, 1),)):
            with pytest.raises(ConfigError, match=r"TRAINER.*build_trainer\(run"):
                make(*arguments)  # type: ignore[arg-type, call-arg]
