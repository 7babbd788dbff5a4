"""Starts the recipes as users do, and reads what they left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from .. import results
from .page import Setting

SMALL = ("--model", "resnet8", "--batch-size", "64", "--seed", "0", "--quiet")


def command(setting: Setting, folder: Path, *flags: str, recipe: str = "cifar") -> list[str]:
    """Return the command of a run into `folder`."""
    where = ["--output-dir", str(folder), "--cache-dir", str(setting.cache_dir)]
    dataset = setting.dataset if recipe == "cifar" else str(setting.photos)
    return [sys.executable, f"recipes/{recipe}.py", "--dataset", dataset, *where, *flags]


def train(
    setting: Setting,
    folder: Path,
    *flags: str,
    recipe: str = "cifar",
    num_processes: int = 1,
    environ: Mapping[str, str] | None = None,
) -> str:
    """Train, and return what was printed; RuntimeError with its last lines if it failed."""
    python, *words = command(setting, folder, *flags, recipe=recipe)
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_processes),
    ]
    done = finish([python, *(launcher if num_processes > 1 else []), *words], environ or {})
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stdout[-600:]}")
    return done.stdout


def finish(
    words: Sequence[str], environ: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, whatever that is; what it printed is in `stdout`."""
    return subprocess.run(
        words,
        cwd=results.ROOT,
        env=os.environ | dict(environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill_and_resume(setting: Setting, folder: Path, *flags: str, at_step: int) -> int | None:
    """Train, kill the run once a checkpoint of `at_step` or later is there, and start it again to
    its end.

    Return the step of the newest checkpoint when it was killed; None: it had ended before.
    """
    words = command(
        setting, folder, *flags, "--checkpoint.every-n-steps", str(max(1, at_step // 2))
    )
    log = folder.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(words, cwd=results.ROOT, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None and newest_step(folder) < at_step:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        was_killed = process.wait() == -signal.SIGKILL
    killed_at = newest_step(folder) if was_killed else None
    subprocess.run(words, cwd=results.ROOT, check=True, stdout=subprocess.DEVNULL)
    return killed_at


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint, 0 without one."""
    return max(
        (int(path.name.split("-")[1]) for path in (folder / "checkpoints").glob("step-*")),
        default=0,
    )


def hashes(folder: Path, *, step: int | None = None) -> dict[str, str]:
    """Return the SHA-256 of the tensors of a checkpoint, as its manifest has them; None: of the
    newest."""
    number = newest_step(folder) if step is None else step
    (found,) = (
        path
        for path in (folder / "checkpoints").glob("step-*")
        if int(path.name.split("-")[1]) == number
    )
    files = json.loads((found / "manifest.json").read_text())["files"]
    return {name: file["sha256"] for name, file in files.items() if name.endswith(".safetensors")}


def rows(folder: Path, name: str) -> list[float]:
    """Return a column of metrics.jsonl."""
    lines: Sequence[str] = (folder / "metrics.jsonl").read_text().splitlines()
    return [row[name] for row in map(json.loads, lines) if name in row]


def result(folder: Path) -> results.Row:
    """Return result.json."""
    found: results.Row = json.loads((folder / "result.json").read_text())
    return found
