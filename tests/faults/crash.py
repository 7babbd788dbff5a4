"""The kill campaign: real training runs die in every way and are restarted until they are done.

As a command it runs a worker's share of a campaign and prints the tally as JSON; `test_crash.py`
starts the workers. A run's second attempt is always the same command as its first.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from accel_trainer import BatchConfig, CheckpointConfig, RecipeConfig
from accel_trainer.checkpoint.format import decode_files, list_checkpoints, read_files
from accel_trainer.core.errors import CheckpointError
from accel_trainer.core.filesystem import TEMPORARY_NAME
from tests import processes, workload
from tests.faults.disks import InterceptedDisk, When, installed

KEEP_LAST_N = 2
WHENS: tuple[When, ...] = ("before", "half", "after")
TIMES_AND_SIZES = {"samples_per_s", "wall_s", "peak_memory_bytes"}
# As a launcher does, the campaign ends a rank that outlives its peer: in the rendezvous none can
# notice.
SURVIVOR_TIMEOUT_S = 5.0


def make_config(folder: Path) -> RecipeConfig:
    """Return a config with all state: EMA, clipping, accumulation, early stopping, retention."""
    config = workload.make_config(
        folder,
        batch=BatchConfig(per_device_batch_size=8, global_batch_size=16, eval_batch_size=10),
        checkpoint=CheckpointConfig(every_n_steps=2, keep_last_n=KEEP_LAST_N, keep_every_n_steps=4),
    )
    return replace(
        config,
        trainer=replace(config.trainer, num_epochs=8, patience=1, monitor="eval_ema/accuracy"),
    )


# --- what a run does to the disk, by name ---


@dataclass(frozen=True)
class Operation:
    """A change of the disk: the `nth` of its kind to its path.

    A name and not a number in a sequence: the thread that saves and the one that trains take turns
    differently in each run.
    """

    kind: str
    path: str
    nth: int


class NamingDisk(InterceptedDisk):
    """Calls `meet` with the name of each change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def intercept(self, operation: str, path: Path, act: Any, act_half: Any, *details: Any) -> Any:
        relative = os.path.relpath(path, self._folder)
        parts = [_without_owner(part) for part in relative.split("/")]
        key = (operation, "/".join(parts))
        with self._lock:
            self._counts[key] += 1
            named = Operation(*key, self._counts[key])
        return self.meet(named, act, act_half)

    def meet(self, operation: Operation, act: Any, act_half: Any) -> Any:
        return act()


def _without_owner(part: str) -> str:
    """A temporary's name without the process and the time that make it unique."""
    return re.sub(r"-\d+-\d+$", "", part) if TEMPORARY_NAME.fullmatch(part) else part


class RecordingDisk(NamingDisk):
    """Logs the name of each change."""

    def meet(self, operation: Operation, act: Any, act_half: Any) -> Any:
        logging.info("operation %s", json.dumps(asdict(operation)))
        return act()


@dataclass(frozen=True)
class Kill:
    """A SIGKILL of the `victims` at a change of the main process's disk.

    `interruptions` has those at other moments.
    """

    at: Operation
    when: When = "before"
    victims: tuple[int, ...] = (0,)


class KillingDisk(NamingDisk):
    """Delivers a `Kill` at its operation."""

    def __init__(self, folder: Path, kill: Kill, pids: Path) -> None:
        super().__init__(folder)
        self._kill = kill
        self._pids = pids

    def meet(self, operation: Operation, act: Any, act_half: Any) -> Any:
        if operation != self._kill.at:
            return act()
        if 0 in self._kill.victims and self._kill.when != "before":
            act() if self._kill.when == "after" else act_half()
        for rank in sorted(self._kill.victims, reverse=True):  # itself last
            os.kill(int((self._pids / f"rank-{rank}.pid").read_text()), signal.SIGKILL)
        return act()  # another rank was killed, and this one's save goes on


# --- one run ---


