"""A run from the outside: its config, its folder, where it starts from, and what it leaves behind."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
import yaml
from accelerate import Accelerator

from . import storage
from .checkpoint import CheckpointConfig
from .checkpoint_files import CHECKPOINT_NAME, LoadedCheckpoint, decode_files
from .checkpoint_folder import find_checkpoint, has_checkpoints
from .collectives import broadcast_files, differing_processes, leave, run_on_main
from .config import config_to_dict, diff_config, save_config
from .environment import describe_environment
from .errors import (
    CheckpointError,
    ConfigError,
    DivergedError,
    OutputError,
    Preempted,
    ProcessError,
    UserError,
)
from .optimizer import OptimizerConfig
from .plan import BatchConfig
from .preemption import StopFlag, stop_on_signals
from .run_folder import RunLock, prepare_directory
from .runtime import RuntimeConfig, find_launcher, library_versions, start_accelerator
from .schedule import ScheduleConfig
from .seeding import seed_everything
from .status import reported
from .trainer import TrainerConfig
from .watchdog import Watchdog

_logger = logging.getLogger(__name__)

# What may differ between two commands of the same run: where it writes, how long it goes on, what it
# shows, what it does when it diverges, and how the global batch is split. Everything else decides what is trained.
FREE = (
    "run.", "checkpoint.", "trainer.max_steps", "trainer.max_time_s", "trainer.on_nonfinite",
    "batch.per_device_batch_size", "batch.accumulation_steps", "batch.eval_batch_size",
    "runtime.num_threads", "runtime.timeout_s",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run lives and where it starts from."""

    output_dir: Annotated[Path | None, tyro.conf.arg(aliases=["--output-dir"])] = None
    """The run folder; None: `runs/<recipe>-<time>`, or the newest unfinished one of the same config."""
    resume: Annotated[str, tyro.conf.arg(aliases=["--resume"])] = "auto"
    """`auto` continues the run in the folder, if any; `never` refuses to; or a checkpoint or run to branch from."""
    init_from: Annotated[Path | None, tyro.conf.arg(aliases=["--init-from"])] = None
    """A checkpoint, run or safetensors file whose weights a new run starts with; nothing else of it is used."""
    allow_change: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--allow-change"])] = ()
    """Config values (dotted names, or `data`) that may differ from the run that is resumed."""
    runs_dir: Path = Path("runs")
    """Where run folders without an explicit `output_dir` are made."""
    cache_dir: Annotated[Path, tyro.conf.arg(aliases=["--cache-dir"])] = Path("~/.cache/accel_trainer")
    """Where decoded data is kept, for all runs."""
    debug: Annotated[bool, tyro.conf.arg(aliases=["--debug"])] = False
    """Show a traceback with an error."""


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """What every recipe can set. A recipe's own config adds its data and its model."""

    seed: int = 0
    """Decides the initial weights, the order of the data, and every augmentation and dropout."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    run: RunConfig = field(default_factory=RunConfig)


R = TypeVar("R", bound=RecipeConfig)


@dataclass(frozen=True)
class Run:
    """A started run: its processes, its folder and the checkpoint it continues from, on every process.

    `config` has the global batch size filled in, so that it is the same after a change of hardware.
    """

    config: RecipeConfig
    accelerator: Accelerator
    folder: Path
    checkpoint: LoadedCheckpoint | None
    config_sha256: str
    watchdog: Watchdog


@contextmanager
def start_run(config: RecipeConfig, *, recipe: str) -> Iterator[Run]:
    """Join the processes, lock the run folder and find where to start. **Collective.**

    Raises:
        ConfigError: the config differs from that of the run it would continue.
        OutputError: the folder cannot be written or is in use.
        CheckpointError: there are checkpoints, and none is valid.
    """
    accelerator = start_accelerator(config.runtime)
    seed_everything(config.seed)
    lock: list[RunLock] = []
    created: list[Path] = []
    global_batch_size = config.batch.resolved_global_batch_size(accelerator.num_processes)

    def open_folder() -> bytes:
        wanted = _choose_folder(config, recipe)
        if not wanted.exists():
            created.append(wanted)
        folder = prepare_directory(wanted)
        lock.append(RunLock(folder / "run.lock"))
        _sweep(folder)
        source = _source(folder, config.run)
        stored = None if source is None else _stored_config(source)
        resolved = _with_global_batch(config, stored, global_batch_size)
        if source is not None and stored is not None:
            _check_unchanged(stored, resolved, config.run.allow_change, source.run)
            if source.run != folder:
                storage.write_file_atomic(
                    folder / "metrics.jsonl", (source.run / "metrics.jsonl").read_bytes()
                )
        storage.write_file_atomic(folder / "config.yaml", save_config(resolved).encode())
        environment = json.dumps(describe_environment(accelerator), indent=1)
        storage.write_file_atomic(folder / "environment.json", environment.encode())
        where = None if source is None else [str(source.run), source.checkpoint]
        return json.dumps([str(folder), where, resolved.batch.global_batch_size]).encode()

    _check_same_everywhere(config, accelerator)
    rank, num_processes = accelerator.process_index, accelerator.num_processes
    stop_flag = StopFlag(num_processes=num_processes)
    watchdog = Watchdog(stop_flag, timeout_s=config.runtime.timeout_s, launcher_pid=find_launcher())
    try:
        with stop_on_signals(stop_flag), watchdog:
            stop_flag.may_leave = True  # until there is something to save
            path, where, global_batch_size = json.loads(run_on_main(open_folder, accelerator))
            folder = Path(path)
            resolved = replace(config, batch=replace(config.batch, global_batch_size=global_batch_size))
            with reported(folder, watchdog, rank=rank, num_processes=num_processes):
                checkpoint = _read_checkpoint(where, accelerator)
                yield Run(resolved, accelerator, folder, checkpoint, _identity_sha256(resolved), watchdog)
                leave(accelerator)
    except (DivergedError, Preempted, ProcessError):
        raise  # the folder says why
    except UserError:
        for folder in created:
            _remove_unused(folder)
        raise
    finally:
        for held in lock:
            held.release()


def _remove_unused(folder: Path) -> None:
    """Remove the folder of a run that was refused before it wrote a row or a checkpoint."""
    history = folder / "metrics.jsonl"
    is_empty = not history.exists() or history.stat().st_size == 0
    if folder.is_dir() and is_empty and not has_checkpoints(folder / "checkpoints"):
        storage.remove_directories([folder])


@dataclass(frozen=True)
class _Source:
    """The run to continue, and its checkpoint's name; None: the newest valid one."""

    run: Path
    checkpoint: str | None


