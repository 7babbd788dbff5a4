"""The settings that every recipe has, and which of them may change on resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar

from ..callbacks.metrics_file import without_nan
from ..checkpoint.config import CheckpointConfig
from ..core.batch_plan import BatchConfig
from ..core.config import (
    Change,
    Config,
    check_pattern,
    check_types,
    config_values,
    diff_config,
    flatten_config,
    short_flag,
    unchecked_defaults,
)
from ..core.errors import ConfigError
from ..core.run_dir import expand_home
from ..distributed.accelerator import RuntimeConfig
from ..optim.config import OptimizerConfig
from ..optim.lr_scheduler import ScheduleConfig
from ..training.config import TrainerConfig

# Settings that may differ between two starts of a run, by the prefix of their dotted names. All
# others decide what is trained, and may only be changed on purpose (`--allow-change`).
# docs/checkpoints.md has the same lists.
MUTABLE_ON_RESUME = (
    "run.",
    "checkpoint.",
    "trainer.max_steps",
    "trainer.max_time_s",
    "trainer.on_nonfinite",
    "trainer.digest_every_n_steps",
    "trainer.check_every_n_steps",
    # how batches are split and read
    "batch.per_device_batch_size",
    "batch.accumulation_steps",
    "batch.eval_batch_size",
    "batch.num_workers",
    # what the file lists is compared instead
    "batch.leave_out",
    # `num_threads` decides the last bits
    "runtime.num_threads",
    "runtime.timeout_s",
    "runtime.stuck_timeout_s",
    "runtime.backend",
)
# Settings whose values may differ between the processes of a run.
_PER_PROCESS = (
    "run.",
    "batch.num_workers",
    "runtime.num_threads",
    "runtime.timeout_s",
    "runtime.stuck_timeout_s",
)
# Mutable settings that decide the bits of a result with `--reduce exact`.
_PINNED_IF_EXACT = ("batch.per_device_batch_size", "batch.eval_batch_size", "runtime.num_threads")


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """Where a run lives and where it starts from."""

    output_dir: Annotated[Path | None, short_flag("--output-dir")] = None
    """The run folder; None: the newest unfinished one of the same config and start, or else
    `runs/<recipe>-<time>`."""
    resume: Annotated[str, short_flag("--resume")] = "auto"
    """`auto` resumes the run in the folder, if any; `never` fails if there is one; or a checkpoint
    or run to branch off from."""
    init_from: Annotated[Path | None, short_flag("--init-from")] = None
    """A checkpoint, run or safetensors file whose weights a new run starts from; only its weights
    are used."""
    init_skip: Annotated[str | None, short_flag("--init-skip")] = None
    """Do not load tensors whose names match this regular expression from `init_from`."""
    allow_change: Annotated[tuple[str, ...], short_flag("--allow-change")] = ()
    """Settings (dotted names, or `data`) that may differ from the resumed run."""
    track: Annotated[tuple[str, ...], short_flag("--track")] = ()
    """Trackers to copy `metrics.jsonl` into, offline: `tensorboard`, `wandb`, `mlflow`, `trackio`,
    or any other tracker of accelerate. Their environment variables, such as
    WANDB_MODE=online, apply."""
    runs_dir: Path = Path("runs")
    """Where run folders are created if `output_dir` is not set."""
    cache_dir: Annotated[Path, short_flag("--cache-dir")] = Path("~/.cache/accel_trainer")
    """Cache of decoded data, shared by all runs."""
    onnx: Annotated[bool, short_flag("--onnx")] = False
    """Also export the model as ONNX, so that others can verify it and predict with it without the
    model's class."""
    dry_run: Annotated[bool, short_flag("--dry-run")] = False
    """In a temporary folder, train 6 steps without interruption, and 3 + 3 with a resume in a new
    process, and compare."""
    copy_recipe: bool = True
    """Copy the recipe into the run folder as `recipe.py`. It is never run from there, unless you
    pass its path to a command."""
    lock: bool = True
    """Stop if the run folder cannot be locked because its file system has no locks. Without
    it, a run trains there with a warning: two runs in one folder would damage each other's
    checkpoints."""
    shared: bool = False
    """Let the group read what the run writes, and nobody else, whatever the umask."""
    quiet: Annotated[bool, short_flag("--quiet")] = False
    """Print only warnings and errors. The files of the run do not change."""
    debug: Annotated[bool, short_flag("--debug")] = False
    """Show tracebacks with errors."""

    def __post_init__(self) -> None:
        check_pattern(self, "run", "init_skip")
        if self.onnx and find_spec("onnxscript") is None:
            raise ConfigError(
                "CONFIG", "--onnx needs onnxscript: pip install 'accel-trainer[onnx]'"
            )
        if self.init_skip is not None and self.init_from is None:
            raise ConfigError(
                "CONFIG", "--init-skip has no effect without --init-from: add that, or leave it out"
            )
        if self.init_from is not None and self.resume not in ("auto", "never"):
            raise ConfigError(
                "CONFIG",
                f"--resume {self.resume} and --init-from {self.init_from} both set the initial "
                "weights: remove one of them",
            )
        for name in ("output_dir", "init_from", "runs_dir", "cache_dir"):
            if (path := getattr(self, name)) is not None:
                # A shell leaves `--output-dir=~/run` as it is.
                path = Path(path) if name == "cache_dir" else expand_home(Path(path))
                object.__setattr__(self, name, path)


