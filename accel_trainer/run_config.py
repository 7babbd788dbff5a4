"""What every recipe can set, and which of it may change while a run goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from .checkpoint import CheckpointConfig
from .config import config_to_dict, diff_config
from .optimizer import OptimizerConfig
from .plan import BatchConfig
from .runtime import RuntimeConfig
from .schedule import ScheduleConfig
from .trainer import TrainerConfig

# What may differ between two commands of the same run: where it writes, how long it goes on, what it
# shows, what it does when it diverges, and how the global batch is split. Everything else decides what is trained.
FREE = (
    "run.", "checkpoint.", "trainer.max_steps", "trainer.max_time_s", "trainer.on_nonfinite",
    "batch.per_device_batch_size", "batch.accumulation_steps", "batch.eval_batch_size",
    "batch.num_workers", "batch.fit_batch",
    "runtime.num_threads", "runtime.timeout_s", "runtime.backend", "runtime.debug_distributed",
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
    track: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--track"])] = ()
    """Trackers to copy `metrics.jsonl` into, offline: `tensorboard`, `wandb`, `mlflow`, `trackio`, or another that
    accelerate knows. Their own environment variables, such as WANDB_MODE=online, still count."""
    runs_dir: Path = Path("runs")
    """Where run folders without an explicit `output_dir` are made."""
    cache_dir: Annotated[Path, tyro.conf.arg(aliases=["--cache-dir"])] = Path("~/.cache/accel_trainer")
    """Where decoded data is kept, for all runs."""
    profile: Annotated[bool, tyro.conf.arg(aliases=["--profile"])] = False
    """Trace some steps and write where the time goes into `profile/` of the run folder."""
    dry_run: Annotated[bool, tyro.conf.arg(aliases=["--dry-run"])] = False
    """Try it all: a step, an evaluation, a checkpoint, and on from there for another, in a folder that is gone then."""
    quiet: Annotated[bool, tyro.conf.arg(aliases=["--quiet"])] = False
    """Print warnings and errors alone. What the run leaves in its folder is the same."""
    debug: Annotated[bool, tyro.conf.arg(aliases=["--debug"])] = False
    """Show a traceback with an error."""

    def __post_init__(self) -> None:
        for name in ("output_dir", "init_from", "runs_dir", "cache_dir"):
            if isinstance(path := getattr(self, name), str):  # as people write it in Python
                object.__setattr__(self, name, Path(path))


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


def diff_training(stored: Mapping[str, Any], mine: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return `(dotted name, old, new)` of the values that decide what is trained and differ."""
    return [change for change in diff_config(stored, mine) if not change[0].startswith(FREE)]


def identity_sha256(config: RecipeConfig) -> str:
    """Return a hash of what decides the training."""
    values = diff_training({}, config_to_dict(config))
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