def _check_same_everywhere(config: RecipeConfig, accelerator: Accelerator) -> None:
    """Raise on all processes if some have other versions or another config than main. **Collective.**"""
    mine = json.dumps([library_versions(), _identity_sha256(config)]).encode()
    if others := differing_processes(mine, accelerator):
        raise ConfigError(
            "PROCESSES_DIFFER",
            f"processes {', '.join(map(str, others))} have other versions of Python, torch, accelerate or "
            "accel_trainer, or another config, than process 0: install the same and start all with the same command",
        )


def _sweep(folder: Path) -> None:
    """Delete what attempts that were killed left half-written; the checkpointer sweeps its own folder."""
    for part in (folder, folder / "logs", folder / "export"):
        if part.is_dir():
            storage.sweep(part)


def _choose_folder(config: RecipeConfig, recipe: str) -> Path:
    """Return the run folder, which need not exist."""
    run = config.run
    if run.output_dir is not None:
        return run.output_dir
    if run.resume == "auto":
        for folder in sorted(run.runs_dir.glob(f"{recipe}-*"), reverse=True):
            if _is_unfinished(folder, config):
                return folder
    name = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = run.runs_dir / name, 1
    while folder.exists():
        folder, number = run.runs_dir / f"{name}-{number}", number + 1
    return folder


