"""From the parts of a recipe (model, data, task) to a trainer that is ready to fit."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from . import storage
from .callbacks.attempts import AttemptLog
from .callbacks.base import Callback
from .callbacks.log import MetricsLog
from .callbacks.profile import Profile
from .callbacks.progress import Progress
from .callbacks.record import RunRecord
from .callbacks.stop import EarlyStopping, TimeLimit
from .callbacks.trackers import Trackers
from .checkpoint import Checkpointer
from .checkpoint_files import LoadedCheckpoint, decode_files, read_checkpoint
from .checkpoint_folder import find_checkpoint
from .compilation import Compiler, Stopwatch
from .config import config_to_dict
from .errors import CheckpointError, UserError
from .evaluation import Evaluator
from .fingerprint import SAMPLED, describe_fingerprint
from .history import History
from .optimizer import build_optimizer
from .plan import BatchPlan
from .run import Run, check_same_everywhere
from .run_config import RecipeConfig
from .runtime import describe_machine, library_versions, place_model
from .schedule import Schedule, build_schedule, scale_learning_rate
from .sharding import refuse_if_sharded
from .tensor_file import unpack_tensors
from .trainer import Trainer
from .training_state import check_weights
from .types import EvalLoader, Loader, Metric, Task

_logger = logging.getLogger(__name__)

_MAX_WEIGHTS_BYTES = 2**36


def build_trainer(
    run: Run,
    *,
    model: nn.Module,
    task: Task,
    loader: Loader,
    eval_loader: EvalLoader,
    metrics: Sequence[Metric],
    data_fingerprint: str | None = None,
    export_config: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    trainer_class: type[Trainer] = Trainer,
) -> Trainer:
    """Assemble a trainer for `run` and put it where the run stands. **Collective.**

    `model` is plain, on the CPU. `data_fingerprint` names the content of the data: a run is not continued on other
    data. None: a hash of some samples, if the loaders have one. `export_config` goes beside the exported weights as
    JSON. `trainer_class` is for a subclass that overrides `train_window`.

    Raises:
        ConfigError: some processes have other data than main.
        CheckpointError: the checkpoint to continue from does not fit, or a checkpoint has no room.
    """
    config, accelerator = run.config, run.accelerator
    refuse_if_sharded(
        accelerator,
        {
            "--ema": config.trainer.ema_decay,
            "--compile": config.runtime.compile,
            "--optimizer.name muon": config.optimizer.name == "muon",
            "--mixed-precision fp16": accelerator.scaler,
        },
    )
    fingerprint = _fingerprint(loader, eval_loader) if data_fingerprint is None else data_fingerprint
    num_samples = loader.plan.num_samples, eval_loader.num_samples
    check_same_everywhere({"data": f"{fingerprint}, {num_samples} samples"}, accelerator)
    if config.run.init_from is not None and run.checkpoint is None:
        _load_weights(model, config.run.init_from)
    is_main = accelerator.is_main_process
    preparation = Stopwatch()
    model = place_model(model, accelerator, config.runtime, Compiler(preparation, is_quiet=not is_main))
    plan = loader.plan
    peak_learning_rate, learning_rate_at = plan_learning_rate(config, plan)
    num_epochs, max_steps = config.trainer.num_epochs, config.trainer.max_steps
    steps = f"{num_epochs * plan.steps_per_epoch} steps"
    if max_steps is not None and max_steps < num_epochs * plan.steps_per_epoch:
        steps = f"{max_steps} steps (--max-steps)"
    banner = (
        f"{describe_machine(accelerator)}\n{plan.describe()}, {num_epochs} epochs, {steps}\n"
        f"peak learning rate {peak_learning_rate:g}, {sum(p.numel() for p in model.parameters()):,} parameters\n"
        f"{num_samples[0]} + {num_samples[1]} samples, compared at a resume by {describe_fingerprint(fingerprint)}\n"
        f"run folder {run.folder}"
    )
    progress = Progress(banner=banner, is_quiet=config.run.quiet or not is_main)
    history = History(run.folder / "metrics.jsonl") if is_main else None
    if history is not None:
        run.resources.callback(history.close)
    trackers = Trackers(config.run.track, run=run.folder, history=history, config=config_to_dict(config))
    log = MetricsLog(
        accelerator,
        history=history,
        every_n_steps=config.trainer.log_every_n_steps,
        preparation=preparation,
        sinks=[progress.show, trackers.show],
    )
    profile = Profile(run.folder / "profile", show=progress.tell)
    trainer = trainer_class(
        config.trainer,
        accelerator=accelerator,
        model=model,
        optimizer=build_optimizer(model, config.optimizer),
        learning_rate_at=learning_rate_at,
        task=task,
        loader=loader,
        evaluator=Evaluator(eval_loader, task=task, metrics=metrics, accelerator=accelerator),
        checkpointer=Checkpointer(
            run.folder / "checkpoints",
            config=config.checkpoint,
            metadata={
                "config_sha256": run.config_sha256,
                "data_fingerprint": fingerprint,
                "num_samples": list(num_samples),
                "num_processes": accelerator.num_processes,
                "global_batch_size": plan.global_batch_size,
                "versions": library_versions(),
            },
            before_commit=history.sync if history is not None else lambda: None,
        ),
        seed=config.seed,
        watchdog=run.watchdog,
        on_micro_batch_halved=run.remember_micro_batch if config.batch.fit_batch else None,
        callbacks=[
            *_stopping(run),
            log,
            progress,
            AttemptLog(run.folder / "attempts.jsonl", show=progress.tell),
            RunRecord(run.folder, log=log, export_config=export_config or {}),
            *([profile] if config.run.profile else []),
            trackers,
            *callbacks,
        ],
    )
    run.resources.callback(trainer.checkpointer.close)
    trainer.prepare_checkpoints()
    if run.checkpoint is not None:
        changes = [*run.changes, *_data_changes(run, fingerprint, num_samples)]
        _note_changes(run.checkpoint, accelerator.num_processes)
        _restore(trainer, run.checkpoint, changes)
    elif history is not None:
        history.truncate(0)  # rows of an attempt that died before its first checkpoint
    return trainer


def plan_learning_rate(config: RecipeConfig, plan: BatchPlan) -> tuple[float, Schedule]:
    """Return the peak learning rate, scaled to the global batch, and the learning rate of every step."""
    peak_learning_rate = scale_learning_rate(
        config.optimizer.learning_rate,
        rule=config.optimizer.learning_rate_scaling,
        global_batch_size=plan.global_batch_size,
        base_batch_size=config.optimizer.base_batch_size,
    )
    return peak_learning_rate, build_schedule(
        config.schedule,
        peak_learning_rate=peak_learning_rate,
        total_steps=config.trainer.num_epochs * plan.steps_per_epoch,
        steps_per_epoch=plan.steps_per_epoch,
    )


def _stopping(run: Run) -> list[Callback]:
    config = run.config.trainer
    callbacks: list[Callback] = []
    if config.patience is not None:
        callbacks.append(EarlyStopping(patience=config.patience))
    if config.max_time_s is not None:
        callbacks.append(TimeLimit(max_seconds=config.max_time_s))
    return callbacks


def _fingerprint(loader: Loader, eval_loader: EvalLoader) -> str:
    """Return what tells the data of both loaders from others; empty if one of them cannot say."""
    parts = [each.fingerprint() if hasattr(each, "fingerprint") else "" for each in (loader, eval_loader)]
    return SAMPLED + hashlib.sha256("".join(parts).encode()).hexdigest() if all(parts) else ""


def _data_changes(run: Run, fingerprint: str, num_samples: tuple[int, int]) -> list[str]:
    """Return `["data"]` if the data is not what the checkpoint was trained on, and that is allowed; else nothing."""
    assert run.checkpoint is not None
    stored = run.checkpoint.manifest.get("data_fingerprint", "")
    before = tuple(run.checkpoint.manifest.get("num_samples", num_samples))
    has_same_hash = stored == fingerprint or "" in (stored, fingerprint)
    if has_same_hash and before == num_samples:
        return []
    if "data" in run.config.run.allow_change:
        return ["data"]
    change = f"{before} -> {num_samples} samples" if before != num_samples else f"{stored[:16]} -> {fingerprint[:16]}"
    raise CheckpointError(
        "DATA_CHANGED",
        f"the data is not what this run was trained on ({change}): restore it, choose another --output-dir, or "
        "continue on purpose with --allow-change data",
    )


def _note_changes(checkpoint: LoadedCheckpoint, num_processes: int) -> None:
    """Say what is not as it was for the checkpoint: the run goes on, but maybe not with the same bits."""
    now = {**library_versions(), "num_processes": num_processes}
    stored = {
        **(checkpoint.manifest.get("versions") or {}),
        "num_processes": checkpoint.manifest["num_processes"],
    }
    changed = [f"{name} {old} -> {now.get(name)}" for name, old in stored.items() if old != now.get(name)]
    if changed:
        _logger.warning(
            "not as when %s was saved: %s; the results may differ in the last bits",
            checkpoint.name,
            ", ".join(changed),
        )


def _restore(trainer: Trainer, checkpoint: LoadedCheckpoint, changes: Sequence[str]) -> None:
    """Put the run where the checkpoint was taken. Raises CheckpointError, also for what no run has saved."""
    try:
        trainer.restore(checkpoint.pieces, changes=changes)
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        raise CheckpointError(
            "CKPT_STATE", f"{checkpoint.name} holds what this run cannot load ({reason}): use another checkpoint"
        ) from error


def _load_weights(model: nn.Module, path: Path) -> None:
    """Load weights alone: of a safetensors file, a checkpoint, or a run's newest one. Its EMA, if it has one."""
    if not path.exists():
        raise CheckpointError("INIT_FROM", f"--init-from {path} does not exist: check the path")
    weights: Mapping[str, Tensor]
    try:
        if path.is_file():
            weights = unpack_tensors(storage.read_file(path, max_bytes=_MAX_WEIGHTS_BYTES))
        else:
            is_run = (path / "checkpoints").is_dir()
            files = find_checkpoint(path / "checkpoints") if is_run else read_checkpoint(path)
            if files is None:
                raise CheckpointError("CKPT_NOT_FOUND", f"--init-from {path} has no checkpoint: check the path")
            pieces = decode_files(files).pieces
            weights = pieces.get("ema", pieces["model"])
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "INIT_FROM",
            f"--init-from {path} cannot be read ({error}): give a safetensors file, a checkpoint or a run",
        ) from error
    check_weights("model", model.state_dict(), weights)
    model.load_state_dict(weights)
