"""The results of one part, written as they come."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from .. import results

T = TypeVar("T")

HELD, FAILED, NOT_REACHED = "Held: ", "**Did not hold**: ", "Not reached: "


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a part runs, and how much it does: `is_tiny` tries it with a few steps, also without a
    GPU."""

    device: str
    dataset: str
    described: str
    photos: Path | None
    cache_dir: Path
    is_tiny: bool = False
    has_every_case: bool = True
    """Of a list of cases; False: only the first."""
    is_cifar10: bool = True
    num_repeats: int = 3
    """How often a loop is timed: each time is a process, which imports everything again."""

    def some(self, cases: Sequence[T]) -> Sequence[T]:
        """Return the cases of a list that are tried."""
        return cases if self.has_every_case else cases[:1]


@dataclass
class Page:
    """Tables, and what held; written after each row, so that whatever ends a part, its rows are
    kept."""

    part: str
    title: str
    folder: Path
    started: Mapping[str, Any]
    deadline_s: float
    """Of `time.monotonic`: no check begins later."""
    tables: dict[str, list[results.Row]] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    _running: list[str] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def add(self, caption: str, row: results.Row) -> None:
        with self._lock:
            self.tables.setdefault(caption, []).append(row)
            self.write()

    def judge(self, claim: str, *, holds: bool) -> None:
        self._find(f"{HELD if holds else FAILED}{claim}.")

    def fail(self, name: str, error: Exception) -> None:
        """Note a check that raised an error, with the last line of its message."""
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        said = (str(error).strip().splitlines() or [""])[-1][:200]
        self.judge(f"{name} ({type(error).__name__}: {said})", holds=False)

    def miss(self, name: str) -> None:
        """Note a check that is left out."""
        self._find(f"{NOT_REACHED}{name}.")

    def attempt(self, name: str, check: Callable[[], None]) -> None:
        """Run a check if there is time; if it fails, say so and go on with the next."""
        start_s = time.monotonic()
        if start_s > self.deadline_s:
            self.miss(name)
            return
        with self._lock:
            self._running.append(name)
            self.write()
        try:
            check()
        except Exception as error:  # the page says so, and the other checks may tell why
            self.fail(name, error)
        with self._lock:
            self._running.remove(name)
            self.write()
        print(f"{self.part}: {name}, {time.monotonic() - start_s:.0f} s", flush=True)

    def attempt_together(self, checks: Mapping[str, Callable[[], None]]) -> None:
        """Run checks that start processes and time nothing, one at once for each four cores:
        some start three processes, which all import torch first."""
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
            list(pool.map(self.attempt, checks.keys(), checks.values()))

    def write(self) -> None:
        """Write all that is known by now; a check that runs counts as not reached until it ends."""
        with self._lock:
            results.write(
                f"gpu_{self.part}",
                title=self.title,
                command=f"benchmarks.gpu --part {self.part}",
                how="Written as it came: what is missing was not reached.",
                tables=self.tables,
                goals=[*self.findings, *(f"{NOT_REACHED}{name}." for name in self._running)],
                started=self.started,
                folder=self.folder,
                is_shown=False,
            )

    def _find(self, line: str) -> None:
        with self._lock:
            self.findings.append(line)
            self.write()


def gpu_environment() -> results.Row:
    """Return the facts about the GPUs that `results.environment` lacks."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[
            0
        ]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = None
    return {"num_gpus": torch.cuda.device_count(), "cuda": torch.version.cuda, "driver": driver}
