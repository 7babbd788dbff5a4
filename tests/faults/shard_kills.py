"""Kills one of several processes at each disk change of a sharded save, and starts again."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests import processes
from tests.faults.disks import When, installed
from tests.faults.tiny_run import leftovers, name_at, valid_steps
from tests.faults.tiny_shards import ArmedDisk, KillingAt, Run

WHENS: tuple[When, ...] = ("before", "half", "after")
NUM_CHANGES = (51, 15)  # of a save, by process; a test counts them
_PHASES = {
    "best.json": "after the commit",
    "rename": "commit",
    "checkpoints": "commit",
    "COMMIT": "manifest and COMMIT",
    "manifest": "manifest and COMMIT",
    "metrics": "manifest and COMMIT",
    "safetensors": "tensors of a process",
    "json": "other files of main",
    "sync_directory": "tensors of a process",
    "make_directory": "begin",
}


@dataclass(frozen=True)
class Kill:
    """A SIGKILL of process `rank` at change number `at` of its part of a save."""

    rank: int
    at: int
    when: When


ALL_KILLS = [
    Kill(rank, at, when)
    for rank, count in enumerate(NUM_CHANGES)
    for at in range(count)
    for when in WHENS
]


@dataclass
class Tally:
    """What a campaign did; `problems` must be empty."""

    kills: Counter[str] = field(default_factory=Counter)
    committed: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def attempt(folder: Path, kill: Kill | None) -> None:
    """Resume, save a step, and save another in which a process is killed."""
    try:
        run = Run(folder)
        run.save()
        if kill is not None:
            disk = KillingAt(kill.at, kill.when) if run.rank == kill.rank else ArmedDisk()
            with installed(disk):
                disk.is_armed = True
                run.save()
                run.save()  # the process may have been killed when the other knew of the commit
        run.end()
    except BaseException as error:
        os.write(1, f"ended by {type(error).__name__}: {str(error).splitlines()[0]}\n".encode())
        os._exit(1)  # as `main` does: destroying the group would wait for the dead


def phase_of(operation: str, rank: int) -> str:
    """Return the phase of a save to which a change belongs."""
    found = next((phase for word, phase in _PHASES.items() if word in operation), operation)
    return f"process {rank}, {found}"


def run_kills(folder: Path, kills: Sequence[Kill], num_processes: int = 2) -> Tally:
    """Deliver one kill per start of the same run, and look after each at what is there."""
    tally = Tally()
    newest = ""
    for number, kill in enumerate([*kills, None]):
        logs = folder.with_name(f"{folder.name}-logs-{number}")
        job = processes.start(attempt, folder, kill, num_processes=num_processes, folder=logs)
        codes = job.wait()
        outputs = [job.output(rank) for rank in range(num_processes)]
        said = f"{kill}: {codes}\n" + "\n".join(outputs)
        resumed = re.findall(r"^resumed (\S+)$", outputs[0], re.M)
        if not resumed or resumed[0] < newest:
            tally.problems.append(f"resumed from {resumed}, {newest} was acknowledged\n{said}")
        acknowledged = re.findall(r"^acknowledged (\S+)$", outputs[0], re.M)
        before, newest = newest, max([newest, *acknowledged])
        steps = valid_steps(folder)
        if not steps or name_at(steps[-1]) < newest:
            tally.problems.append(f"valid are {steps}, {newest} was acknowledged\n{said}")
        if kill is None:
            if codes != [0] * num_processes or leftovers(folder):
                tally.problems.append(f"left {leftovers(folder)}\n{said}")
            continue
        if not (
            codes[kill.rank] == -9
            and all(code == 1 for r, code in enumerate(codes) if r != kill.rank)
        ):
            tally.problems.append(f"exit codes {codes} after {before}\n{said}")
        phase = phase_of(re.findall(r"^killed at (.*)$", outputs[kill.rank], re.M)[0], kill.rank)
        tally.kills[phase] += 1
        tally.committed[phase] += name_at(steps[-1]) > newest or len(acknowledged) > 1
        shutil.rmtree(logs)
    return tally
