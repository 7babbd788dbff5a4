"""A resume: finds what a run continues from, loads it, compares it with this start and applies it.

The main process alone chooses the folder and finds the source (`open_folder`). On all processes,
`start_run` then loads the checkpoint and compares the settings. `build_trainer` compares data and
task before it changes anything, and applies the checkpoint once all that it is loaded into is
complete. A start that is refused before that has changed neither rows nor config of the folder.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from accelerate import Accelerator
from torch import nn

from ..callbacks.metrics_file import MetricsFile
from ..checkpoint.format import (
    LoadedCheckpoint,
    Manifest,
    decode_files,
    list_checkpoints,
    read_manifest,
)
from ..checkpoint.frozen import complete_frozen
from ..checkpoint.loading import (
    candidates,
    first_valid,
    has_checkpoints,
    read_patiently,
)
from ..checkpoint.sharded import keep_slices
from ..checks.changes import warn_of_changes
from ..core.config import Change
from ..core.errors import CheckpointError, ConfigError, OutputError
from ..core.filesystem import writes_to
from ..core.json_files import read_json_object
from ..core.logger import logger
from ..core.registry import Pieces
from ..core.run_dir import expand_home, is_locked
from ..core.user_code import describe_error
from ..core.yaml_files import read_yaml
from ..data.fingerprint import is_same_data
from ..distributed.collectives import broadcast_files, join_peers, run_on_main
from ..training.progress import EVALUATION
from .config import RecipeConfig, RunConfig, training_changes

R = TypeVar("R", bound=RecipeConfig)

Advise = Callable[[str, Sequence[str]], str]
"""Returns what to do about changes of some names since a run, other than to undo them."""


class Source(NamedTuple):
    """What a run continues from."""

    run: str
    """The folder of the run that made the checkpoint."""
    checkpoint: str | None = None
    """The name of the checkpoint; None: the newest valid one."""


# --- find ---


def choose_folder(config: RecipeConfig, recipe: str) -> Path:
    """Return the run folder: the given one, an unfinished one to resume, or a new name."""
    run = config.run
    if run.output_dir is not None:
        return run.output_dir
    if run.resume != "never":
        for folder in folders_of(recipe, run.runs_dir):
            if not folder.is_symlink() and is_unfinished(folder, config):
                return folder
    name = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = run.runs_dir / name
    number = 0
    while os.path.lexists(folder):
        number += 1
        folder = run.runs_dir / f"{name}-{number}"
    return folder


def folders_of(recipe: str, runs_dir: Path) -> list[Path]:
    """Return the folders that `choose_folder` has named for a recipe, the newest first."""
    # Neither recipes with longer names, such as `images-small` beside `images`, nor copies of a run
    # that somebody has renamed.
    first = runs_dir / recipe
    name = re.compile(rf"{re.escape(first.name)}-\d{{8}}-\d{{6}}(-\d+)?")
    folders = (folder for folder in first.parent.glob("*") if name.fullmatch(folder.name))
    return sorted(folders, reverse=True)


def is_unfinished(folder: Path, config: RecipeConfig) -> bool:
    """Whether `folder` holds a run of the same start that is neither done nor in use.

    Its config is the same, apart from what `--allow-change` names, and it began with the weights of
    `--init-from`, or from the run that `--resume` names.
    """
    source = Source(str(folder))
    try:
        stored = stored_settings(source)
        now = with_global_batch_size(config, stored, num_processes=1)
        is_changed = _refused(training_changes(stored, now), allowed_names(config.run))
        if not stored or is_changed or is_locked(folder / "run.lock"):
            return False
        result = folder / "result.json"
        if result.exists() and read_json_object(result)["state"] == "done":
            return False
        begun = read_yaml(folder / "config.yaml")["run"]
        weights = config.run.init_from and str(config.run.init_from)
        # With `--resume auto` it may be a branch of any run.
        return config.run.resume in ("auto", begun["resume"]) and begun["init_from"] == weights
    except (OSError, ValueError, KeyError, TypeError, CheckpointError):
        return False


def stored_settings(source: Source) -> Mapping[str, Any]:
    """Return what the run was trained with, by dotted name; {} if no checkpoint can be read.

    It is read from the manifest of the newest checkpoint. The folder's config.yaml may be of an
    attempt that was killed before its first save.

    Raises CheckpointError if the folder of the checkpoints is a link.
    """
    directory = Path(source.run, "checkpoints")
    named = [directory / source.checkpoint] if source.checkpoint else list_checkpoints(directory)
    for path in reversed(named):
        with suppress(CheckpointError):
            return dict(read_manifest(path)[1].get("settings", {}))
    return {}


def find_source(folder: Path, run: RunConfig) -> Source | None:
    """Return what to continue from; None: the run is new.

    Checkpoints in the run folder come before `--resume`, so that the same command continues a
    branch that it has begun. `--resume` cannot go back to an older one of them.
    """
    path = Path(os.path.realpath(expand_home(Path(run.resume))))
    if has_checkpoints(folder / "checkpoints"):
        if run.resume == "never" or path in list_checkpoints(folder / "checkpoints")[:-1]:
            raise OutputError(
                "RUN_EXISTS",
                f"{folder} has checkpoints, and --resume is {run.resume}: "
                "choose a different folder",
            )
        return Source(str(folder))
    if run.resume in ("auto", "never"):
        return None
    with suppress(OSError):  # it may not be looked up
        if path.parent.name == "checkpoints" and path.is_dir():
            return Source(str(path.parent.parent), path.name)
        if has_checkpoints(path / "checkpoints"):
            return Source(str(path))
    raise CheckpointError(
        "CKPT_NOT_FOUND",
        f"--resume {run.resume} is neither a checkpoint nor a run that can be read: "
        "give the folder of a run, or a checkpoint that is still in it",
    )


# --- load ---


def load_for_all(source: Source, accelerator: Accelerator, *, timeout_s: float) -> LoadedCheckpoint:
    """Return the checkpoint to start from, on every process.

    If all are damaged, it is the newest one that is valid but for its frozen parameters, which
    `complete_frozen` then takes from the model.

    **Collective.**

    Raises:
        CheckpointError: there is no checkpoint, or no valid one.
    """
    directory = Path(source.run, "checkpoints")

    def load(name: str, *, without: str = "") -> LoadedCheckpoint:
        """Return a checkpoint that the processes have verified together. **Collective.**

        The main process reads the files and sends them to the others. Slices of shards are not
        sent: each process reads and verifies its part of them.
        """
        path = directory / name
        read = partial(read_patiently, path, without=without)
        loaded = decode_files(broadcast_files(read, accelerator), path)
        if loaded.slices:
            peers = join_peers(accelerator, timeout_s=timeout_s)
            peers.agree(lambda: keep_slices(loaded.slices, peers))
        return loaded

    name = source.checkpoint
    names = run_on_main(lambda: candidates(directory, name), accelerator)
    return first_valid(directory, name, names, load)


# --- compare and apply ---


@dataclass
class Resume:
    """A checkpoint that a run continues from, and what was changed on purpose since its save."""

    source: Source
    checkpoint: LoadedCheckpoint
    allowed: Collection[str]
    """Settings, or `data`, that its user lets differ."""
    advise: Advise
    changes: list[str] = field(default_factory=list)
    """What was found to differ: settings, `data`, and `EVALUATION`."""

    def compare_settings(self, changes: Sequence[Change]) -> None:
        """Note the `changes`. Raises ConfigError if one is not allowed."""
        if refused := _refused(changes, self.allowed):
            listed = "; ".join(f"{name}: {old} -> {new}" for name, old, new in refused)
            raise ConfigError(
                "CONFIG_CHANGED",
                f"{self.source.run} was made with different settings ({listed}): set them back, "
                f"{self.advise(self.source.run, [change[0] for change in refused])}",
            )
        self.changes += [change[0] for change in changes]

    def compare(self, now: Manifest) -> None:
        """Compare data, task and machine with `now`, which this start would store in manifests.

        Raises CheckpointError if the data has changed, unless that is allowed, or the task has.
        """
        stored = {**now, **self.checkpoint.manifest}  # those of older versions have less
        if change := _change_of_data(stored, now, self.changes):
            if "data" not in self.allowed:
                raise CheckpointError(
                    "DATA_CHANGED",
                    f"{self.source.run} was trained on different data ({change}): restore it, "
                    f"{self.advise(self.source.run, ['data'])}",
                )
            self.changes.append("data")
            if "eval_fingerprint" in now and not _is_evaluated_alike(self.checkpoint.manifest, now):
                self.changes.append(EVALUATION)
        if stored.get("task_fingerprint") != now.get("task_fingerprint"):
            raise CheckpointError(
                "TASK_CHANGED",
                f"{self.source.run} was trained with a different task, such as its class weights "
                "or its teacher: restore it, or choose a different folder",
            )
        warn_of_changes(self.checkpoint.name, stored, now)
        if EVALUATION in self.changes:
            logger.warning(
                "the evaluation data may have changed since %s, so numbers cannot be compared: "
                "the best checkpoint and the patience start again",
                self.checkpoint.name,
            )

    def apply(self, load: Callable[[Pieces], object], model: nn.Module) -> None:
        """Pass the pieces to `load`, and free them. **Collective.**

        Frozen parameters that could not be read are those of `model`.

        Raises CheckpointError if they are not what the run has.
        """
        checkpoint = self.checkpoint
        try:
            complete_frozen(checkpoint, model)
            load(checkpoint.pieces)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                "CKPT_STATE",
                f"{checkpoint.name} contains state that this run cannot load "
                f"({describe_error(error)}): use another checkpoint",
            ) from error
        checkpoint.pieces.clear()  # the run keeps the checkpoint, whose tensors may be large
        for each in checkpoint.slices:
            each.kept = None  # verified for another process


def load_resume(
    source: Source | None,
    accelerator: Accelerator,
    *,
    loop: Literal["recipe", "own"],
    allowed: Collection[str],
    advise: Advise,
    timeout_s: float,
) -> Resume | None:
    """Return what a run with such a `loop` continues from, loaded; None if it is new.

    **Collective.** Raises as `load_for_all`, and ConfigError for a run with a loop of another kind.
    """
    if source is None:
        return None
    checkpoint = load_for_all(source, accelerator, timeout_s=timeout_s)
    if (stored := checkpoint.manifest.get("loop", "recipe")) != loop:
        kinds = f"a run of kind {stored}, and this start is of kind {loop}"
        raise ConfigError("LOOP", f"{source.run} has {kinds}: choose a different folder")
    return Resume(source, checkpoint, allowed, advise)


def continued(config: R, resume: Resume | None, *, num_processes: int) -> R:
    """Return `config` as the run has it, with the global batch size of its checkpoint.

    The settings are compared with those that the checkpoint was trained with.

    Raises ConfigError if a setting has changed that `--allow-change` does not name, or if the
    processes cannot share the global batch.
    """
    stored = resume.checkpoint.manifest.get("settings", {}) if resume else {}
    config = with_global_batch_size(config, stored, num_processes=num_processes)
    # What does not depend on the data is refused before it is read.
    enough = num_processes * config.batch.resolved_global_batch_size(num_processes)
    config.batch.plan(enough, num_processes=num_processes)
    if resume and stored:
        resume.compare_settings(training_changes(stored, config))
    return config


def with_global_batch_size(config: R, stored: Mapping[str, Any], *, num_processes: int) -> R:
    """Return `config` with its global batch size filled in.

    It is the given one, else that of the `stored` settings, else it follows from `num_processes`.
    """
    batch = config.batch
    size = (
        batch.global_batch_size
        or stored.get("batch.global_batch_size")
        or batch.resolved_global_batch_size(num_processes)
    )
    return replace(config, batch=replace(batch, global_batch_size=size))


def advise_flags(run: str, names: Sequence[str]) -> str:
    """Return what the user of a recipe can do about changes of these `names` since `run`."""
    return (
        f"choose a different --output-dir (--init-from {run} starts from these weights), or "
        f"continue on purpose with --allow-change {' '.join(names)}"
        f"{', if the weights have the same shapes' * any('model.' in name for name in names)}"
    )


def allowed_names(run: RunConfig) -> set[str]:
    """Return what `--allow-change` names."""
    return {name.replace("-", "_") for name in run.allow_change}


def begin_history(history: MetricsFile | None, folder: Path, resume: Resume | None) -> None:
    """Cut the rows back to those of the checkpoint; a branch has those of the run that it leaves.

    For the main process, which has the `history`, once the checkpoint is applied: a start that is
    refused drops no rows. Raises CheckpointError or OutputError.
    """
    if history is None:
        return
    if resume and Path(resume.source.run) != folder:
        path = Path(resume.source.run, "metrics.jsonl")
        if path.is_symlink() or not path.is_file():
            raise CheckpointError("RUN_HISTORY", f"{path} is not a file: restore it")
        history.truncate(0)
        with writes_to(folder):
            history.copy_rows(path)
    history.truncate(history.kept_bytes)


def _refused(changes: Sequence[Change], allowed: Collection[str]) -> list[Change]:
    return [change for change in changes if change[0] not in allowed]


def _change_of_data(stored: Manifest, now: Manifest, changes: Sequence[str]) -> str | None:
    """Return how the data has changed, other than by one of the settings in `changes`."""
    old = stored["data_fingerprint"]
    new = now["data_fingerprint"]
    if stored["num_samples"] != now["num_samples"]:
        return f"{tuple(stored['num_samples'])} -> {tuple(now['num_samples'])} samples"
    if stored["order"] != now["order"] and "batch.order" not in changes:
        return "other samples are left out, or have other weights, labels or places in order="
    return None if is_same_data(old, new) else f"{old[:16]} -> {new[:16]}"


def _is_evaluated_alike(stored: Manifest, now: Manifest) -> bool:
    """Return whether the evaluation sets of both are known to have the same samples."""
    sizes = [each.get("num_samples", [])[1:] for each in (stored, now)]
    known = now.get("eval_fingerprint")
    return bool(known) and stored.get("eval_fingerprint") == known and sizes[0] == sizes[1]
