"""Checks the run folder, its checkpoints and the data."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ...checkpoint.format import list_checkpoints
from ...checkpoint.retention import has_checkpoints
from ...core.errors import UserError
from ...core.run_dir import expand_home, free_bytes, refuse_in_use, refuse_strange_entries
from ...distributed.machine import free_memory_bytes
from ...run.config import RecipeConfig
from ...run.preflight import Check, LaunchContext
from ...run.resume import check_changes, read_stored_config, with_batch
from ...run.resume import find_source as find_run_source
from ...vision.data.cache import cache_folder
from ...vision.sources.find import find_source
from ...vision.sources.photo_files import is_hub_name
from ...vision.sources.photos import PhotoConfig, load_photos
from ..launch import GRACE_S
from ..runs.checkpoint_report import CheckpointReport, inspect_checkpoints

_TORCH_GRACE_S = 30.0  # the default of torch 2.13
_MIN_FREE_BYTES, _MIN_FREE_FILES = 1 << 30, 1000


def find_unusable_folder(now: LaunchContext) -> str | None:
    """The run folder is writable."""
    existing = _existing(now)
    if not existing.is_dir():
        return f"{existing} is a file: choose a folder for --output-dir"
    if not os.access(existing, os.W_OK | os.X_OK):  # without writing a test file
        return f"cannot write to {existing} (Permission denied): choose another --output-dir"
    return None


def find_lock(now: LaunchContext) -> None:
    """No other run uses the run folder."""
    refuse_in_use(_folder(now))


def find_refused_start(now: LaunchContext) -> None:
    """A run can start or resume in the run folder."""
    run, folder = now.config.run, _folder(now)
    if run.output_dir is None:
        return
    refuse_strange_entries(folder)
    if (source := find_run_source(folder, run)) is not None:
        stored = read_stored_config(source[0])
        resolved = with_batch(now.config, stored, num_processes=now.num_processes)
        if type(now.config) is not RecipeConfig:  # without the recipe its config is not known
            check_changes(stored, resolved, run.allow_change, source[0])


def find_no_whole_checkpoint(now: LaunchContext) -> str | None:
    """The run folder has a valid checkpoint, or none yet."""
    directory = _folder(now) / "checkpoints"
    if not _has_checkpoints(now) or _inspected(now)[1] is not None:
        return None
    return f"every checkpoint in {directory} is damaged, so a start is refused: restore one, or move them away"


def find_little_space(now: LaunchContext) -> str | None:
    """The disk has room for checkpoints."""
    existing = _existing(now)
    reports, _ = _inspected(now)
    needed = max([_MIN_FREE_BYTES, *(2 * report.num_bytes for report in reports)])
    free = free_bytes(existing)
    if free < needed:
        return (
            f"{existing} has {free / 2**30:.2f} GiB free, and {needed / 2**30:.2f} GiB may be too little for two "
            "checkpoints: free some space, or choose another --output-dir"
        )
    places = os.statvfs(existing) if hasattr(os, "statvfs") else None
    if places is not None and places.f_files and places.f_favail < _MIN_FREE_FILES:
        return f"{existing} has room for {places.f_favail} more files: delete some, or choose another --output-dir"
    return None


def find_damaged_checkpoints(now: LaunchContext) -> str | None:
    """Every checkpoint in the run folder is valid."""
    folder = _folder(now)
    reports, usable = _inspected(now)
    damaged = [report for report in reports if report.problem is not None]
    if not damaged:
        return None
    used = f"a run would resume from {usable}" if usable else "none is valid, so a start is refused"
    return f"{damaged[-1].problem}; {used}: see `accel-trainer inspect {folder}`"


def find_other_num_processes(now: LaunchContext) -> str | None:
    """The run resumes on the same number of processes."""
    reports, usable = _inspected(now)
    before = next((r.manifest.get("num_processes") for r in reports if r.name == usable), now.num_processes)
    if before == now.num_processes:
        return None
    return (
        f"{usable} was saved by {before} processes and this launch has {now.num_processes}: the global batch and the "
        "samples stay the same and results agree up to rounding; for identical bits use the same number"
    )


def find_short_grace(now: LaunchContext) -> str | None:
    """The launcher waits long enough for a checkpoint when it ends a run."""
    newest = list_checkpoints(_folder(now) / "checkpoints")[-1:] if _has_checkpoints(now) else []
    times = [file.lstat().st_mtime for path in newest if path.is_dir() for file in path.iterdir()]
    took_s = max(times) - min(times) if times else 0.0
    grace_s = float(now.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _TORCH_GRACE_S))
    if took_s < grace_s:
        return None
    return (
        f"{newest[0].name} took {took_s:.0f} s to write, but torch's launchers kill the run {grace_s:g} s after a "
        f"signal: set TORCH_ELASTIC_SHUTDOWN_TIMEOUT to {2 * took_s:.0f} or more (`accel-trainer launch` waits "
        f"{GRACE_S} s)"
    )


def find_unknown_data(now: LaunchContext) -> None:
    """The dataset exists."""
    data_key(now)


def data_key(now: LaunchContext) -> str:
    """Return what identifies the data; empty if there is none, or it would have to be downloaded.

    Raises:
        UserError: the run would refuse the data.
    """
    dataset, options = getattr(now.config, "dataset", None), getattr(now.config, "photos", None)
    if not isinstance(dataset, str):
        return ""
    if not isinstance(options, PhotoConfig):
        return find_source(dataset).key
    if is_hub_name(dataset):
        return ""
    return load_photos(
        dataset, image_column=options.image_column, label_column=options.label_column,
        val_fraction=options.val_fraction, cache_dir=now.config.run.cache_dir,
    ).fingerprint  # fmt: skip


def find_little_memory(now: LaunchContext) -> str | None:
    """The decoded images fit into memory."""
    dataset, source = getattr(now.config, "dataset", None), None
    if isinstance(dataset, str) and not hasattr(now.config, "photos"):  # photos are decoded as they are needed
        with suppress(UserError):  # reported by another check
            source = find_source(dataset)
    if source is None:
        return None
    folder = cache_folder(source, expand_home(now.config.run.cache_dir))
    size = sum(path.stat().st_size for path in folder.glob("*.u8"))
    free = free_memory_bytes()
    if size <= free:
        return None
    return (
        f"{folder} has {size / 2**30:.1f} GiB of decoded images, but only {free / 2**30:.1f} GiB of memory is free, so "
        "every epoch reads them from the disk: use smaller images, or a machine with more memory"
    )


CHECKS = (
    Check("OUTPUT_DIR", "error", find_unusable_folder),
    Check("LOCKED", "error", find_lock),
    Check("START_REFUSED", "error", find_refused_start),
    Check("CKPT_NONE_VALID", "error", find_no_whole_checkpoint),
    Check("DISK_SPACE", "warning", find_little_space),
    Check("CHECKPOINT_DAMAGED", "warning", find_damaged_checkpoints),
    Check("OTHER_NUM_PROCESSES", "warning", find_other_num_processes),
    Check("GRACE", "warning", find_short_grace),
    Check("DATA", "error", find_unknown_data),
    Check("MEMORY", "warning", find_little_memory),
)


def _folder(now: LaunchContext) -> Path:
    return now.config.run.output_dir or now.config.run.runs_dir


def _has_checkpoints(now: LaunchContext) -> bool:
    try:
        return has_checkpoints(_folder(now) / "checkpoints")
    except UserError:
        return False  # a link, reported by another check


def _inspected(now: LaunchContext) -> tuple[list[CheckpointReport], str | None]:
    return inspect_checkpoints(_folder(now) / "checkpoints") if _has_checkpoints(now) else ([], None)


def _existing(now: LaunchContext) -> Path:
    """Return the run folder, or its nearest existing parent."""
    folder = _folder(now).absolute()
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))
