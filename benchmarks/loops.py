"""The same training loop in each toolkit, with the same model, data and optimizer.

`overhead` runs one per process.

Each follows its toolkit's documentation, and imports the toolkit itself, so that start-up times can
be compared.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_WALL_S = time.time()

import torch  # noqa: E402  # the clock of the start-up runs before it
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

BATCH_SIZE, LEARNING_RATE, MOMENTUM = 128, 0.1, 0.9


class Stamped(nn.Module):
    """A model that records when each training forward begins: in CPU time, or wall time on a
    device."""

    unsaved_attributes = ("begun_ns", "start")

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model
        self.begun_ns: list[int] = []
        self.start: tuple[float, float] | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            if len(self.begun_ns) == 1:  # the first step is done
                self.start = time.time() - _WALL_S, time.process_time()
            self.begun_ns.append(
                time.thread_time_ns() if is_on_cpu(self) else time.perf_counter_ns()
            )
        result: Tensor = self.inner(inputs)
        return result


def is_on_cpu(model: nn.Module) -> bool:
    return next(model.parameters()).device.type == "cpu"


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Prepared batches on the device, so that only the loop is measured."""

    def __init__(self, shape: tuple[int, ...], num_steps: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self._num_steps = num_steps
        self._batches = [
            (
                torch.randn(BATCH_SIZE, *shape, generator=generator).to(device),
                torch.randint(0, 10, (BATCH_SIZE,), generator=generator).to(device),
            )
            for _ in range(4)
        ]

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._batches[index % 4]


class Fast(nn.Module):
    """A net as GPUs are fed: bf16, channels last, compiled.

    In the model, so that it is the same in each loop.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in its stub
        self.inner = model
        self.inner.compile()

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16):
            result: Tensor = self.inner(inputs.contiguous(memory_format=torch.channels_last))
        return result.float()


def make_model(name: str) -> Stamped:
    """Return `tiny`, or a net by its name; `fast NAME` in bf16, channels last and compiled."""
    torch.manual_seed(0)
    if name == "tiny":
        return Stamped(nn.Linear(32, 10))
    from accel_trainer.vision import ModelConfig, build_model

    kind, _, net = name.rpartition(" ")
    model = build_model(ModelConfig(name=net), in_channels=3, num_classes=10)
    return Stamped(Fast(model) if kind else model)


def input_shape(name: str) -> tuple[int, ...]:
    """Return the shape of a sample for a model of `make_model`."""
    if name == "tiny":
        return (32,)
    return (3, 224, 224) if name.endswith("resnet50") else (3, 32, 32)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


Loop = Callable[[Stamped, "DataLoader[Any]", int], None]


def raw(model: Stamped, batches: DataLoader[Any], num_steps: int) -> None:
    optimizer = make_optimizer(model)
    model.train()
    for inputs, targets in batches:
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def raw_with_schedule_and_mean_loss(
    model: Stamped, batches: DataLoader[Any], num_steps: int
) -> None:
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    model.train()
    total = torch.zeros((), device=next(model.parameters()).device)
    for inputs, targets in batches:
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += loss.detach()


def accelerate(
    model: Stamped, batches: DataLoader[Any], num_steps: int, *, accumulates: bool = False
) -> None:
    from contextlib import nullcontext

    from accelerate import Accelerator

    accelerator = Accelerator(cpu=is_on_cpu(model))
    plain = make_optimizer(model)
    module, optimizer, loader, schedule = accelerator.prepare(
        model, plain, batches, torch.optim.lr_scheduler.CosineAnnealingLR(plain, num_steps)
    )
    module.train()
    for inputs, targets in loader:
        with accelerator.accumulate(module) if accumulates else nullcontext():
            accelerator.backward(F.cross_entropy(module(inputs), targets))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def accelerate_accumulate(model: Stamped, batches: DataLoader[Any], num_steps: int) -> None:
    accelerate(model, batches, num_steps, accumulates=True)


def ours(
    model: Stamped,
    batches: DataLoader[Any],
    num_steps: int,
    *,
    has_own_optimizer: bool = True,
    digest_every_n_steps: int | None = 200,
) -> None:
    """With a cosine schedule, the mean loss logged every 50 steps, checkpoints, and a callback on
    every event.

    And with the optimizer that the toolkit makes, or else that of the other loops.
    """
    from accelerate import Accelerator

    from accel_trainer import (
        Batch,
        BatchPlan,
        Callback,
        CheckpointConfig,
        ClassificationTask,
        Evaluator,
        MeanLoss,
        OptimizerConfig,
        ScheduleConfig,
        StepBatch,
        Trainer,
        TrainerConfig,
        build_optimizer,
        build_schedule,
    )
    from accel_trainer.callbacks.metric_logger import MetricLogger
    from accel_trainer.checkpoint.manager import Checkpointer
    from accel_trainer.fault_tolerance.activity import Activity
    from accel_trainer.fault_tolerance.preemption import StopFlag
    from accel_trainer.run.build import prepare_checkpoints
    from accel_trainer.training.assembly import assemble
    from accel_trainer.training.strategy.data_parallel import DataParallelStrategy

    sample_ids = torch.arange(BATCH_SIZE, device=next(model.parameters()).device)

    class Loader:
        """The same DataLoader, as step batches."""

        num_samples = BATCH_SIZE
        plan = BatchPlan(
            num_samples=BATCH_SIZE * num_steps,
            global_batch_size=BATCH_SIZE,
            per_device_batch_size=BATCH_SIZE,
        )

        def step_batches(self, epoch: int, first_step: int) -> Iterator[StepBatch]:
            for inputs, targets in batches:
                yield StepBatch([Batch(inputs, targets, sample_ids)], BATCH_SIZE)

        def batches(self) -> Iterator[Batch]:
            inputs, targets = next(iter(batches))
            yield Batch(inputs, targets, sample_ids)

    class EveryEvent(Callback):
        """Observes all and does nothing."""

    def observe(*arguments: Any) -> None:
        pass

    for name in vars(Callback):
        if name.startswith("on_"):
            setattr(EveryEvent, name, observe)

    accelerator = Accelerator(cpu=is_on_cpu(model))
    task, loader = ClassificationTask(), Loader()
    config = OptimizerConfig(
        learning_rate=LEARNING_RATE, momentum=MOMENTUM, nesterov=False, weight_decay=0.0
    )
    checkpointer = Checkpointer(
        Path(tempfile.mkdtemp()) / "c", config=CheckpointConfig(), header={}
    )
    train_config = TrainerConfig(num_epochs=1, monitor="eval/loss", monitor_mode="min")
    activity = Activity()
    assembly = assemble(
        train_config,
        strategy=DataParallelStrategy(accelerator, seed=0),
        model=model,
        optimizers={
            "": build_optimizer(model, config) if has_own_optimizer else make_optimizer(model)
        },
        task=task,
        checkpointer=checkpointer,
        activity=activity,
    )
    trainer = Trainer(
        train_config,
        assembly,
        loader=loader,
        evaluations={
            "eval": Evaluator(loader, task=task, metrics=[MeanLoss()], accelerator=accelerator)
        },
        schedule=build_schedule(
            ScheduleConfig(),
            peak_learning_rate=LEARNING_RATE,
            total_steps=num_steps,
            steps_per_epoch=num_steps,
        ),
        stop_flag=StopFlag(),
        load_best=lambda trainer: "",
        callbacks=[
            MetricLogger(
                accelerator,
                history=None,
                every_n_steps=50,
                digest_every_n_steps=digest_every_n_steps,
                activity=activity,
            ),
            EveryEvent(),
        ],
    )
    prepare_checkpoints(trainer, checkpointer)
    trainer.fit()


def ours_with_their_optimizer(model: Stamped, batches: DataLoader[Any], num_steps: int) -> None:
    ours(model, batches, num_steps, has_own_optimizer=False)


def ours_without_digests(model: Stamped, batches: DataLoader[Any], num_steps: int) -> None:
    ours(model, batches, num_steps, digest_every_n_steps=None)


def fabric(model: Stamped, batches: DataLoader[Any], num_steps: int) -> None:
    from lightning.fabric import Fabric

    engine = Fabric(accelerator="cpu" if is_on_cpu(model) else "auto", devices=1)
    engine.launch()
    module, optimizer = engine.setup(model, make_optimizer(model))
    loader = engine.setup_dataloaders(batches)
    module.train()
    for inputs, targets in loader:
        engine.backward(F.cross_entropy(module(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


def lightning(
    model: Stamped, batches: DataLoader[Any], num_steps: int, *, is_minimal: bool = False
) -> None:
    import lightning as L

    class Module(L.LightningModule):  # type: ignore[misc]  # of any type where lightning is not installed
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = F.cross_entropy(self.model(batch[0]), batch[1])
            if not is_minimal:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = make_optimizer(self)
            if is_minimal:
                return optimizer
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = dict.fromkeys(names, False) if is_minimal else {}
    kind = "cpu" if is_on_cpu(model) else "auto"
    trainer = L.Trainer(
        accelerator=kind, devices=1, max_epochs=1, default_root_dir=tempfile.mkdtemp(), **quiet
    )
    trainer.fit(Module(), batches)


def lightning_minimal(model: Stamped, batches: DataLoader[Any], num_steps: int) -> None:
    lightning(model, batches, num_steps, is_minimal=True)


def pytorch_accelerated(
    model: Stamped, batches: DataLoader[Any], num_steps: int, *, is_minimal: bool = False
) -> None:
    from pytorch_accelerated import Trainer as PeerTrainer

    class Trainer(PeerTrainer):  # type: ignore[misc]  # published without types
        def create_train_dataloader(self, *arguments: Any, **options: Any) -> DataLoader[Any]:
            # It writes to its loader's batch sampler, so there must be one.
            return DataLoader(batches.dataset, batch_size=1, collate_fn=lambda samples: samples[0])

    options: dict[str, Any] = {"callbacks": ()} if is_minimal else {}
    trainer = Trainer(model, loss_func=F.cross_entropy, optimizer=make_optimizer(model), **options)
    trainer.train(
        train_dataset=batches.dataset,
        num_epochs=1,
        per_device_batch_size=BATCH_SIZE,
        create_scheduler_fn=None
        if is_minimal
        else lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps),
    )


def pytorch_accelerated_minimal(model: Stamped, batches: DataLoader[Any], num_steps: int) -> None:
    pytorch_accelerated(model, batches, num_steps, is_minimal=True)


def hf_trainer(model: Stamped, batches: DataLoader[Any], num_steps: int) -> None:
    from transformers import Trainer as PeerTrainer
    from transformers import TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.model(inputs), labels)}

    class Named(Dataset[Any]):
        def __len__(self) -> int:
            return num_steps

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            inputs, labels = batches.dataset[index]
            return {"inputs": inputs, "labels": labels}

    class Trainer(PeerTrainer):  # type: ignore[misc]  # published without types
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(DataLoader(Named(), batch_size=None))

    wrapped = Model()
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=num_steps,
        use_cpu=is_on_cpu(model),
        report_to=[],
        save_strategy="no",
        logging_steps=50,
        lr_scheduler_type="cosine",
        max_grad_norm=0.0,
        disable_tqdm=True,
    )
    Trainer(
        wrapped, arguments, train_dataset=Named(), optimizers=(make_optimizer(wrapped), None)
    ).train()


LOOPS: dict[str, Loop] = {
    "raw": raw,
    "raw, schedule + mean loss": raw_with_schedule_and_mean_loss,
    "ours, all on": ours,
    "ours, the others' optimizer": ours_with_their_optimizer,
    "ours, without digests": ours_without_digests,
    "Fabric": fabric,
    "accelerate": accelerate,
    "accelerate + accumulate": accelerate_accumulate,
    "pytorch-accelerated, minimal": pytorch_accelerated_minimal,
    "pytorch-accelerated": pytorch_accelerated,
    "Lightning, minimal": lightning_minimal,
    "Lightning": lightning,
    "HF Trainer": hf_trainer,
}


def step_us(model: Stamped, num_steps: int) -> float:
    begun_ns = model.begun_ns[num_steps // 4 : num_steps]  # warm-up
    # where a step begins while others are still computed: their mean, not one of them
    if not is_on_cpu(model):
        return mean_step_us(model, num_steps)
    steps_ns = sorted(later - now for now, later in zip(begun_ns, begun_ns[1:], strict=False))
    return steps_ns[len(steps_ns) // 10] / 1000


def mean_step_us(model: Stamped, num_steps: int) -> float:
    """The mean, with what is done only in some steps."""
    begun_ns = model.begun_ns[num_steps // 4 : num_steps]  # warm-up
    return (begun_ns[-1] - begun_ns[0]) / (len(begun_ns) - 1) / 1000


def main() -> None:
    loop, model_name, num_steps, device = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    model = make_model(model_name).to(device)
    batches = Batches(input_shape(model_name), num_steps, device)
    LOOPS[loop](model, DataLoader(batches, batch_size=None), num_steps)
    if len(model.begun_ns) < num_steps or model.start is None:
        raise RuntimeError(f"{loop} made {len(model.begun_ns)} steps of {num_steps}")
    print()
    print(
        json.dumps(
            {
                "step_us": step_us(model, num_steps),
                "mean_step_us": mean_step_us(model, num_steps),
                "start_wall_s": model.start[0],
                "start_cpu_s": model.start[1],
                "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
