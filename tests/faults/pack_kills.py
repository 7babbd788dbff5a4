"""Kill `accel-trainer pack` at random moments and restart it until it is done.

Is a byte different?

    python -m tests.faults.pack_kills --number 100 --log pack_kills.jsonl

The log has a line for each trial of one to three kills. The same command continues after the last
one.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from accel_trainer.cli.data import pack as module
from accel_trainer.cli.main import main
from tests.faults.campaign import run_campaign
from tests.vision.make_photos import encoded, photo

CLASSES = ("ant", "bee", "cow")
PER_CLASS = 16
FLAGS = ("--short-side", "120", "--shard-size", "8", "--num-workers", "2")
context = multiprocessing.get_context("fork")


def write_source(folder: Path) -> Path:
    """Write photos to make smaller, and some that are small."""
    for split, number in (("train", PER_CLASS), ("val", 3)):
        for place, name in enumerate(CLASSES):
            (folder / split / name).mkdir(parents=True)
            for index in range(number):
                size = (100, 90) if index % 5 == 0 else (300 + index, 200)
                data = encoded(photo(*size, seed=10 * index + place))
                (folder / split / name / f"{index}.jpg").write_bytes(data)
    return folder


def contents(folder: Path) -> dict[str, str]:
    """Return the hash of each file below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def pack(source: Path, out: Path, delay_s: float | None = None) -> None:
    """Pack in this process, which kills itself `delay_s` after it has begun to write."""
    if delay_s is not None:
        claim = module._claim

        def claim_and_wait(*arguments: Any) -> None:
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            claim(*arguments)

        module._claim = claim_and_wait
    sys.exit(
        main(["pack", str(source), str(out), "--cache-dir", str(source.parent / "cache"), *FLAGS])
    )


def start(source: Path, out: Path, log: Path, delay_s: float | None = None) -> int | None:
    """Return the exit code of one start."""

    def run() -> None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        pack(source, out, delay_s)

    process = context.Process(target=run)
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None
    return process.exitcode


class Campaign:
    """A source, and what packing it undisturbed writes."""

    def __init__(self, scratch: Path) -> None:
        # The threads that it warns of are torch's and idle.
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        self._scratch = scratch
        self._source = write_source(scratch / "photos")
        self._log = scratch / "log"
        for _ in range(2):  # the first start of a machine is slow
            whole = scratch / "whole"
            shutil.rmtree(whole, ignore_errors=True)
            began = time.perf_counter()
            assert start(self._source, whole, self._log) == 0, self._log.read_text()
            self._whole_s = time.perf_counter() - began
        self._expected = contents(whole)

    def run_trial(self, number: int) -> dict[str, Any]:
        """Kill one to three starts at random moments, then let one end."""
        draw = random.Random(number)
        out = self._scratch / f"out-{number}"
        delays = [draw.uniform(0, self._whole_s) for _ in range(draw.randint(1, 3))]
        codes: list[int | None] = []
        is_early = False
        for delay_s in delays:
            codes.append(start(self._source, out, self._log, delay_s))
            is_early = is_early or (
                (out / "dataset_dict.json").exists() and contents(out) != self._expected
            )
        codes.append(start(self._source, out, self._log))
        packed = contents(out)
        differing = sorted(
            name
            for name in {*packed, *self._expected}
            if packed.get(name) != self._expected.get(name)
        )
        is_ok = (
            codes[-1] == 0 and set(codes) <= {0, -signal.SIGKILL} and not differing and not is_early
        )
        said = {} if is_ok else {"said": self._log.read_text()[-2000:]}
        shutil.rmtree(out)
        num_kills = codes.count(-signal.SIGKILL)
        return {
            "number": number,
            "delays_s": delays,
            "codes": codes,
            "kills": num_kills,
            "ok": is_ok,
        } | {
            "complete_before_its_end": is_early,
            "differing": differing,
            **said,
        }


def summary(results: list[dict[str, Any]]) -> str:
    kills = sum(result["kills"] for result in results)
    ok = sum(result["ok"] for result in results)
    return (
        f"{len(results)} packings, {kills} kills; {ok} ended with the bytes of an undisturbed one"
    )


def command_line() -> None:
    results = run_campaign(lambda scratch: Campaign(scratch).run_trial, number=100)
    print(summary(results))
    sys.exit(not all(result["ok"] for result in results))


if __name__ == "__main__":
    command_line()
