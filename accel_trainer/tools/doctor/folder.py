"""Whether the run folder and the data can be used, and what a start in that folder would go on from."""

from __future__ import annotations

import os
from pathlib import Path

from ...checkpoint_files import list_checkpoints
from ...checkpoint_folder import has_checkpoints
from ...errors import UserError
from ...machine import free_memory_bytes
from ...preflight import Rule, Situation
from ...resume import check_changes, read_stored_config, with_batch
from ...resume import find_source as find_run_source
from ...run_config import RecipeConfig
from ...run_folder import expand_home, free_bytes, refuse_in_use, refuse_strange_entries
from ...vision.cache import cache_folder
from ...vision.raw import Source
from ...vision.sources import find_source
from ..checkpoint_report import CheckpointReport, inspect_checkpoints
from ..launch import GRACE_S

_TORCH_GRACE_S = 30.0  # torch 2.13, unless told
_MIN_FREE_BYTES, _MIN_FREE_FILES = 1 << 30, 1000


def find_unusable_folder(now: Situation) -> str | None:
    """The run folder can be written."""
    existing = _existing(now)
    if not existing.is_dir():
        return f"{existing} is a file: choose a folder for --output-dir"
    if not os.access(existing, os.W_OK | os.X_OK):  # asks, and leaves nothing there for a moment
        return f"cannot write to {existing} (Permission denied): choose another --output-dir"
    return None


def find_lock(now: Situation) -> str | None:
    """No other run is in the run folder."""
    try:
        refuse_in_use(_folder(now))
    except (UserError, OSError) as error:
        return str(error.args[0])
    return None


def find_refused_start(now: Situation) -> str | None:
    """A start finds in the run folder what it can go on from."""
    run, folder = now.config.run, _folder(now)
    if run.output_dir is None:
        return None
    try:
        refuse_strange_entries(folder)
        source = find_run_source(folder, run)
        if source is not None:
            stored = read_stored_config(source)
            resolved = with_batch(now.config, stored, num_processes=now.num_processes)
            if type(now.config) is not RecipeConfig:  # without its recipe nobody knows what the config will be
                check_changes(stored, resolved, run.allow_change, source.run)
    except UserError as error:
        return str(error.args[0])
    return None


def find_no_whole_checkpoint(now: Situation) -> str | None:
    """One of the checkpoints in the run folder is whole."""
    directory = _folder(now) / "checkpoints"
    if not _has_checkpoints(now) or _inspected(now)[1] is not None:
        return None
    return f"every checkpoint in {directory} is damaged, so that a start is refused: restore one, or move them away"


def find_little_space(now: Situation) -> str | None:
    """The disk has room for checkpoints."""
    existing = _existing(now)
    reports, _ = _inspected(now)
    needed = max([_MIN_FREE_BYTES, *(2 * report.num_bytes for report in reports)])
    free = free_bytes(existing)
    if free < needed:
        return (
            f"{existing} has {free / 2**30:.2f} GiB free, and {needed / 2**30:.2f} GiB is little for two checkpoints: "
            "free some space, or choose another --output-dir"
        )
    places = os.statvfs(existing) if hasattr(os, "statvfs") else None
    if places is not None and places.f_files and places.f_favail < _MIN_FREE_FILES:
        return f"{existing} has room for {places.f_favail} more files: delete some, or choose another --output-dir"
    return None


def find_damaged_checkpoints(now: Situation) -> str | None:
    """Every checkpoint in the run folder is whole."""
    folder = _folder(now)
    reports, usable = _inspected(now)
    damaged = [report for report in reports if report.problem is not None]
    if not damaged:
        return None
    used = f"a start goes on from {usable}" if usable else "none is whole, so that a start is refused"
    return f"{damaged[-1].problem}; {used}: see `accel-trainer inspect {folder}`"


def find_other_num_processes(now: Situation) -> str | None:
    """The run goes on with as many processes as it had."""
    reports, usable = _inspected(now)
    before = next((r.manifest.get("num_processes") for r in reports if r.name == usable), now.num_processes)
    if before == now.num_processes:
        return None
    return (
        f"{usable} was saved by {before} processes and this launch has {now.num_processes}: the global batch and every "
        "sample stay the same and results agree up to rounding; for the same bits launch as before"
    )


def find_short_grace(now: Situation) -> str | None:
    """A launcher that ends a run leaves it the time that a checkpoint takes."""
    newest = list_checkpoints(_folder(now) / "checkpoints")[-1:] if _has_checkpoints(now) else []
    times = [file.lstat().st_mtime for path in newest if path.is_dir() for file in path.iterdir()]
    took_s = max(times) - min(times) if times else 0.0
    grace_s = float(now.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _TORCH_GRACE_S))
    if took_s < grace_s:
        return None
    return (
        f"{newest[0].name} took {took_s:.0f} s to write, and torch's launchers kill {grace_s:g} s after a signal: set "
        f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT to {2 * took_s:.0f} or more (`accel-trainer launch` leaves {GRACE_S} s)"
    )


def find_unknown_data(now: Situation) -> str | None:
    """The data set is there."""
    try:
        _source(now)
    except UserError as error:
        return str(error.args[0])
    return None


def find_little_memory(now: Situation) -> str | None:
    """The decoded images fit into memory."""
    try:
        source = _source(now)
    except UserError:
        return None  # found by another rule
    if source is None:
        return None
    folder = cache_folder(source, expand_home(now.config.run.cache_dir))
    size = sum(path.stat().st_size for path in folder.glob("*.u8"))
    free = free_memory_bytes()
    if size <= free:
        return None
    return (
        f"{folder} has {size / 2**30:.1f} GiB of decoded images and {free / 2**30:.1f} GiB of memory is free: they are "
        "read from the disk again in every epoch; use smaller images, or a machine with more memory"
    )


RULES = (
    Rule("OUTPUT_DIR", "error", find_unusable_folder),
    Rule("LOCKED", "error", find_lock),
    Rule("START_REFUSED", "error", find_refused_start),
    Rule("CKPT_NONE_VALID", "error", find_no_whole_checkpoint),
    Rule("DISK_SPACE", "warning", find_little_space),
    Rule("CHECKPOINT_DAMAGED", "warning", find_damaged_checkpoints),
    Rule("OTHER_NUM_PROCESSES", "warning", find_other_num_processes),
    Rule("GRACE", "warning", find_short_grace),
    Rule("DATA", "error", find_unknown_data),
    Rule("MEMORY", "warning", find_little_memory),
)


def _folder(now: Situation) -> Path:
    return now.config.run.output_dir or now.config.run.runs_dir


def _has_checkpoints(now: Situation) -> bool:
    try:
        return has_checkpoints(_folder(now) / "checkpoints")
    except UserError:
        return False  # a link: found by another rule


def _inspected(now: Situation) -> tuple[list[CheckpointReport], str | None]:
    return inspect_checkpoints(_folder(now) / "checkpoints") if _has_checkpoints(now) else ([], None)


def _existing(now: Situation) -> Path:
    """Return the run folder, or the nearest folder above it that exists."""
    folder = _folder(now).absolute()
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


def _source(now: Situation) -> Source | None:
    dataset = getattr(now.config, "dataset", None)
    return find_source(dataset) if isinstance(dataset, str) else None
