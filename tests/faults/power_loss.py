"""What a power loss may leave: every prefix of a run's changes, under several persistence models.

python -m tests.faults.power_loss --states 2000
"""

from __future__ import annotations

import argparse
import logging
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from itertools import zip_longest
from pathlib import Path
from typing import Any

from accel_trainer.checkpoint import loading, retention
from accel_trainer.checkpoint.format import list_checkpoints
from accel_trainer.checkpoint.manager import Checkpointer
from accel_trainer.checkpoint.serialization import Encoded
from accel_trainer.core.errors import UserError
from tests.faults.disks import InterceptedDisk, installed
from tests.faults.persistence import FileSystem, Tree, models
from tests.faults.tiny_run import ROW_BYTES, continue_run, is_state_at, name_at, valid_steps

LAST_STEP = 4
KEEP_LAST_N = 2


Change = tuple[str, Path, tuple[Any, ...]]
"""A change of the disk: what, where and its details; `acknowledge` names a checkpoint that is
reported as durable."""


class RecordingDisk(InterceptedDisk):
    """Records the changes that succeed, except those in `without`, as if the code left them out."""

    def __init__(self, without: Collection[str] = ()) -> None:
        self.trace: list[Change] = []
        self._without = without

    def intercept(self, operation: str, path: Path, act: Any, act_half: Any, *details: Any) -> Any:
        result = act()
        if operation not in self._without:
            self.trace.append((operation, path, details))
        return result


class DeletesFirst(Checkpointer):
    """A wrong protocol: room for the new checkpoint is made before it is committed."""

    def _commit(
        self,
        name: str,
        copies: Mapping[str, Encoded],
        frozen: Mapping[str, str],
        header: Mapping[str, object],
    ) -> None:
        config = copy(self.config)
        vars(config)["keep_last_n"] = KEEP_LAST_N - 1  # which a config refuses
        retention.apply_retention(self.directory, name, config, self._own)
        super()._commit(name, copies, frozen, header)


def simulate(
    *,
    num_states: int,
    without: Collection[str] = (),
    make: type[Checkpointer] = Checkpointer,
    seed: int = 0,
) -> Iterator[str | None]:
    """Record a run and yield, as `replay` does, what a power loss takes."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        folder = Path(scratch, "run")
        folder.mkdir()
        disk = RecordingDisk(without)
        with installed(disk):
            continue_run(
                folder,
                last_step=LAST_STEP,
                acknowledge=lambda name: disk.trace.append(("acknowledge", Path(name), ())),
                make=make,
            )
        yield from replay(disk.trace, folder, num_states=num_states, seed=seed)


def replay(
    trace: Sequence[Change], folder: Path, *, num_states: int, seed: int = 0
) -> Iterator[str | None]:
    """Yield what is lost in each state that a power loss may leave after each change of a run.

    The run is in `folder`.

    There are `num_states` states or more. Those that are equal are looked at once.
    """
    # The plain models everywhere first, then random ones until there are enough.
    num_random = max(0, -(-num_states // len(trace)) - len(models(seed, 0)))
    found: dict[tuple[int, str], str | None] = {}
    file_system = FileSystem(folder)
    acknowledged: list[str] = []
    for number, (operation, path, details) in enumerate(trace):
        if operation == "acknowledge":
            acknowledged.append(path.name)
        else:
            file_system.do(operation, path, details)
        for model in models(seed + number, num_random):
            survivors = model.survivors(file_system.root)
            state = len(acknowledged), repr(survivors)
            if state not in found:
                left = folder.with_name("left")
                _write(left, survivors)
                problem = _what_is_lost(left, acknowledged)
                found[state] = (
                    problem and f"after {operation} {path.name} ({model.label}): {problem}"
                )
                shutil.rmtree(left)
            yield found[state]


def _write(path: Path, content: Tree | bytes) -> None:
    if isinstance(content, bytes):
        path.write_bytes(content)
        return
    path.mkdir()
    for name, child in content.items():
        _write(path / name, child)


def _what_is_lost(folder: Path, acknowledged: list[str]) -> str | None:
    """Return what the next run would miss of last checkpoints, history and best, if anything."""
    directory = folder / "checkpoints"
    if not acknowledged and not directory.is_dir():
        return None
    steps = valid_steps(folder)
    names = [name_at(step) for step in steps]
    if half_there := {path.name for path in list_checkpoints(directory)} - set(names):
        return f"{half_there} are named like checkpoints and not whole"
    newest_first = zip_longest(names[::-1], acknowledged[: -KEEP_LAST_N - 1 : -1], fillvalue="")
    if any(mine < theirs for mine, theirs in newest_first):
        return f"of the last {KEEP_LAST_N} acknowledged one is gone, valid are {steps}"
    try:
        loaded = loading.load_checkpoint(directory)
    except UserError as error:
        return str(error)
    if loaded is None:
        return f"{acknowledged[-1]} is gone" if acknowledged else None
    step = loaded.manifest["optimizer_step"]
    if acknowledged and loaded.name < acknowledged[-1]:
        return f"{acknowledged[-1]} is lost, {loaded.name} is the newest"
    if not is_state_at(loaded.pieces, step):
        return f"{loaded.name} holds another state"
    history = (
        (folder / "metrics.jsonl").read_bytes() if (folder / "metrics.jsonl").exists() else b""
    )
    if history[: step * ROW_BYTES] != b"".join(b"%015d\n" % row for row in range(1, step + 1)):
        return f"the history is behind {loaded.name}"
    best = retention.best_name(directory)
    if best is not None and best not in names:
        return f"the best, {best}, is gone"
    return None


MUTANTS: dict[str, dict[str, Any]] = {
    "without the sync of files": {"without": {"sync"}},
    "without the sync of directories": {"without": {"sync_directory"}},
    "deleting before the commit": {"make": DeletesFirst},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=2000)
    arguments = parser.parse_args()
    logging.disable()
    loading.RETRY_DELAYS_S = ()
    for label, options in {"the protocol": {}, **MUTANTS}.items():
        start = time.perf_counter()
        states = list(simulate(num_states=arguments.states, **options))
        seconds = time.perf_counter() - start
        lost = [problem for problem in states if problem]
        print(f"{label}: {len(states)} states, {len(lost)} lost, {seconds:.1f} s")
        for line in lost[:2]:
            print(f"    {line}")


if __name__ == "__main__":
    main()
