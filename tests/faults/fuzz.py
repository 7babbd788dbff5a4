"""Damaged and hostile checkpoints: no damage is taken for a good one, and none runs code.

Blind mutations damage files; the hashes must catch every one, in one line. Re-hashed ones come from
somebody who recomputes the hashes; what they then hold may be plain data or any error.
"""

from __future__ import annotations

import os
import pickle
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_trainer.checkpoint import loading
from accel_trainer.checkpoint.format import read_files
from accel_trainer.core.errors import CheckpointError
from tests.faults.mutations import damage_folder, forge
from tests.faults.tiny_run import continue_run, name_at

MAX_SECONDS = 1.0
MEMORY = Path("/dev/shm")
_CLEAR_PEAK = Path("/proc/self/clear_refs")
# Raised by the interpreter when something runs code or starts programs.
_CODE_EVENTS = {
    "pickle.find_class",
    "exec",
    "compile",
    "import",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "subprocess.Popen",
}


class Payload:
    """Unpickling this makes a directory that says so."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.trap),)


class CodeWatch:
    """Counts what would run code while it is on.

    Python cannot remove an audit hook, so there is one.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.events: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and event in _CODE_EVENTS:
            self.events.append(f"{event} {str(arguments)[:80]}")


WATCH = CodeWatch()


@dataclass
class Summary:
    """What a campaign found."""

    num_cases: int = 0
    num_accepted: int = 0
    num_code_events: int = 0
    max_s: float = 0.0
    rss_growth_bytes: int = 0
    problems: list[str] = field(default_factory=list)


class Campaign:
    """Writes an altered checkpoint again and again and tries to load it."""

    def __init__(self, scratch: Path, *, seed: int) -> None:
        self.scratch = scratch
        self.seed = seed
        self.summary = Summary()
        self.trap = scratch / "code-was-run"
        self.payload = pickle.dumps(Payload(self.trap))
        continue_run(scratch, last_step=1)
        self.directory = scratch / "checkpoints"
        self.name = name_at(1)
        found = read_files(self.directory / self.name)
        self.original = {name: bytes(data) for name, data in found.items()}
        self._load()

    def run(self, num_cases: int, *, is_blind: bool) -> Summary:
        before = _reset_peak_memory_bytes()
        for case in range(num_cases):
            draw = random.Random(f"{self.seed} {is_blind} {case}")
            files = dict(self.original)
            label = "" if is_blind else forge(files, draw, self.payload)
            shutil.rmtree(self.directory)
            (self.directory / self.name).mkdir(parents=True)
            for name, data in files.items():
                (self.directory / self.name / name).write_bytes(data)
            if is_blind:
                label = damage_folder(self.directory / self.name, draw, self.payload)
            self._try(f"case {case}: {label}", is_blind=is_blind)
        self.summary.rss_growth_bytes = _peak_memory_bytes() - before
        return self.summary

    def _load(self) -> None:
        loading.load_checkpoint(self.directory, self.name)

    def _try(self, label: str, *, is_blind: bool) -> None:
        summary = self.summary
        summary.num_cases += 1
        start = time.process_time()  # what else runs on the machine does not count
        WATCH.events.clear()
        WATCH.is_on = True
        try:
            self._load()
            summary.num_accepted += 1
            if is_blind:
                summary.problems.append(f"{label}: accepted")
        except CheckpointError as error:
            if "\n" in str(error) or is_blind and self.name not in str(error):
                summary.problems.append(
                    f"{label}: not one line that names a file: {str(error)[:200]!r}"
                )
        except Exception as error:
            if is_blind:  # what somebody has forged may also end in an error of Python
                summary.problems.append(f"{label}: {type(error).__name__}: {str(error)[:200]}")
        finally:
            WATCH.is_on = False
        seconds = time.process_time() - start
        summary.max_s = max(summary.max_s, seconds)
        if seconds > MAX_SECONDS:
            summary.problems.append(f"{label}: took {seconds:.1f} s")
        if self.trap.exists() or WATCH.events:
            summary.num_code_events += 1
            summary.problems.append(f"{label}: ran code: {WATCH.events[:3]}")


def run_campaign(num_cases: int, *, is_blind: bool, seed: int = 0) -> Summary:
    """Try `num_cases` altered checkpoints."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as scratch:
        return Campaign(Path(scratch), seed=seed).run(num_cases, is_blind=is_blind)


def _reset_peak_memory_bytes() -> int:
    """Let the peak start again at what is in use now, where the system can, and return it."""
    if _CLEAR_PEAK.exists():
        _CLEAR_PEAK.write_text("5")
    return _peak_memory_bytes()


def _peak_memory_bytes() -> int:
    if _CLEAR_PEAK.exists():
        (line,) = (
            line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line
        )
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
