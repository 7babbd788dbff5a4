"""What `exact_run` adds to a step and to a sample of a loop over accelerate. About a minute."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from accel_trainer import exact_run

from . import results

FEW, MANY = 16, 128
MAX_STEP_US, MAX_SAMPLE_US = 60, 8


class Rows(Dataset[Tensor]):
    """Rows of a tensor, which code of the user's reads: each sample gets its seed."""

    def __init__(self, num_samples: int) -> None:
        self._rows = torch.randn(num_samples, 8)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        return self._rows[index]


@contextmanager
def batches_of(
    is_exact: bool, accelerator: Accelerator, folder: str, **parts: Any
) -> Iterator[Any]:
    if not is_exact:
        yield parts["loader"]
        return
    with exact_run(accelerator, folder, **parts, save_every=10**9) as run:
        for _ in run.epochs(1):
            yield run.batches()


def step_us(is_exact: bool, dataset: Any, batch_size: int) -> float:
    """Return the CPU time of a step: the lower decile, as other load can only add time."""
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    begun_ns = []
    with (
        tempfile.TemporaryDirectory() as folder,
        batches_of(is_exact, accelerator, folder, **parts) as batches,
    ):
        for batch in batches:
            begun_ns.append(time.thread_time_ns())
            inputs = batch if isinstance(batch, Tensor) else batch[0]
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    begun_ns = begun_ns[len(begun_ns) // 4 :]  # warm-up
    steps_ns = sorted(later - now for now, later in zip(begun_ns, begun_ns[1:], strict=False))
    return steps_ns[len(steps_ns) // 10] / 1000


def row_of(name: str, bound: float, samples: list[float]) -> results.Row:
    return {"what": name, "us": statistics.median(samples), "bound": bound} | {
        "lowest": min(samples),
        "highest": max(samples),
        "n": len(samples),
        "samples": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    started = results.environment()
    torch.set_num_threads(1)
    loops = {
        f"{kind}, {dataset}, {size}": partial(
            step_us,
            kind == "exact",
            Rows(options.steps * size)
            if dataset == "own"
            else TensorDataset(torch.randn(options.steps * size, 8)),
            size,
        )
        for dataset, size in (("tensors", FEW), ("own", FEW), ("own", MANY))
        for kind in ("plain", "exact")
    }
    measured = results.interleave(
        [*loops], lambda name: {"us": loops[name]()}, repeats=options.repeats
    )

    def added(case: str) -> list[float]:
        """Return what the run adds to a step in each round."""
        pairs = zip(measured[f"exact, {case}"], measured[f"plain, {case}"], strict=True)
        return [exact["us"] - plain["us"] for exact, plain in pairs]

    few, many = added(f"own, {FEW}"), added(f"own, {MANY}")
    samples = [(high - low) / (MANY - FEW) for low, high in zip(few, many, strict=True)]
    rows = [
        row_of("a step", MAX_STEP_US, added(f"tensors, {FEW}")),
        row_of("a sample", MAX_SAMPLE_US, samples),
    ]
    times = {
        name: statistics.median(each["us"] for each in rows) for name, rows in measured.items()
    }
    results.write(
        "own_loop",
        title="What exact_run adds to a loop over accelerate",
        how="One thread, Linear(8, 1), SGD. The same loop with and without `exact_run`, in "
        "interleaved rounds; a step is the thread's CPU time between two rounds of the loop: the "
        "lower decile of the last three quarters. A step's row is of a TensorDataset, whose "
        f"samples need no seeds; a sample's is what batches of {MANY} cost more than batches of "
        f"{FEW} of a dataset with code of its own.",
        tables={
            "microseconds that are added": rows,
            "microseconds of a step": [{"loop": name, "us": us} for name, us in times.items()],
        },
        started=started,
    )


if __name__ == "__main__":
    main()
