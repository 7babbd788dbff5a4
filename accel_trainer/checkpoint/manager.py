"""Saves checkpoints in a background thread, and deletes old ones once a new one is committed."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch

from ..core import filesystem
from ..core.errors import CheckpointError, ConfigError, DamagedError, DivergedError
from ..core.filesystem import writes_to
from ..core.guards import guarded_folder
from ..core.json_files import dump_json, parse_json
from ..core.logger import logger
from ..core.registry import WEIGHTS, Pieces
from ..core.run_dir import free_bytes
from ..core.train_state import BestCheckpoint, TrainState, checkpoint_name
from ..core.wording import counted
from ..distributed.collectives import SINGLE_PROCESS, Peers
from ..distributed.machine import return_freed_memory
from . import retention
from .config import CheckpointConfig
from .format import FROZEN, Manifest, commit_mark, is_committed, list_checkpoints, write_checkpoint
from .frozen import digests_of, split_frozen
from .read_back import check_readable
from .serialization import EncodedPieces, encode, first_nonfinite
from .sharded import local_slices
from .staging import Snapshot

# The pieces in which NaN or inf is the end of a training.
_TRAINED = ("model", FROZEN, "training_weights", "optimizer", "ema")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(eq=False)
class Checkpointer:
    """Saves and deletes the checkpoints of one run in `directory`.

    `header` goes into every manifest: `settings`, `data_fingerprint`, versions and the like.
    `masks` are the buffers that hold inf from the start, such as a mask of -inf.
    `before_commit` runs in the saving thread just before a checkpoint becomes valid, to sync what
    must not be older than the checkpoint, such as the history of metrics. `unstepped` returns the
    names of the model's parameters that no optimizer steps: those that nothing else has changed
    since the run began are linked from the checkpoint before. `peers` are the processes that save
    together, each its own shards; each has a Checkpointer, and all of them save, wait and fail in
    the same order.

    `last_committed` is the name of the newest durable checkpoint; `num_failed_saves` counts
    failures in a row.
    """

    directory: Path
    _: KW_ONLY
    config: CheckpointConfig
    header: Manifest
    masks: Collection[str] = ()
    before_commit: Callable[[], None] = lambda: None
    unstepped: Callable[[], Collection[str]] = tuple
    peers: Peers = SINGLE_PROCESS

    def __post_init__(self) -> None:
        self.last_committed: str | None = None
        self.num_failed_saves = 0
        # Digests of the parameters that nothing has changed since the run began.
        self.frozen: dict[str, str] = {}
        # The commit marks of the checkpoints that retention may delete: those that the run had at
        # its start or saved itself, not those that somebody puts beside them.
        self._own: set[bytes | None] = set()
        # The first checkpoint shows whether what is written is what a resume would read.
        self._has_read_back = False
        self._snapshot = Snapshot()
        self._guard = ExitStack()
        self.is_closed = False
        # The thread computes on one core: a second OpenMP team slows the training thread down for
        # good (to 0.76 of its speed on two cores).
        self._executor = ThreadPoolExecutor(1, "checkpoint", torch.set_num_threads, (1,))
        self._pending: Future[None] | None = None

    @property
    def run_folder(self) -> Path:
        """The folder of the run, in which `directory` lies."""
        return self.directory.parent

    def prepare(self, pieces: Pieces) -> None:
        """Create and clean the directory; `pieces` as for `save`.

        Call it on main before the first step, under the run lock. Until `close`, nothing is written
        into another folder that takes its place: that is a CheckpointError. Raises OutputError if
        the directory cannot be written, CheckpointError if the pieces cannot be stored or have no
        room.
        """
        with writes_to(self.directory):
            filesystem.make_directory(self.directory)
            self._guard.enter_context(guarded_folder(self.directory))
            filesystem.sweep(self.directory)
            self._own = set(map(commit_mark, list_checkpoints(self.directory)))
        self.check_room(pieces)

    def check_room(self, pieces: Pieces) -> None:
        """Raise CheckpointError if `pieces` cannot be stored, or the disk lacks room for them.

        Two checkpoints must fit, as an old one is deleted after a new one is written; one more is
        enough if the directory has one already. Parameters that nothing steps are stored once.
        """
        with writes_to(self.directory):
            free = free_bytes(self.directory)
            num_missing = 1 if list_checkpoints(self.directory) else 2
        needed = 0
        unstepped = self.unstepped()
        frozen = {}
        for name, value in pieces.items():
            for key, tensor in encode(value, name=name).tensors.items():
                if name in WEIGHTS and key in unstepped:
                    frozen[key] = tensor.nbytes
                else:
                    needed += num_missing * tensor.nbytes
        needed += sum(frozen.values())
        if free < needed:
            raise CheckpointError(
                "CKPT_PREFLIGHT",
                f"{counted(num_missing, 'more checkpoint')} must fit ({needed:,} bytes), but "
                f"{self.directory} has {free:,} free: free some space or choose a different folder",
            )

    def check_shared_disk(self) -> None:
        """Raise CheckpointError if a peer does not see the files of the others.

        **Collective** over `peers`.
        """
        if self.peers.group is None:
            return
        with ExitStack() as stack:
            try:
                names = self.peers.agree(
                    lambda: stack.enter_context(filesystem.probe_file(self.directory)).name
                )
                seen = self.peers.agree(
                    lambda: all((self.directory / name).exists() for name in names)
                )
                if all(seen):
                    return
                reason = f"process {seen.index(False)} does not see the files of all"
            except OSError as error:
                reason = error.strerror or str(error)
        raise CheckpointError(
            "CKPT_PREFLIGHT",
            f"each process writes its shards to {self.directory}, which they do not share "
            f"({reason}): choose a folder that they share, or set fsdp_state_dict_type to "
            "FULL_STATE_DICT",
        )

    def save(
        self,
        state: TrainState,
        pieces: Pieces,
        *,
        best: BestCheckpoint | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy `pieces`, states by name, and write the copy in the background.

        Training may continue once this returns. `best` is the best checkpoint so far, perhaps this
        one: it is kept, and best.json names it. `metadata` is what the user notes in the manifest.
        A valid checkpoint of this run at `state` is not written again.

        Waits for the save before, and raises its errors as `wait` does. Raises CheckpointError for
        a state that is not made of plain values and tensors, and ConfigError for `metadata` that is
        not plain JSON.
        """
        self.wait()
        index = self.peers.process_index
        encoded = {
            name: local_slices(encode(value, name=name), index) for name, value in pieces.items()
        }
        copies, wait_for_copies = self._snapshot.take(encoded)
        header = {**self.header, "metadata": copy_metadata(metadata), **state._asdict()}
        name = checkpoint_name(state)
        unstepped = self.unstepped()

        def commit() -> None:
            wait_for_copies()
            self.frozen = dict(
                self.frozen.items() & digests_of(copies["model"].tensors, unstepped).items()
            )
            self._commit(name, copies, self.frozen, header)
            logger.info("checkpoint %s saved", name)
            if index == 0:
                self.record_best(best, saved=name)

        self._pending = self._executor.submit(commit)

    def wait(self, *, must_succeed: bool = False) -> None:
        """Wait until no save is running.

        An OSError of the save is a warning; after `max_failed_saves` in a row, or with
        `must_succeed`, it is a CheckpointError. Raises DivergedError for a state with NaN or inf.
        """
        pending = self._pending
        if pending is None:
            return
        self._pending = None
        try:
            pending.result()
        except OSError as error:
            self._count_failure(error, must_succeed=must_succeed)
        else:
            self.num_failed_saves = 0
        if must_succeed:  # the end, which reads a checkpoint in the memory of the copy
            self._snapshot = Snapshot()
            return_freed_memory()

    def _count_failure(self, error: OSError, *, must_succeed: bool) -> None:
        self.num_failed_saves += 1
        reason = f"a checkpoint could not be saved in {self.directory} ({error.strerror})"
        code = "CKPT_NO_SPACE" if error.errno in _NO_SPACE else "CKPT_IO"
        count = f"failure {self.num_failed_saves} of {self.config.max_failed_saves}"
        if not self.directory.is_dir():
            raise CheckpointError(code, f"{reason}, the folder is gone") from error
        if must_succeed or self.num_failed_saves >= self.config.max_failed_saves:
            raise CheckpointError(
                code, f"{reason}, {count}: free or repair the disk and resume"
            ) from error
        logger.warning(
            "error[%s]: %s; older checkpoints are intact and training continues, %s",
            code,
            reason,
            count,
        )

    def _commit(
        self,
        name: str,
        copies: EncodedPieces,
        frozen: Mapping[str, str],
        header: Manifest,
    ) -> None:
        path = self.directory / name
        pieces = split_frozen(copies, frozen)

        def check() -> bool:
            """Return whether the checkpoint exists already; only main's answer counts."""
            for piece, encoded in pieces.items():
                if piece.partition("-")[0] not in _TRAINED:
                    continue  # a mask may hold -inf, and so may a state of the user's
                if key := first_nonfinite(encoded.tensors, self.masks):
                    raise DivergedError(
                        "CKPT_NONFINITE",
                        f"{piece}: {key} is NaN or inf, so {name} is not saved: lower the learning "
                        "rate, and resume from "
                        f"{self.last_committed or 'an older checkpoint, if there is one'}",
                    )
            if self.peers.process_index > 0:
                return False
            # This process has written the newest: reading all of it again would tell nothing.
            is_newest = name == self.last_committed and is_committed(path)
            return is_newest or retention.has_valid(path, self.header)

        def read_back(folder: Path) -> None:
            if not self._has_read_back:
                check_readable(folder, copies, process_index=self.peers.process_index)
            self._has_read_back = True

        if not self.peers.agree(check)[0]:
            write_checkpoint(
                path,
                pieces,
                header=header,
                before_commit=self.before_commit,
                check=read_back,
                peers=self.peers,
            )
        self.last_committed = name
        self._own.add(commit_mark(path))

    def record_best(self, best: BestCheckpoint | None, *, saved: str | None = None) -> None:
        """Name the best checkpoint so far in best.json; once `saved` is, delete old ones.

        In this order a crash loses nothing. Call it on main, after `wait`.
        """
        try:
            retention.update_best(self.directory, best)
            if saved is not None:
                retention.apply_retention(self.directory, saved, self.config, self._own)
        except (DamagedError, OSError) as error:
            # The checkpoint is safe; the next save tidies up again.
            logger.warning("cannot tidy up %s: %s", self.directory, error)

    def close(self) -> None:
        """Wait for the last save and end the thread."""
        self.is_closed = True
        with self._guard, self._executor:
            self.wait()


def copy_metadata(metadata: Mapping[str, Any] | None, name: str = "metadata") -> dict[str, Any]:
    """Return what a user notes in checkpoints, as it comes back from JSON: a tuple as a list.

    Raises ConfigError for what JSON cannot hold.
    """
    try:
        return dict(parse_json(dump_json({**(metadata or {})})))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            "METADATA",
            f"{name} is not JSON ({error}): give a dict of texts, numbers, lists and dicts",
        ) from None