def _is_unfinished(folder: Path, config: RecipeConfig) -> bool:
    """Whether `folder` holds a run of the same config that is neither done nor running."""
    try:
        stored = yaml.safe_load((folder / "config.yaml").read_text())
        resolved = _with_global_batch(config, stored, None)
        if _differences(stored, config_to_dict(resolved)) or not has_checkpoints(folder / "checkpoints"):
            return False
        RunLock(folder / "run.lock").release()
        result = folder / "result.json"
        return not (result.exists() and json.loads(result.read_bytes())["state"] == "done")
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError, OutputError):
        return False


def _source(folder: Path, run: RunConfig) -> _Source | None:
    """Return what to continue from. A run's own checkpoints win, so that the same command always goes on."""
    if has_checkpoints(folder / "checkpoints"):
        if run.resume == "never":
            raise OutputError(
                "RUN_EXISTS",
                f"{folder} already has checkpoints and --resume is never: choose another --output-dir",
            )
        return _Source(folder, None)
    if run.resume in ("auto", "never"):
        return None
    path = Path(run.resume).resolve()
    if CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir():
        return _Source(path.parent.parent, path.name)
    if has_checkpoints(path / "checkpoints"):
        return _Source(path, None)
    raise CheckpointError(
        "CKPT_NOT_FOUND", f"--resume {run.resume} is neither a checkpoint nor a run with one: check the path"
    )


def _stored_config(source: _Source) -> dict[str, Any]:
    try:
        stored = yaml.safe_load((source.run / "config.yaml").read_text())
    except (OSError, yaml.YAMLError) as error:
        raise CheckpointError(
            "RUN_CONFIG", f"{source.run / 'config.yaml'} cannot be read ({error}): restore it"
        ) from error
    if not isinstance(stored, dict):
        raise CheckpointError("RUN_CONFIG", f"{source.run / 'config.yaml'} is not a config: restore it")
    return stored


def _with_global_batch(config: R, stored: Mapping[str, Any] | None, fallback: int | None) -> R:
    """Return `config` with its global batch: as given, else of the run that is continued, else `fallback`."""
    given = config.batch.global_batch_size
    kept = (stored or {}).get("batch", {}).get("global_batch_size")
    return replace(config, batch=replace(config.batch, global_batch_size=given or kept or fallback))


def _differences(stored: Mapping[str, Any], mine: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return [change for change in diff_config(stored, mine) if not change[0].startswith(FREE)]


def _check_unchanged(
    stored: Mapping[str, Any], config: RecipeConfig, allowed: tuple[str, ...], folder: Path
) -> None:
    names = {name.replace("-", "_") for name in allowed}
    changes = [change for change in _differences(stored, config_to_dict(config)) if change[0] not in names]
    if changes:
        listed = "; ".join(f"{name}: {old} -> {new}" for name, old, new in changes)
        flags = " ".join(name for name, _, _ in changes)
        raise ConfigError(
            "CONFIG_CHANGED",
            f"{folder} was made with another config ({listed}): choose another --output-dir, or continue it on "
            f"purpose with --allow-change {flags}",
        )


def _read_checkpoint(
    where: tuple[str, str | None] | None, accelerator: Accelerator
) -> LoadedCheckpoint | None:
    """Return the checkpoint to start from: read and verified by the main process, decoded by all. **Collective.**"""
    if where is None:
        return None
    files: dict[str, bytes] = {}

    def read() -> bytes:
        files.update(find_checkpoint(Path(where[0]) / "checkpoints", where[1]) or {})
        return b""

    run_on_main(read, accelerator)
    return decode_files(broadcast_files(files, accelerator))


def _identity_sha256(config: RecipeConfig) -> str:
    """Return a hash of what decides the training."""
    values = [change for change in diff_config({}, config_to_dict(config)) if not change[0].startswith(FREE)]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
