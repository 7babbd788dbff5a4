"""Steps a second on a GPU: ours, a loop by hand (eager, and captured in a CUDA graph) and an accelerate loop.

All take the same batches from the same loader, on the device. Without a GPU this only tries itself out,
with a small net on the CPU, and writes no result.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from accel_trainer import (
    Batch,
    BatchPlan,
    CheckpointConfig,
    ClassificationTask,
    Evaluator,
    OptimizerConfig,
    Trainer,
    TrainerConfig,
    build_optimizer,
)
from accel_trainer.capture import StepCapture
from accel_trainer.checkpoint import Checkpointer
from accel_trainer.compilation import Stopwatch
from accel_trainer.vision import (
    AugmentConfig,
    ImageEvalLoader,
    ImageLoader,
    ImageSplit,
    ModelConfig,
    Normalization,
    build_model,
)

from . import results

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
NORMALIZATION = Normalization(mean=(0.5,) * 3, std=(0.25,) * 3)
Step = Callable[[], object]


def noise(num: int) -> ImageSplit:
    pixels = torch.randint(0, 256, (num, 32, 32, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    return ImageSplit(images=pixels, labels=torch.arange(num) % 10, num_classes=10)


def make_loader(split: ImageSplit, batch_size: int) -> ImageLoader:
    num = len(split)
    plan = BatchPlan(num_samples=num, global_batch_size=batch_size, per_device_batch_size=batch_size, drop_last=True)
    return ImageLoader(
        split, plan=plan, process_index=0, seed=0, augment=AugmentConfig(),
        normalization=NORMALIZATION, device=DEVICE,
    )  # fmt: skip


def batches_of(loader: ImageLoader) -> Iterator[Batch]:
    """Yield batches forever."""
    return (batch for epoch in range(10**6) for window in loader.windows(epoch, 0) for batch in window.micro_batches)


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(ModelConfig(name=name), in_channels=3, num_classes=10).to(DEVICE)
    return model.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload, no-any-return]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(model, OptimizerConfig(learning_rate=0.01))


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(DEVICE.type, torch.bfloat16):
        return F.cross_entropy(model(inputs), targets)


def by_hand(name: str, loader: ImageLoader) -> Step:
    model, batches = make_model(name), batches_of(loader)
    optimizer = make_optimizer(model)

    def step() -> None:
        batch = next(batches)
        loss_of(model, batch.inputs, batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def captured(name: str, loader: ImageLoader) -> Step:
    """Forward, backward and update as one CUDA graph; a batch is copied to where the graph reads it."""
    model, batches = make_model(name), batches_of(loader)
    optimizer = make_optimizer(model)
    first = next(batches)
    inputs, targets = first.inputs.clone(), first.targets.clone()

    def update() -> None:
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            update()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update()

    def step() -> None:
        batch = next(batches)
        inputs.copy_(batch.inputs)
        targets.copy_(batch.targets)
        graph.replay()

    return step


def with_accelerate(name: str, loader: ImageLoader) -> Step:
    accelerator = Accelerator(mixed_precision="bf16")
    plain, batches = make_model(name), batches_of(loader)
    model, optimizer = accelerator.prepare(plain, make_optimizer(plain))

    def step() -> None:
        batch = next(batches)
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(batch.inputs), batch.targets))
            optimizer.step()
            optimizer.zero_grad()

    return step


def ours(name: str, loader: ImageLoader, *, compile_model: bool = False, capture_step: bool = False) -> Step:
    accelerator = Accelerator(mixed_precision="bf16")
    model, task = make_model(name), ClassificationTask()
    if compile_model:
        model.compile()
    evaluation = ImageEvalLoader(
        noise(64), batch_size=64, num_processes=1, process_index=0,
        normalization=NORMALIZATION, device=DEVICE,
    )  # fmt: skip
    trainer = Trainer(
        TrainerConfig(),
        accelerator=accelerator,
        model=model,
        optimizer=make_optimizer(model),
        learning_rate_at=lambda step: 0.01,
        task=task,
        loader=loader,
        evaluator=Evaluator(evaluation, task=task, metrics=[], accelerator=accelerator),
        checkpointer=Checkpointer(Path(tempfile.mkdtemp()), config=CheckpointConfig(), metadata={}),
        seed=0,
    )
    windows = (window for epoch in range(10**6) for window in loader.windows(epoch, 0))
    capture = StepCapture(trainer, preparation=Stopwatch()) if capture_step else None
    if capture is not None:
        trainer.compute = capture.compute

    def step() -> None:
        trainer.train_window(next(windows))
        assert capture is None or not capture.is_given_up, "what would be measured is not a replay"

    return step


def ours_compiled(name: str, loader: ImageLoader) -> Step:
    return ours(name, loader, compile_model=True)


def ours_captured(name: str, loader: ImageLoader) -> Step:
    return ours(name, loader, capture_step=True)


def ours_compiled_and_captured(name: str, loader: ImageLoader) -> Step:
    return ours(name, loader, compile_model=True, capture_step=True)


def data_alone(name: str, loader: ImageLoader) -> Step:
    batches = batches_of(loader)
    return lambda: next(batches)


WAYS = {
    "by hand, eager": by_hand,
    "by hand, captured": captured,
    "accelerate, eager": with_accelerate,
    "ours": ours,
    "ours, --compile": ours_compiled,
    "ours, --capture": ours_captured,
    "ours, --compile --capture": ours_compiled_and_captured,
    "data alone": data_alone,
}
NEED_A_GPU = ("by hand, captured", "ours, --compile", "ours, --capture", "ours, --compile --capture")


def timed(step: Step, num_steps: int) -> float:
    """Return seconds a step, the device's work included."""
    if HAS_GPU:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    if HAS_GPU:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / num_steps