def train(folder: Path, disk: str, kill: Kill | None, pids: Path) -> None:
    """What every attempt starts, in a process of its own."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rank = int(os.environ.get("RANK", 0))
    (pids / f"rank-{rank}.pid").write_text(str(os.getpid()))
    chosen = RecordingDisk(folder) if disk == "recording" else NamingDisk(folder)
    if kill is not None and rank == 0:
        chosen = KillingDisk(folder, kill, pids)
    with installed(chosen):
        workload.train(make_config(folder), num_train=44, norm="batch", dropout=0.2)


@dataclass(frozen=True)
class PendingUpdate:
    """How one start of the command ended."""

    codes: list[int | None]
    output: str

    @property
    def acknowledged(self) -> list[str]:
        return re.findall(r"^checkpoint (step-\d{10}-epoch-\d{5}) saved$", self.output, re.M)

    @property
    def operations(self) -> list[Operation]:
        return [
            Operation(**json.loads(line))
            for line in re.findall(r"^operation (.*)$", self.output, re.M)
        ]


def attempt(
    scratch: Path, kill: Kill | None = None, *, num_processes: int = 1, disk: str = "naming"
) -> PendingUpdate:
    """Start the command in `scratch`/run, kill it if asked to; return when no process is left."""
    logs = scratch / f"attempt-{len(list(scratch.glob('attempt-*')))}"
    logs.mkdir(parents=True)
    job = processes.start(
        train, scratch / "run", disk, kill, logs, num_processes=num_processes, folder=logs
    )
    codes = job.wait(SURVIVOR_TIMEOUT_S if kill is not None else 600)
    outputs = "\n".join(
        job.output(rank) for rank in range(num_processes) if (logs / f"rank-{rank}.log").exists()
    )
    return PendingUpdate(codes, outputs)


def outcome(run: Path) -> dict[str, Any]:
    """Return all that a finished run leaves, by file, without measured seconds and bytes."""
    files: dict[str, Any] = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        is_result = name.startswith(("checkpoints/", "export/")) or name in {
            "metrics.jsonl",
            "result.json",
        }
        is_temporary = any(TEMPORARY_NAME.fullmatch(part) for part in path.parts)
        if (
            path.is_dir()
            or not is_result
            or is_temporary
            or path.name in {"manifest.json", "COMMIT"}
        ):
            continue
        if path.name == "metrics.jsonl":
            files[name] = [_without_times(line) for line in path.read_text().splitlines()]
        elif path.name == "trainer.json":
            files[name] = json.loads(path.read_bytes())
            # Throughput numbers vary in length.
            files[name]["callbacks"]["MetricLogger"].pop("history_bytes")
        elif path.name == "result.json":
            files[name] = {
                k: v for k, v in json.loads(path.read_bytes()).items() if k not in TIMES_AND_SIZES
            }
        else:
            files[name] = path.read_bytes()
    return files


def _without_times(line: str) -> Any:
    try:
        return {
            name: value for name, value in json.loads(line).items() if not name.startswith("perf/")
        }
    except ValueError:
        return line  # half a row is a difference, and no reason to end the campaign


def valid_checkpoints(run: Path) -> list[str]:
    """The names of the whole checkpoints, the newest first."""
    names = []
    for path in list_checkpoints(run / "checkpoints"):
        try:
            decode_files(read_files(path), path)
        except CheckpointError:
            continue
        names.append(path.name)
    return names[::-1]


def leftovers(run: Path) -> list[Path]:
    return [path for path in run.rglob(".*") if TEMPORARY_NAME.fullmatch(path.name)]


# --- the campaign ---


@dataclass
class Tally:
    """What a kind of kill did.

    `lost` and what follows must be 0; `repairs` are starts that failed unkilled.
    """

    runs: int = 0
    kills: int = 0
    starts: int = 0
    acknowledged: int = 0
    ended_peers: int = 0
    lost: int = 0
    other_bytes: int = 0
    repairs: int = 0
    leftovers: int = 0
    seconds: float = 0.0

    def add(self, other: Tally) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def num_bad(self) -> int:
        return self.lost + self.other_bytes + self.repairs + self.leftovers


def survive(
    scratch: Path, kills: Sequence[Kill], reference: dict[str, Any], *, num_processes: int = 1
) -> Tally:
    """Start a run, deliver one kill per attempt, let it end, and compare.

    Complaints go to stdout.
    """
    tally = Tally(runs=1)
    run = scratch / "run"
    acknowledged: set[str] = set()
    start_s = time.monotonic()
    for kill in (*kills, None):
        this = attempt(scratch, kill, num_processes=num_processes)
        tally.starts += 1
        tally.kills += this.codes.count(-signal.SIGKILL)
        tally.ended_peers += this.codes.count(None)
        acknowledged.update(this.acknowledged)
        newest = sorted(acknowledged, reverse=True)[:KEEP_LAST_N]
        valid = valid_checkpoints(run)
        # A newer one, committed but not yet acknowledged, may have taken the place of the older.
        is_lost = len(valid) < len(newest) or any(
            v < a for v, a in zip(valid, newest, strict=False)
        )
        was_killed = -signal.SIGKILL in this.codes or None in this.codes
        has_failed = any(this.codes) and not was_killed
        tally.lost += is_lost
        tally.repairs += has_failed
        if is_lost or has_failed:
            print(
                f"after {kill}: acknowledged {newest}, valid {valid}, exit codes {this.codes}\n"
                f"{this.output}"
            )
        if not any(this.codes):
            break
    tally.acknowledged = len(acknowledged)
    left = leftovers(run)
    tally.leftovers = len(left)
    final = outcome(run)
    differing = sorted(
        name for name in {*final, *reference} if final.get(name) != reference.get(name)
    )
    tally.other_bytes = bool(differing)
    if left or differing:
        print(f"after {kills}: left {[path.name for path in left]}, other bytes in {differing}")
    tally.seconds = time.monotonic() - start_s
    return tally


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run: its files, and its disk operations."""

    files: dict[str, Any]
    operations: list[Operation]


