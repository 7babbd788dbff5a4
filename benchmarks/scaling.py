"""How a step scales with the number of processes: measured for 1, 2 and 4, predicted for more."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from accel_trainer import BatchConfig, RuntimeConfig, TrainLoader, launch
from accel_trainer.core.buffers import StepBuffers
from accel_trainer.core.types import StepSums
from accel_trainer.distributed.accelerator import start_accelerator
from accel_trainer.distributed.collectives import shutdown, sum_pairwise
from accel_trainer.training.strategy.exact import ExactStrategy
from accel_trainer.vision import (
    AugmentConfig,
    AugmentedImageReader,
    ImageSplit,
    ModelConfig,
    Normalization,
    build_model,
)

from . import results
from .cost_model import CostModel

PROCESSES = (1, 2, 4)
PREDICTED = (8, 16, 32, 64, 128, 256, 512, 1024)
PARTS = (
    "data_s",
    "compute_s",
    "synchronised_s",
    "all_reduce_s",
    "message_s",
    "exact_s",
    "pairwise_s",
)


def measure(model_name: str, batch_size: int, num_steps: int) -> results.Row:
    """Return medians over steps; all processes start each part together. Runs in every process."""
    accelerator = start_accelerator(RuntimeConfig(num_threads=1))
    split = ImageSplit(
        images=torch.randint(0, 256, (4096, 3, 32, 32), dtype=torch.uint8),
        labels=torch.randint(0, 10, (4096,)),
        num_classes=10,
    )
    plan = BatchConfig(per_device_batch_size=batch_size).plan(
        4096, num_processes=accelerator.num_processes
    )
    device = accelerator.device
    reader = AugmentedImageReader(
        split,
        normalization=Normalization(mean=(0.5,) * 3, std=(0.25,) * 3),
        device=device,
        augment=AugmentConfig(),
        seed=0,
    )
    loader = TrainLoader(
        reader, plan, seed=0, device=device, process_index=accelerator.process_index
    )
    plain, twin = (
        build_model(ModelConfig(name=model_name), in_channels=3, num_classes=10) for _ in range(2)
    )
    model, optimizer = accelerator.prepare(
        plain, torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    )
    exact = ExactStrategy(accelerator, seed=0, num_micro_batches=accelerator.num_processes)
    exact_optimizer = torch.optim.SGD(twin.parameters(), lr=0.01, momentum=0.9)
    exact_model = exact.prepare(twin, {"": exact_optimizer})
    buffers = StepBuffers(twin)
    gradients, number = torch.zeros(sum(p.numel() for p in plain.parameters())), torch.zeros(1)
    is_alone = accelerator.num_processes == 1

    def step(batch: Any, *, is_synchronised: bool) -> None:
        with nullcontext() if is_synchronised or is_alone else model.no_sync():
            torch.nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    def exact_step(batch: Any) -> None:
        exact.begin(buffers)
        buffers.save()
        exact.begin_forward(0, 0)
        loss = torch.nn.functional.cross_entropy(
            exact_model(batch.inputs), batch.targets, reduction="sum"
        )
        (loss / (len(batch) * accelerator.num_processes)).backward()
        exact.end_backward(len(batch))
        exact.finish([StepSums(loss.detach(), {}, None)])
        exact_optimizer.step()
        exact_optimizer.zero_grad()

    def timed(action: Callable[[], object]) -> float:
        accelerator.wait_for_everyone()
        start_s = time.perf_counter()
        action()
        return time.perf_counter() - start_s

    samples: dict[str, list[float]] = {name: [] for name in PARTS}
    step_batches = (
        step_batch for epoch in range(10**6) for step_batch in loader.step_batches(epoch, 0)
    )
    for _ in range(num_steps):
        start_s = time.perf_counter()
        batch = next(step_batches).micro_batches[0]
        samples["data_s"].append(time.perf_counter() - start_s)
        samples["compute_s"].append(timed(partial(step, batch, is_synchronised=False)))
        samples["synchronised_s"].append(timed(partial(step, batch, is_synchronised=True)))
        for name, tensor in (("all_reduce_s", gradients), ("message_s", number)):
            samples[name].append(0.0 if is_alone else timed(partial(dist.all_reduce, tensor)))
        samples["exact_s"].append(timed(partial(exact_step, batch)))
        samples["pairwise_s"].append(
            0.0 if is_alone else timed(partial(sum_pairwise, gradients, accelerator))
        )
    shutdown(accelerator)
    settled = {
        name: statistics.median(values[len(values) // 4 :]) for name, values in samples.items()
    }
    return {**settled, "bytes": gradients.numel() * gradients.element_size()}


def fit(one: results.Row, two: results.Row) -> CostModel:
    """Return the model that one process and two determine."""
    latency_s = two["message_s"] / 2
    unhidden = max(0.0, two["synchronised_s"] - two["compute_s"]) / two["all_reduce_s"]
    return CostModel(
        compute_s=one["compute_s"],
        data_s=one["data_s"],
        gradient_bytes=one["bytes"],
        bytes_per_s=one["bytes"] / max(1e-9, two["all_reduce_s"] - two["message_s"]),
        latency_s=latency_s,
        overlap=max(0.0, 1 - unhidden),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32, help="of each process")
    parser.add_argument("--model", default="resnet8")
    parser.add_argument(
        "--processes", type=int, help="measure once with these, and print it as JSON"
    )
    options = parser.parse_args()
    if options.processes:
        os.environ["ACCELERATE_USE_CPU"] = "true"
        row = launch(
            measure,
            options.model,
            options.batch_size,
            options.steps,
            num_processes=options.processes,
        )
        print(json.dumps(row))
        return
    started = results.environment()
    arguments = (
        "--steps",
        str(options.steps),
        "--batch-size",
        str(options.batch_size),
        "--model",
        options.model,
    )
    measured = results.interleave(
        [str(number) for number in PROCESSES],
        lambda number: results.in_process("scaling", "--processes", number, *arguments),
        repeats=options.repeats,
    )
    rows = {
        number: {
            name: statistics.median(row[name] for row in measured[str(number)])
            for name in (*PARTS, "bytes")
        }
        for number in PROCESSES
    }
    model = fit(rows[1], rows[2])
    cores = os.cpu_count() or 1
    table = [describe(rows[number], number, model, cores, options) for number in PROCESSES]
    error = table[-1]["error"]
    results.write(
        "scaling",
        title="Scaling",
        how=f"{options.model} on 32x32 images, {options.batch_size} images and one thread per "
        "process, over gloo. Compute is a step without synchronisation; communication is the "
        "time that synchronisation adds. Each starts after a barrier. Medians over steps and "
        "repeats. Four processes share two cores here, which the model takes into account; "
        "it was not fitted to them, so their row shows how well it predicts. The second "
        "table assumes the same kind of cores and network, with one core per process. The "
        "third compares a step whose gradients DDP averages with one that adds them up in "
        "pairs, of the same samples, one micro-batch a process; both send as many bytes, the "
        "second after backward instead of during it.",
        tables={
            "Measured": table,
            "Predicted (`benchmarks/cost_model.py`)": [
                {
                    "processes": number,
                    "step ms": 1e3 * model.step_s(number),
                    "all-reduce only ms": 1e3 * model.all_reduce_s(number),
                    "efficiency": model.efficiency(number),
                    "images/s": number * options.batch_size / model.step_s(number),
                }
                for number in PREDICTED
            ],
            "`--reduce exact`": [describe_exact(rows[number], number) for number in PROCESSES],
        },
        goals=[
            f"Fitted to one and two processes: {model.bytes_per_s / 1e6:.0f} MB/s, "
            f"{1e6 * model.latency_s:.0f} us a message, {model.overlap:.0%} of the all-reduce "
            "hidden behind backward.",
            f"For four processes, which were not fitted, the prediction of a step is "
            f"{abs(error):.0%} too {'long' if error > 0 else 'short'}. "
            "Nothing beyond four has been measured, on GPUs or otherwise.",
        ],
        started=started,
    )


def describe(
    row: results.Row, number: int, model: CostModel, cores: int, options: argparse.Namespace
) -> results.Row:
    step_s = row["data_s"] + row["synchronised_s"]
    predicted_s = model.step_s(number, processes_per_core=number / cores)
    return {
        "processes": number,
        "step ms": 1e3 * step_s,
        "data ms": 1e3 * row["data_s"],
        "compute ms": 1e3 * row["compute_s"],
        "communication ms": 1e3 * max(0.0, row["synchronised_s"] - row["compute_s"]),
        "all-reduce only ms": 1e3 * row["all_reduce_s"],
        "images/s": number * options.batch_size / step_s,
        "predicted step ms": 1e3 * predicted_s,
        "error": predicted_s / step_s - 1,
        "n": options.repeats,
    }


def describe_exact(row: results.Row, number: int) -> results.Row:
    return {
        "processes": number,
        "MB sent by each": 2 * (number - 1) / number * row["bytes"] / 1e6,
        "float step ms": 1e3 * row["synchronised_s"],
        "exact step ms": 1e3 * row["exact_s"],
        "float all-reduce only ms": 1e3 * row["all_reduce_s"],
        "in pairs only ms": 1e3 * row["pairwise_s"],
    }


if __name__ == "__main__":
    main()
