"""What a step costs beside a raw loop and other toolkits, and what an epoch of ResNet-18 costs from
files."""

from __future__ import annotations

import statistics
import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from .. import loops, overhead, results
from . import copies
from .page import Page, Setting
from .runs import result, rows, train

OURS = "ours, all on"
LOOPS = ("raw", OURS, "accelerate", "Lightning", "HF Trainer")
FEW_LOOPS = LOOPS[:3]  # of nets, whose steps differ less from toolkit to toolkit
STEPS = {"tiny": 4000, "resnet18": 300, "fast resnet50": 60}
TINY_STEPS = {"tiny": 8, "resnet8": 8, "fast resnet8": 8}
MAX_OF_RAW, MAX_OF_RAW_TINY, MAX_SYNCS = 1.15, 1.65, 1
RESNET18 = (
    "--config",
    "recipes/configs/cifar10_resnet18.yaml",
    "--epochs",
    "1",
    "--quiet",
    "--seed",
    "0",
)


def run(page: Page, setting: Setting) -> None:
    num_steps = TINY_STEPS if setting.is_tiny else STEPS
    page.attempt("syncs", partial(_count_syncs, page, setting))
    for model in setting.some(list(num_steps)):
        page.attempt(
            f"a step of {model}", partial(_measure_step, page, setting, model, num_steps[model])
        )
    page.attempt("copies beside the computation", partial(copies.trace_copies, page, setting))
    page.attempt("data on the device", partial(_compare_with_data_on_device, page, setting))
    for precision in setting.some(
        ("no", "bf16") if setting.device == "cpu" else ("bf16", "fp16", "no")
    ):
        page.attempt(f"ResNet-18, {precision}", partial(_train_epoch, page, setting, precision))
    if setting.has_every_case:
        page.attempt(
            "ResNet-18, bf16, compiled", partial(_train_epoch, page, setting, "bf16", "--compile")
        )


def _measure_step(page: Page, setting: Setting, model: str, steps: int) -> None:
    """Time each loop in a process of its own, in rounds of all; with a row for each process."""
    names: Sequence[str] = LOOPS if model == "tiny" else FEW_LOOPS
    if not setting.has_every_case:
        names = LOOPS[:2]
    precision = "bf16" if model.startswith("fast") else "float32"
    of_raw: dict[str, list[float]] = {name: [] for name in names if overhead.is_installed(name)}
    for number in range(1, setting.num_repeats + 1):
        raw_us = 0.0
        for name in of_raw:
            found = results.in_process("loops", name, model, str(steps), setting.device)
            raw_us = raw_us or found["step_us"]  # the first of a round
            of_raw[name].append(found["step_us"] / raw_us)
            row = {
                "loop": name,
                "round": number,
                "us/step": found["step_us"],
                "of raw": of_raw[name][-1],
                "start to first step s": found["start_wall_s"],
                "RSS MB": found["rss_mb"],
            }
            page.add(f"A step of {model}, batch 128, {precision}", row)
            if name == OURS and number == setting.num_repeats and not setting.is_tiny:
                _judge_step(page, model, statistics.median(of_raw[name]))


def _judge_step(page: Page, model: str, of_raw: float) -> None:
    limit = MAX_OF_RAW_TINY if model == "tiny" else MAX_OF_RAW
    page.judge(
        f"a step of {model} takes {of_raw:.2f} times a raw loop's, at most {limit}",
        holds=of_raw <= limit,
    )


def _count_syncs(page: Page, setting: Setting) -> None:
    """Count the times that the host waits for the device in 50 steps, beyond those of a run of
    25."""
    counts = {}
    for num_steps in (25, 75):
        model = loops.make_model("tiny").to(setting.device)
        batches = DataLoader(loops.Batches((32,), num_steps, setting.device), batch_size=None)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            if setting.device == "cuda":
                torch.cuda.set_sync_debug_mode("warn")
            loops.LOOPS[OURS](model, batches, num_steps)
            if setting.device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        counts[num_steps] = sum("synchronizing" in str(warning.message) for warning in found)
    more = counts[75] - counts[25]
    page.add(
        "Waits of the host for the device",
        {"in 25 steps": counts[25], "in 75 steps": counts[75], "in 50 more": more},
    )
    page.judge(
        f"50 more steps, with a row of their mean loss, wait for the device {more} times more, "
        f"at most {MAX_SYNCS}",
        holds=more <= MAX_SYNCS,
    )


def _compare_with_data_on_device(page: Page, setting: Setting) -> None:
    """Compare an epoch of the recipe with the same steps on batches that lie on the device: the
    limit."""
    net, steps = ("resnet8", 8) if setting.is_tiny else ("resnet18", 300)
    row = results.in_process("loops", OURS, f"fast {net}", str(steps), setting.device)
    limit = loops.BATCH_SIZE / row["step_us"] * 1e6
    batch = ("--batch-size", str(loops.BATCH_SIZE), "--global-batch-size", str(loops.BATCH_SIZE))
    few = ("--max-steps", str(steps)) if setting.is_tiny else ()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        train(
            setting,
            folder,
            *RESNET18,
            "--model",
            net,
            *batch,
            "--mixed-precision",
            "bf16",
            "--compile",
            "--trainer.log-every-n-steps",
            "1" if setting.is_tiny else "50",
            *few,
        )
        speeds = rows(folder, "perf/samples_per_s")
    found = {
        "net": net,
        "images/s": speeds[-1],
        "on the device": limit,
        "of it %": 100 * speeds[-1] / limit,
    }
    page.add("Images beside the same loop with its batches on the device, bf16, compiled", found)


def _train_epoch(page: Page, setting: Setting, precision: str, *flags: str) -> None:
    few = (
        "--model",
        "resnet8",
        "--batch-size",
        "64",
        "--global-batch-size",
        "64",
        "--max-steps",
        "1",
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        chosen = (
            *RESNET18,
            "--mixed-precision",
            precision,
            *flags,
            *(few if setting.is_tiny else ()),
        )
        train(setting, folder, *chosen)
        found = result(folder)
        waited = rows(folder, "perf/data_wait_fraction")
    row = {
        "precision": " ".join((precision, *flags)),
        "images/s": found["samples_per_s"],
        "wall s": found["wall_s"],
        "waiting for data %": 100 * sum(waited) / len(waited) if waited else None,
        "memory GiB": found["peak_memory_bytes"] / 2**30,
        "accuracy %": 100 * found["metrics"]["eval/accuracy"],
    }
    page.add(f"An epoch of ResNet-18 on {setting.described}", row)
