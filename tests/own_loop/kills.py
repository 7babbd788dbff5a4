"""Kills loops in exact runs, resumes them, and compares every byte that they leave.

Each seed is a cell of a table, as far as it reaches: loops x processes x the way of the first kill.

python -m tests.own_loop.kills --number 80
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from accel_trainer.core.errors import ExitCode
from accel_trainer.core.run_dir import is_locked
from tests import processes
from tests.own_loop.loops import LOOPS, Kill
from tests.ports import free_port

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_LOOPS = [name for name in LOOPS if name != "spawned"]
_WAYS = ("kill", "signal", "torn", "launcher")
_TABLE = [*itertools.product(_WAYS, _LOOPS, (1, 2, 3))]
_LIMIT_S = 300


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
            job.processes[kill.process].join(_LIMIT_S)
            for process in job.processes:
                process.kill()
        codes.append(job.wait(_LIMIT_S))
    return codes


def tear(folder: Path, drawn: random.Random) -> None:
    """Leave a half row, and the newest checkpoint damaged if there is one before it."""
    rows = folder / "metrics.jsonl"
    if rows.exists():
        rows.write_bytes(rows.read_bytes() + b'{"event": "tra')
    saved = sorted((folder / "checkpoints").glob("step-*"))
    if len(saved) > 1:
        path = drawn.choice(sorted(each for each in saved[-1].iterdir() if each.stat().st_size))
        os.truncate(path, drawn.randrange(path.stat().st_size))


def kill_launcher(name: str, folder: Path, *, num_processes: int, number: int) -> int:
    """Start the loop by torchrun, as accelerate does, and send this alone a signal after a save."""
    words = ["-m", "torch.distributed.run", f"--nproc-per-node={num_processes}"]
    words += [f"--master-port={free_port()}"]
    words += ["-m", "tests.own_loop.kills", "--one", name, "--folder", str(folder)]
    with (folder.with_suffix(".log")).open("a") as log:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        launcher = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log, env=variables)
        until_s = time.monotonic() + _LIMIT_S
        while launcher.poll() is None and not [*(folder / "checkpoints").glob("step-*/COMMIT")]:
            assert time.monotonic() < until_s
            time.sleep(0.05)
        launcher.send_signal(number)
        code = launcher.wait(_LIMIT_S)
        while is_locked(folder / "run.lock"):
            assert time.monotonic() < until_s, "its processes have not ended"
            time.sleep(0.05)
    return code


def train_killed(seed: int, folder: Path, name: str, num_processes: int, way: str) -> str:
    """Train to the end with some kills; return what happened."""
    drawn = random.Random(seed)
    told = []
    if way == "launcher":
        number = drawn.choice((signal.SIGKILL, signal.SIGTERM))
        code = kill_launcher(name, folder, num_processes=num_processes, number=number)
        told.append(f"launcher by {number.name} ({code})")
    else:
        for _ in range(drawn.choice((1, 1, 2))):
            number = drawn.choice(_SIGNALS) if way == "signal" else signal.SIGKILL
            kill = Kill(drawn.randint(1, 12), number, drawn.randrange(num_processes))
            codes = train(name, folder, [kill], num_processes=num_processes)
            told.append(f"{way} {number.name} of {kill.process} in round {kill.round} {codes[0]}")
            if way == "torn":
                tear(folder, drawn)
    codes = train(name, folder, [None], num_processes=num_processes)
    if codes != [[ExitCode.DONE] * num_processes]:
        said = [each.read_text() for each in folder.parent.glob(f"{folder.name}.log*/*")]
        raise AssertionError(f"seed {seed}: {told}, {codes}:\n{said}")
    return "; ".join(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", choices=[*LOOPS], help="train this loop, which somebody kills")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.one:
        LOOPS[options.one](options.folder, Kill(pause_s=0.3))
        return
    whole: dict[tuple[str, int], dict[str, bytes]] = {}
    num_kills = 0
    with tempfile.TemporaryDirectory() as root:
        for seed in range(options.seed, options.seed + options.number):
            way, name, num_processes = _TABLE[seed * 7 % len(_TABLE)]
            if (name, num_processes) not in whole:
                folder = Path(root) / f"{name}-{num_processes}"
                codes = train(name, folder, [None], num_processes=num_processes)
                assert codes == [[ExitCode.DONE] * num_processes], (name, codes)
                whole[name, num_processes] = left_by(folder)
            folder = Path(root) / f"killed-{seed}"
            told = train_killed(seed, folder, name, num_processes, way)
            num_kills += told.count(";") + 1
            before, after = whole[name, num_processes], left_by(folder)
            differing = [each for each in before | after if before.get(each) != after.get(each)]
            found = f"DIFFERENT: {differing}" if differing else "equal"
            print(f"seed {seed}: {name} x {num_processes}: {told}: {found}", flush=True)
    print(f"{options.number} runs, {num_kills} kills")


if __name__ == "__main__":
    main()
