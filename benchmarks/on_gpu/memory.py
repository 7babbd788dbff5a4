"""Memory on a GPU: beside a raw loop, when there is none left, and over epochs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from .. import results
from .page import Page, Setting
from .runs import SMALL, command, rows, train

# The peak of a loop of `benchmarks.loops`; a process each, since torch keeps what it once reserved.
PEAK = """
import sys, torch
from torch.utils.data import DataLoader
from benchmarks import loops
loop, name, steps, device = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
model = loops.make_model(name).to(device)
batches = loops.Batches(loops.input_shape(name), steps, device)
loops.LOOPS[loop](model, DataLoader(batches, batch_size=None), steps)
print(torch.cuda.max_memory_allocated() if device == "cuda" else 0)
"""
# A recipe that may use only a part of the GPU's memory.
CRAMPED = """
import runpy, sys, torch
torch.cuda.set_per_process_memory_fraction(float(sys.argv.pop(1)))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
MAX_OF_RAW, MAX_GROWTH_GIB = 1.1, 0.01


def run(page: Page, setting: Setting) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checks = {
            "peak": partial(_measure_peak, page, setting),
            "growth": partial(_measure_growth, page, setting, Path(folder) / "long"),
        }
        if setting.device == "cuda":
            checks["out of memory"] = partial(_run_out, page, setting, Path(folder))
        page.attempt_together(checks)


def _measure_peak(page: Page, setting: Setting) -> None:
    model, steps = ("tiny", "8") if setting.is_tiny else ("resnet18", "30")
    peaks = {}
    for loop in ("raw", "ours, all on"):
        words = [sys.executable, "-W", "ignore", "-c", PEAK, loop, model, steps, setting.device]
        done = subprocess.run(words, cwd=results.ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-600:])
        peaks[loop] = int(done.stdout.splitlines()[-1])
        page.add(f"Peak of {model}, batch 128", {"loop": loop, "MiB": peaks[loop] / 2**20})
    if setting.device == "cuda":
        holds = peaks["ours, all on"] <= MAX_OF_RAW * peaks["raw"]
        page.judge(f"the peak is at most {MAX_OF_RAW:g} times a raw loop's", holds=holds)


def _measure_growth(page: Page, setting: Setting, folder: Path) -> None:
    """Three epochs, whose last evaluation batch is smaller than the others."""
    few = ("--max-steps", "4") if setting.is_tiny else ()
    flags = (
        "--epochs",
        "3",
        "--batch.eval-batch-size",
        "300",
        "--trainer.log-every-n-steps",
        "1" if setting.is_tiny else "50",
    )
    train(setting, folder, *SMALL, *flags, *few)
    peaks = rows(folder, "perf/peak_memory_gib")
    page.add(
        "Peak memory in GiB over three epochs",
        {"first row": peaks[0], "middle": peaks[len(peaks) // 2], "last": peaks[-1]},
    )
    if setting.device == "cuda":
        grown = peaks[-1] - peaks[len(peaks) // 2]
        page.judge(
            f"the peak grows by {grown:.3f} GiB after the middle", holds=grown <= MAX_GROWTH_GIB
        )


def _run_out(page: Page, setting: Setting, folder: Path) -> None:
    """A real out-of-memory error: what the line advises must work."""
    advised = ("--global-batch-size", "4096", "--accumulate", "64")
    for name, more in {"as asked": (), "as advised, again and again": advised}.items():
        flags = (
            "--model",
            "resnet18",
            "--batch-size",
            "4096",
            "--max-steps",
            "2",
            "--seed",
            "0",
            *more,
        )
        words = command(setting, folder / name.replace(" ", "-"), *flags)
        cramped = [sys.executable, "-c", CRAMPED, "0.04", *words[1:]]
        done = subprocess.run(
            cramped, cwd=results.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        line = next(
            (line for line in done.stdout.splitlines() if "out of memory" in line), "no such line"
        )
        page.add(
            "4 % of the GPU's memory",
            {"start": name, "exit code": done.returncode, "line": line[:300]},
        )
        if more:
            page.judge("with --accumulate the same global batch fits", holds=done.returncode == 0)
