"""The run of `tiny_run` with tensors sharded over processes, which save each step together."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch.distributed.tensor as shards
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel_trainer.checkpoint.config import CheckpointConfig
from accel_trainer.checkpoint.loading import has_checkpoints
from accel_trainer.checkpoint.manager import Checkpointer
from accel_trainer.core.filesystem import AppendFile
from accel_trainer.core.logger import main_speaks
from accel_trainer.distributed.collectives import join_peers, run_on_main
from accel_trainer.run.resume import Source, load_for_all
from tests.faults.disks import InterceptedDisk, When
from tests.faults.power_loss import Change
from tests.faults.tiny_run import (
    METADATA,
    ROW_BYTES,
    best_at,
    is_state_at,
    name_at,
    pieces_at,
    position_at,
)
from tests.joined import joined_processes

SHARDED = {"layer.weight", "momentum_buffer"}
MAX_FAILED_SAVES = 2


def sharded_pieces_at(step: int, mesh: DeviceMesh) -> dict[str, object]:
    """Return the state after `step`, of which each process holds its rows."""

    def shard(value: object, name: object = "") -> object:
        if isinstance(value, dict):
            return {key: shard(item, key) for key, item in value.items()}
        if isinstance(value, Tensor) and name in SHARDED:
            return shards.distribute_tensor(value, mesh, [shards.Shard(0)], src_data_rank=None)
        return value

    return {name: shard(piece) for name, piece in pieces_at(step).items()}  # type: ignore[misc]


class Run:
    """One process of a run that is started, or started again, in `folder`."""

    def __init__(self, folder: Path) -> None:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
        self._joined = joined_processes()
        self.accelerator = self._joined.__enter__()
        self.rank = self.accelerator.process_index
        self._speaking = main_speaks(self.rank == 0)  # as in every run
        self._speaking.__enter__()
        self.mesh = init_device_mesh("cpu", (self.accelerator.num_processes,))
        directory = folder / "checkpoints"
        self.history = AppendFile(folder / "metrics.jsonl") if self.rank == 0 else None
        self.checkpointer = Checkpointer(
            directory,
            config=CheckpointConfig(keep_last_n=2, max_failed_saves=MAX_FAILED_SAVES),
            header=METADATA,
            before_commit=self.history.sync if self.history else lambda: None,
            peers=join_peers(self.accelerator, timeout_s=60),
        )
        run_on_main(lambda: self.checkpointer.prepare(pieces_at(0)), self.accelerator)
        self.checkpointer.check_shared_disk()
        source = (
            Source(str(folder))
            if run_on_main(lambda: has_checkpoints(directory), self.accelerator)
            else None
        )
        loaded = source and load_for_all(source, self.accelerator, timeout_s=60)
        self.step = 0 if loaded is None else loaded.manifest["optimizer_step"]
        assert loaded is None or is_state_at(loaded.pieces, self.step), "another state"
        if self.history:
            self.history.truncate(ROW_BYTES * self.step)
            os.write(1, f"resumed {name_at(self.step)}\n".encode())

    def save(self, *, must_succeed: bool = True) -> None:
        """Take a step and save it."""
        self.step += 1
        if self.history:
            self.history.append(b"%015d\n" % self.step)
        pieces = sharded_pieces_at(self.step, self.mesh)
        self.checkpointer.save(position_at(self.step), pieces, best=best_at(self.step))
        self.checkpointer.wait(must_succeed=must_succeed)
        if self.rank == 0 and self.checkpointer.last_committed == name_at(self.step):
            os.write(1, f"acknowledged {name_at(self.step)}\n".encode())

    def end(self) -> None:
        """Leave together."""
        self.checkpointer.close()
        self._speaking.__exit__(None, None, None)
        self._joined.__exit__(None, None, None)


class ArmedDisk(InterceptedDisk):
    """Records the changes from `arm` on in `operations`; calls `meet` with the number of each."""

    def __init__(self) -> None:
        self.operations: list[str] = []
        self.is_armed = False

    def intercept(
        self,
        operation: str,
        path: Path,
        act: Callable[[], object],
        act_half: Callable[[], object],
        *details: object,
    ) -> object:
        if not self.is_armed:
            return act()
        self.operations.append(f"{operation} {path.parent.name}/{path.name}")
        return self.meet(len(self.operations) - 1, act, act_half)

    def meet(
        self, number: int, act: Callable[[], object], act_half: Callable[[], object]
    ) -> object:
        return act()


class TracingDisk(InterceptedDisk):
    """Appends each change to a file, in one order for the threads and processes that share it."""

    def __init__(self, trace: Path) -> None:
        self._file = trace.open("ab", buffering=0)
        self._lock = threading.Lock()

    def intercept(
        self,
        operation: str,
        path: Path,
        act: Callable[[], object],
        act_half: Callable[[], object],
        *details: object,
    ) -> object:
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                result = act()
                self.append(operation, path, *details)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        return result

    def append(self, operation: str, path: Path, *details: object) -> None:
        """Append a line."""
        plain = [each.hex() if isinstance(each, bytes) else each for each in details]
        line = [operation, str(path), [type(each).__name__ for each in details], plain]
        self._file.write(json.dumps(line, default=str).encode() + b"\n")


def read_trace(trace: Path) -> list[Change]:
    """Return the changes that `TracingDisk` has recorded."""
    kinds = {"bytes": bytes.fromhex, "int": int}
    changes: list[Change] = []
    for line in trace.read_text().splitlines():
        operation, path, names, plain = json.loads(line)
        details = [kinds.get(name, Path)(value) for name, value in zip(names, plain, strict=True)]  # type: ignore[operator]
        changes.append((operation, Path(path), tuple(details)))
    return changes


class KillingAt(ArmedDisk):
    """Kills this process before, half-way through or after change number `at`."""

    def __init__(self, at: int, when: When) -> None:
        super().__init__()
        self._at = at
        self._when = when

    def meet(
        self, number: int, act: Callable[[], object], act_half: Callable[[], object]
    ) -> object:
        if number != self._at:
            return act()
        if self._when != "before":
            act() if self._when == "after" else act_half()
        os.write(1, f"killed at {self.operations[-1]}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
        return None


class FailingOnce(ArmedDisk):
    """Fails at change number `at`, and a write half-way."""

    def __init__(self, at: int, error: int = errno.ENOSPC) -> None:
        super().__init__()
        self._at = at
        self._error = error

    def meet(
        self, number: int, act: Callable[[], object], act_half: Callable[[], object]
    ) -> object:
        if number != self._at:
            return act()
        act_half()
        raise OSError(self._error, os.strerror(self._error))