@dataclass(frozen=True, kw_only=True)
class RecipeConfig(Config):
    """The settings of every recipe. A recipe subclasses it to add those of its data and model."""

    seed: int = 0
    """Determines the initial weights, the order of the data, and every augmentation and dropout."""
    batch: BatchConfig = BatchConfig()
    trainer: TrainerConfig = TrainerConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    run: RunConfig = RunConfig()


C = TypeVar("C", bound=RecipeConfig)


def with_defaults(config: C) -> C:
    """Return the config with the values filled in that follow from others, as a run stores it."""
    runtime = config.runtime
    if config.batch.reduce == "exact":  # nothing may depend on the number of processes
        runtime = replace(runtime, sync_batch_norm=False, num_threads=runtime.num_threads or 1)
    checkpoint = config.checkpoint
    if config.trainer.num_steps is not None and checkpoint.every_n_steps is None:
        checkpoint = replace(checkpoint, every_n_steps=1000)
    return replace(
        config,
        trainer=config.trainer.with_defaults(),
        optimizer=config.optimizer.with_defaults(),
        checkpoint=checkpoint,
        runtime=runtime,
    )


def training_changes(stored: Mapping[str, Any], config: RecipeConfig) -> list[Change]:
    """Return the changes of settings that decide the training.

    A setting that is not in the `stored` config had its default; a stored value for which there is
    no setting is ignored. A new key of a dict is a change from None.
    """
    before = config_values(unchecked_defaults(type(config))) | dict(flatten_config(stored))
    now = decisive_values(config)
    return diff_config({name: before.get(name) for name in now}, now)


def describe_shared(config: RecipeConfig) -> str:
    """Return a line for each setting that must be the same on all processes."""
    decisive = decisive_values(config)
    return "\n".join(
        f"{name}: {value}"
        for name, value in config_values(config).items()
        if name in decisive or not name.startswith(_PER_PROCESS)
    )


def checked_config(config: C) -> C:
    """Return the config of a start, with the values filled in that follow from others.

    Raises ConfigError for a value of a wrong type, for NaN or inf in a setting that checkpoints
    store, and for a name in `--allow-change` that is no setting.
    """
    check_types(config, RecipeConfig)
    for name, value in decisive_values(config).items():
        if without_nan(value) != value:
            raise ConfigError("CONFIG", f"{name} is {value}: set it to a finite number, or None")
    known = {"data", *config_values(config)}
    for name in config.run.allow_change:
        if name.replace("-", "_") not in known:
            choices = ", ".join(["data", *decisive_values(config)])
            raise ConfigError(
                "CONFIG", f"--allow-change {name}: there is no such setting: choose from {choices}"
            )
    return with_defaults(config)


def decisive_values(config: RecipeConfig) -> dict[str, Any]:
    """Return the settings that decide the training, by dotted name."""
    pinned = _PINNED_IF_EXACT if config.batch.reduce == "exact" else ()
    return {
        name: value
        for name, value in config_values(config).items()
        if name in pinned or not name.startswith(MUTABLE_ON_RESUME)
    }