def undisturbed(scratch: Path, *, num_processes: int) -> Reference:
    whole = attempt(scratch / "whole", num_processes=num_processes, disk="recording")
    assert whole.codes == [0] * num_processes, whole.output
    files = outcome(scratch / "whole" / "run")
    assert files["result.json"]["stop_reason"].startswith("early stopping"), files["result.json"]
    return Reference(files, whole.operations)


def operations_of_a_resume(scratch: Path, whole: Reference) -> list[Operation]:
    """Return what restarting a run killed half-way does to the disk, up to its first commit."""
    middle = next(o for o in whole.operations if o.kind == "rename" and "step-0000000006" in o.path)
    attempt(scratch / "halved", Kill(middle))
    resumed = attempt(scratch / "halved", disk="recording").operations
    commit = next(i for i, o in enumerate(resumed) if o.kind == "rename" and ".tmp-step-" in o.path)
    return resumed[: commit + 1]


Case = tuple[str, int, list[Kill]]
"""The kind of case, its number of processes, and the kill of each attempt."""


def cases(
    one: Reference, two: Reference, resume: list[Operation], effort: int, draw: random.Random
) -> Iterator[Case]:
    """Yield the campaign: 9 operations, with `effort` 100 all, each before, half-way and after."""
    every = [Kill(operation, when) for operation in one.operations for when in WHENS]
    num_kills = min(len(every), 9 + len(every) * (effort - 1) // 99)
    for index in range(num_kills):
        yield "at a change of the disk", 1, [every[index * len(every) // num_kills]]
    for index in range(effort):
        again = Kill(resume[index % len(resume)], WHENS[index % 3])
        yield "in a save, in the resume, again", 1, [draw.choice(every), again, draw.choice(every)]
    for index in range(max(3, effort * 3 // 5)):
        victims = ((0,), (1,), (0, 1))[index % 3]
        name = "both" if len(victims) == 2 else f"rank {victims[0]}"
        yield (
            f"2 processes, {name}",
            2,
            [Kill(draw.choice(two.operations), draw.choice(WHENS), victims)],
        )


def run_share(scratch: Path, *, effort: int, worker: int, num_workers: int) -> dict[str, Tally]:
    """Run every `num_workers`-th case and return the tally by kind."""
    references = {n: undisturbed(scratch / f"reference-{n}", num_processes=n) for n in (1, 2)}
    resume = operations_of_a_resume(scratch, references[1])
    tallies: dict[str, Tally] = {}
    all_cases = list(cases(references[1], references[2], resume, effort, random.Random(0)))
    for number, (kind, num_processes, kills) in enumerate(all_cases[worker::num_workers]):
        folder = scratch / str(number)
        tally = survive(folder, kills, references[num_processes].files, num_processes=num_processes)
        tallies.setdefault(kind, Tally()).add(tally)
        shutil.rmtree(folder)
    return tallies


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--effort", type=int, default=1)
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--num-workers", type=int, default=1)
    options = parser.parse_args()
    tallies = run_share(
        options.scratch,
        effort=options.effort,
        worker=options.worker,
        num_workers=options.num_workers,
    )
    print("tally " + json.dumps({kind: asdict(tally) for kind, tally in tallies.items()}))


if __name__ == "__main__":
    main()
