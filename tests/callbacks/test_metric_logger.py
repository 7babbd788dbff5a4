from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from accel_trainer.callbacks.metric_logger import Meters
from accel_trainer.callbacks.samples_so_far import SamplesSoFar
from accel_trainer.core.timing import Stopwatch
from accel_trainer.core.types import StepReport
from accel_trainer.distributed.accelerator import RuntimeConfig, start_accelerator

from .. import processes
from ..joined import joined_processes

NUM_STEPS = 600  # more than twice what is kept before it is folded
SAMPLES_PER_STEP = 6


def losses(step: int) -> list[float]:
    """The float32 losses of a step's samples: any split of them over processes has the same exact
    sum."""
    return (
        torch.rand(SAMPLES_PER_STEP, generator=torch.Generator().manual_seed(step)).mul(20).tolist()
    )


def report(step: int, *, num_processes: int = 1, process_index: int = 0) -> StepReport:
    """A process's part of step `step`.

    Quarters of losses keep the sum over a share exact in float32.
    """
    share = (
        torch.tensor(losses(step)).mul(4).round().div(4).tensor_split(num_processes)[process_index]
    )
    return StepReport(
        optimizer_step=step,
        epoch=0,
        learning_rate=0.1,
        loss_sum=share.sum() * (float("nan") if was_skipped(step) else 1.0),
        sums={"accuracy": (share > 10).sum()},
        num_samples=SAMPLES_PER_STEP,
        grad_norm=torch.tensor(float("inf") if was_skipped(step) else 1 + step / 7),
        was_skipped=was_skipped(step),
    )


def was_skipped(step: int) -> bool:
    return step % 97 == 5


def expected(steps: range) -> dict[str, float]:
    updates = [step for step in steps if not was_skipped(step)]
    rounded = [round(loss * 4) / 4 for step in updates for loss in losses(step)]
    norms = [float(torch.tensor(1 + step / 7)) for step in updates]
    skipped = len(steps) - len(norms)
    return {
        "train/loss": math.fsum(rounded) / len(rounded),
        "train/accuracy": sum(loss > 10 for loss in rounded) / len(rounded),
        "optim/grad_norm": math.fsum(norms) / len(norms),
        **({"optim/skipped_steps": float(skipped)} if skipped else {}),
    }


def meters() -> Meters:
    return meters_on(start_accelerator(RuntimeConfig(num_threads=1)))


def meters_on(accelerator: Accelerator) -> Meters:
    return Meters(accelerator, SamplesSoFar(accelerator, is_on=False))


@pytest.mark.parametrize("num_steps", [1, 255, 256, 257, NUM_STEPS])
def test_means_are_exact_over_the_interval(num_steps: int) -> None:
    running = meters()
    for step in range(num_steps):
        running.update(report(step))
    assert running.read() == expected(range(num_steps))


def test_a_read_starts_a_new_interval() -> None:
    running = meters()
    for first, last in ((0, 10), (10, 300), (300, 301)):
        for step in range(first, last):
            running.update(report(step))
        assert running.read() == expected(range(first, last))
    assert running.read() == {}


def test_means_do_not_depend_on_when_they_were_saved_or_loaded() -> None:
    chance = random.Random(0)
    for _ in range(5):
        running = meters()
        for step in range(NUM_STEPS):
            running.update(report(step))
            if chance.random() < 0.02:
                state = json.loads(json.dumps(running.state_dict()))  # plain values
                if chance.random() < 0.5:
                    running = meters()
                    running.load_state_dict(state)
        assert running.read() == expected(range(NUM_STEPS))


def test_means_of_float64_losses_do_not_depend_on_when_they_were_saved() -> None:
    draws = torch.rand(NUM_STEPS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    reports = [report(0)._replace(loss_sum=loss) for loss in draws]
    undisturbed = meters()
    saved = meters()
    for number, each in enumerate(reports):
        undisturbed.update(each)
        saved.update(each)
        if number % 7 == 0:
            saved.state_dict()
    means = undisturbed.read()
    assert saved.read() == means
    mean = float(draws.mean()) / SAMPLES_PER_STEP
    assert means["train/loss"] == pytest.approx(mean, rel=2**-35)


def test_a_state_replaces_what_was_counted_before() -> None:
    running, other = meters(), meters()
    for step in range(10):
        running.update(report(step))
        other.update(report(step + 50))
    other.load_state_dict(running.state_dict())
    assert other.read() == running.read() == expected(range(10))


def test_an_empty_state_is_a_state() -> None:
    running = meters()
    running.load_state_dict(meters().state_dict())
    running.update(report(1))
    assert running.read() == expected(range(1, 2))


def test_skipped_steps_are_counted_and_their_numbers_are_not() -> None:
    running = meters()
    for step in (4, 5, 6):
        running.update(report(step))
    row = running.read()
    assert row["optim/skipped_steps"] == 1.0
    assert row["optim/grad_norm"] == pytest.approx(1 + 5 / 7, rel=1e-6)
    running.update(report(5))
    row = running.read()
    assert row == {"optim/skipped_steps": 1.0}


def test_without_norms_none_is_reported() -> None:
    running = meters()
    running.update(StepReport(1, 0, 0.1, torch.tensor(3.0), {}, 2, None, False))
    assert running.read() == {"train/loss": 1.5}


def test_means_cover_all_processes_and_move_to_any_number_of_them(tmp_path: Path) -> None:
    moves = [(2, 0, 100), (3, 100, 400), (1, 400, 500), (2, 500, NUM_STEPS)]
    for num_processes, first, last in moves:
        arguments = (tmp_path / "state.json", first, last)
        processes.run(
            count_steps, *arguments, num_processes=num_processes, folder=tmp_path / str(first)
        )
    assert json.loads((tmp_path / "state.json").read_text())["read"] == expected(range(NUM_STEPS))


def count_steps(path: Path, first: int, last: int) -> None:
    """Go on from the state at `path`, by whatever number of processes it was left there."""
    with joined_processes() as accelerator:
        running = meters_on(accelerator)
        if path.exists():
            running.load_state_dict(json.loads(path.read_text())["state"])
        accelerator.wait_for_everyone()
        where = {
            "num_processes": accelerator.num_processes,
            "process_index": accelerator.process_index,
        }
        for step in range(first, last):
            running.update(report(step, **where))
        result: dict[str, Any] = {"state": running.state_dict(), "read": running.read()}
        if accelerator.is_main_process:
            path.write_text(json.dumps(result))
        assert result["read"] == expected(range(last))


def test_a_clock_counts_the_waiting_and_not_what_is_done_with_the_items(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0

    def items() -> Iterator[int]:
        nonlocal now_s
        for item in range(3):
            now_s += 1.0
            yield item

    monkeypatch.setattr(
        "accel_trainer.core.timing.time", SimpleNamespace(perf_counter=lambda: now_s)
    )
    clock, seen = Stopwatch(), []
    for item in clock.around(items()):
        now_s += 100.0
        seen.append(item)
    assert (seen, clock.seconds) == ([0, 1, 2], 3.0)