def floor_s(name: str, batch_size: int) -> float:
    """Return the least seconds of a step by the roofline: its operations and its memory traffic, one after the other.

    The rates are those of a large matrix product and a large copy in bfloat16, on this device, now. The traffic is
    what convolutions write, 14 times: as they, norms and ReLUs, forward and backward, read and write it.
    """
    model, num_images, written = make_model(name), 8, 0

    def note(module: nn.Module, inputs: object, output: Tensor) -> None:
        nonlocal written
        written += output.numel()

    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, nn.Conv2d)]
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(num_images, 3, 32, 32, device=DEVICE)).sum().backward()
    for hook in hooks:
        hook.remove()
    size = 8192 if HAS_GPU else 256
    matrix = torch.ones(size, size, device=DEVICE, dtype=torch.bfloat16)
    large = torch.empty(2**30 if HAS_GPU else 2**20, device=DEVICE, dtype=torch.bfloat16)
    other = torch.empty_like(large)
    timed(lambda: matrix @ matrix, 5)
    flops_per_s = 2 * size**3 / timed(lambda: matrix @ matrix, 20)
    bytes_per_s = 2 * 2 * len(large) / timed(lambda: other.copy_(large), 20)
    num_flops: int = counter.get_total_flops()
    return batch_size / num_images * (num_flops / flops_per_s + 14 * 2 * written / bytes_per_s)


def measure(name: str, batch_size: int, split: ImageSplit, *, num_steps: int, repeats: int) -> list[results.Row]:
    loader = make_loader(split, batch_size)
    steps, ready_s = {}, {}
    for way, make in WAYS.items():
        if HAS_GPU or way not in NEED_A_GPU:
            start = time.perf_counter()
            steps[way] = make(name, loader)
            timed(steps[way], 5)
            ready_s[way] = time.perf_counter() - start
    measured = results.interleave(list(steps), lambda way: {"s": timed(steps[way], num_steps)}, repeats=repeats)
    base, floor = measured.get("by hand, captured", measured["by hand, eager"]), floor_s(name, batch_size)
    rows = []
    for way in steps:
        seconds = [row["s"] for row in measured[way]]
        speeds = [theirs["s"] / mine for mine, theirs in zip(seconds, base, strict=True)]
        rows.append(
            {
                "loop": way,
                "steps/s": 1 / statistics.median(seconds),
                "images/s": batch_size / statistics.median(seconds),
                "of the roofline": floor / statistics.median(seconds),
                "speed of captured": statistics.median(speeds),
                "lowest": min(speeds),
                "highest": max(speeds),
                "warm-up and compilation s": ready_s[way],
                "n": repeats,
                "samples": seconds,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7 if HAS_GPU else 2)
    parser.add_argument("--steps", type=int, default=100 if HAS_GPU else 2)
    parser.add_argument("--models", nargs="+", default=["resnet20", "resnet18"] if HAS_GPU else ["resnet8"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[128, 1024] if HAS_GPU else [8])
    options = parser.parse_args()
    started = results.environment()
    # For all ways alike, as a run of ours has it: exact runs need it, and a replay is checked bit for bit.
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(HAS_GPU, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    split = noise(50_000 if HAS_GPU else 64)
    # What was measured survives a time limit: start the same command again, and it goes on after it.
    tables = results.measured_before("gpu_cifar", now=started)
    for name in options.models:
        for batch_size in options.batch_sizes:
            part = f"{name}, batch {batch_size}"
            if part in tables:
                continue
            tables[part] = measure(name, batch_size, split, num_steps=options.steps, repeats=options.repeats)
            if HAS_GPU:
                write(tables, started)
            else:
                print("no GPU:", ", ".join(f"{row['loop']} {row['steps/s']:.0f}/s" for row in tables[part]))


def write(tables: dict[str, list[results.Row]], started: results.Row) -> None:
    results.write(
        "gpu_cifar",
        title="Training on a GPU",
        how="bfloat16, channels last, one process, the same loader on the device; wall time with the device "
        "synchronised, loops in turn. The roofline is the time that a step's operations and memory traffic take at "
        "the rates of a large matrix product and a large copy on the same device.",
        tables=tables,
        goals=[
            "At batch 128 at least 0.97 of a captured loop by hand; 4 (ResNet-20) and 1.5 times (ResNet-18) the "
            "eager accelerate loop."
        ],
        started=started,
    )


if __name__ == "__main__":
    main()
