"""Kills loops in exact runs, resumes them, and compares every byte that they leave.

python -m tests.own_loop.kills --number 80
"""

from __future__ import annotations

import argparse
import random
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

from accel_trainer.core.errors import ExitCode
from tests import processes
from tests.own_loop.loops import LOOPS, Kill

_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def left_by(folder: Path) -> dict[str, bytes]:
    """Return what a run has left that must not depend on interruptions."""
    newest = max((folder / "checkpoints").glob("step-*"))
    kept = [path for path in newest.iterdir() if path.name not in ("manifest.json", "COMMIT")]
    return {newest.name: b""} | {
        path.name: path.read_bytes() for path in (*kept, folder / "metrics.jsonl")
    }


def train(
    name: str, folder: Path, kills: Sequence[Kill | None], *, num_processes: int
) -> list[list[int | None]]:
    """Start the loop again and again; return the exit codes of each start."""
    codes = []
    for kill in kills:
        job = processes.start(
            LOOPS[name],
            folder,
            kill,
            num_processes=num_processes,
            folder=folder.with_suffix(".logs"),
            has_workers=True,
        )
        if kill is not None and kill.signal == signal.SIGKILL:
            job.processes[kill.process].join(300)
            for process in job.processes:
                process.kill()
        codes.append(job.wait(300))
    return codes


def draw(seed: int) -> tuple[str, int, list[Kill | None]]:
    """Return a loop, a number of processes, and the kills before the last start."""
    drawn = random.Random(seed)
    num_processes = drawn.choice([1, 1, 2, 3])
    kills: list[Kill | None] = [
        Kill(drawn.randint(1, 9), drawn.choice(_SIGNALS), drawn.randrange(num_processes))
        for _ in range(drawn.randint(1, 3))
    ]
    return drawn.choice([*LOOPS]), num_processes, [*kills, None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    num_kills = 0
    whole: dict[tuple[str, int], dict[str, bytes]] = {}
    with tempfile.TemporaryDirectory() as root:
        for seed in range(options.seed, options.seed + options.number):
            name, num_processes, kills = draw(seed)
            if (name, num_processes) not in whole:
                folder = Path(root) / f"{name}-{num_processes}"
                codes = train(name, folder, [None], num_processes=num_processes)
                assert codes == [[ExitCode.DONE] * num_processes], (name, codes)
                whole[name, num_processes] = left_by(folder)
            folder = Path(root) / f"killed-{seed}"
            codes = train(name, folder, kills, num_processes=num_processes)
            num_kills += len(kills) - 1
            before, after = whole[name, num_processes], left_by(folder)
            differing = [each for each in before | after if before.get(each) != after.get(each)]
            print(
                f"seed {seed}: {name} x {num_processes}, "
                f"{', '.join(f'{k.signal} at {k.round}' for k in kills if k)}, codes {codes}: "
                + (f"DIFFERENT: {differing}" if differing else "equal"),
                flush=True,
            )
            assert codes[-1] == [ExitCode.DONE] * num_processes
    print(f"{options.number} runs, {num_kills} kills")


if __name__ == "__main__":
    main()
