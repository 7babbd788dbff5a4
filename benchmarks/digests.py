"""What the digests in the rows cost: each by itself, and the loop with and without them.

About 6 minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from accel_trainer import TrainerConfig
from accel_trainer.core.digest import digest_of, samples_digest, sum_of_samples

from . import results
from .loops import BATCH_SIZE, input_shape, make_model, make_optimizer

MODELS = {"tiny": 200, "resnet20": 8, "resnet18": 3}  # and the steps that are timed
WITH, WITHOUT, TINY_STEPS = "ours, all on", "ours, without digests", "4000"


def median_us(call: Callable[[], object], repeats: int) -> float:
    """Return the median of the CPU time of this thread."""
    times_ns = []
    for _ in range(repeats):
        begun_ns = time.thread_time_ns()
        call()
        times_ns.append(time.thread_time_ns() - begun_ns)
    return statistics.median(times_ns) / 1000


def measure_parts(name: str) -> dict[str, float]:
    """Return microseconds of a step, and of the digests, on one thread."""
    torch.set_num_threads(1)
    model = make_model(name)
    optimizer = make_optimizer(model)
    inputs = torch.randn(BATCH_SIZE, *input_shape(name))
    targets = torch.randint(0, 10, (BATCH_SIZE,))
    interval = TrainerConfig().digest_every_n_steps or 1
    ids = [(step, torch.randint(50_000, (BATCH_SIZE,))) for step in range(interval)]

    def step() -> None:
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return {
        "num_weights": sum(weight.numel() for weight in model.parameters()),
        "step_us": median_us(step, MODELS[name]),
        "state_us": median_us(
            lambda: (digest_of(model.state_dict()), digest_of(optimizer.state_dict())), 15
        ),
        "samples_us": median_us(lambda: samples_digest(sum_of_samples(ids)), 15),
    }


def parts_row(name: str, repeats: int) -> results.Row:
    parts = [results.in_process("digests", "--parts", name) for _ in range(repeats)]
    config = TrainerConfig()
    shares = [
        (each["state_us"] + each["samples_us"]) / config.digest_every_n_steps / each["step_us"]
        for each in parts
    ]
    return {
        "net": name,
        "weights": f"{parts[0]['num_weights']:,}",
        "step ms": statistics.median(each["step_us"] for each in parts) / 1000,
        "weights and optimizer ms": statistics.median(each["state_us"] for each in parts) / 1000,
        "samples ms": statistics.median(each["samples_us"] for each in parts) / 1000,
        "share of the steps %": f"{100 * statistics.median(shares):.2g}",
        "highest %": f"{100 * max(shares):.2g}",
        "n": repeats,
    }


def loop_rows(repeats: int) -> list[results.Row]:
    measured = results.interleave(
        [WITHOUT, WITH],
        lambda loop: results.in_process("loops", loop, "tiny", TINY_STEPS, "cpu"),
        repeats=repeats,
    )
    return [
        {
            "loop": loop,
            "us/step, mean": statistics.median(row["mean_step_us"] for row in measured[loop]),
            "of without": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
            "n": repeats,
        }
        for loop in (WITHOUT, WITH)
        if (
            ratios := [
                mine["mean_step_us"] / base["mean_step_us"]
                for mine, base in zip(measured[loop], measured[WITHOUT], strict=True)
            ]
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--nets", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--parts", choices=MODELS, help="measure once, and print it as JSON")
    options = parser.parse_args()
    if options.parts:
        print(json.dumps(measure_parts(options.parts)))
        return
    started = results.environment()
    config = TrainerConfig()
    parts = [parts_row(name, min(3, options.repeats)) for name in options.nets]
    loops = loop_rows(options.repeats)
    results.write(
        "digests",
        title="Digests in the rows",
        how=f"SGD with momentum, batches of {BATCH_SIZE}, one thread, CPU time of the thread. The "
        f"weights, the optimizer and the samples every {config.digest_every_n_steps} steps, the "
        "default. The tiny net's loops are whole processes, interleaved; ratios within a round.",
        tables={
            "Each by itself, beside a plain step": parts,
            "The loop of the tiny net with and without them": loops,
        },
        goals=[
            "At most 2 % of ResNet-20 and 1 % of our step of the tiny net: "
            f"{parts[1]['share of the steps %']} %, {100 * (loops[1]['of without'] - 1):.2g} %.",
        ],
        started=started,
    )


if __name__ == "__main__":
    main()
