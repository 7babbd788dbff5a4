"""From the parts of a recipe (model, data, task) to a trainer that is ready to fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..callbacks.early_stopping import EarlyStopping, TimeLimit
from ..callbacks.export import Exporter, OnnxExport
from ..callbacks.metric_logger import MetricLogger
from ..callbacks.metrics_file import MetricsFile
from ..callbacks.profiler import Profile
from ..callbacks.progress_bar import ProgressBar
from ..callbacks.result import ResultWriter
from ..callbacks.trackers import Trackers
from ..checkpoint.format import LoadedCheckpoint
from ..checkpoint.initial_weights import load_initial_weights
from ..checkpoint.manager import Checkpointer
from ..core.batch_plan import BatchPlan
from ..core.callback import Callback
from ..core.config import config_to_dict, diff_config
from ..core.errors import CheckpointError, ConfigError
from ..core.guards import kept_in_place
from ..core.tensor_memory import copy_model
from ..core.types import EvalLoader, Loader, Metric, Task
from ..data.fingerprint import describe_fingerprint, is_same_data, join_fingerprints
from ..distributed.accelerator import describe_machine, library_versions, place_model
from ..distributed.collectives import ALONE, join_peers, run_on_main
from ..distributed.fsdp import reject_options_with_fsdp, saves_shards
from ..optim.config import OptimizerConfig
from ..optim.lr_scheduler import Schedule, ScheduleConfig, build_schedule, checked_schedule, scale_learning_rate
from ..optim.optimizers import build_optimizer, build_own_optimizer
from ..optim.parameter_groups import describe_parameters, freeze
from ..training.compile import Compiler, Stopwatch
from ..training.evaluator import Evaluator
from ..training.trainer import Trainer
from .config import RecipeConfig, identity_sha256, with_defaults
from .dry_run import UnseenRecorder, limit_evaluation
from .parts import check_parts
from .session import Run, check_same_everywhere

_logger = logging.getLogger(__name__)


def build_trainer(
    run: Run, *, model: nn.Module, task: Task, loader: Loader, eval_loader: EvalLoader, metrics: Sequence[Metric],
    data_fingerprint: str | None = None, export_config: Mapping[str, Any] | None = None,
    optimizer: Callable[[nn.Module], Optimizer] | None = None, schedule: Schedule | None = None,
    callbacks: Sequence[Callback] = (), trainer_class: type[Trainer] = Trainer,
) -> Trainer:  # fmt: skip
    """Assemble a trainer for `run`, and restore the checkpoint that the run continues from. **Collective.**

    `model` is plain, on the CPU. `data_fingerprint` identifies the content of the data: a run does not continue on
    other data. None: a hash of some samples, if the loaders have one. `export_config` is written beside the exported
    weights as JSON. `optimizer` builds an optimizer of your own for the model on its device, and `schedule` gives its
    learning rate at each step; None: both follow the config. `trainer_class` is for a subclass that overrides
    `train_step`.

    Raises:
        ConfigError: a part is not what its name says, some processes have other data than the main process, or a
            setting has no effect.
        CheckpointError: the checkpoint to continue from does not fit, or a checkpoint has no room.
    """
    check_parts(model=model, task=task, loader=loader, eval_loader=eval_loader, metrics=metrics, callbacks=callbacks)
    config, accelerator, is_main = run.config, run.accelerator, run.accelerator.is_main_process
    options = {
        "--compile": config.runtime.compile,
        "--optimizer.name muon": config.optimizer.name == "muon",
        "--mixed-precision fp16": accelerator.scaler,
    }
    reject_options_with_fsdp(accelerator, options)
    _refuse_wrapped(model)
    fingerprint = _fingerprint(loader, eval_loader) if data_fingerprint is None else data_fingerprint
    num_samples = [loader.plan.num_samples, eval_loader.num_samples]
    task_fingerprint = task.fingerprint() if hasattr(task, "fingerprint") else ""
    check_same_everywhere({"data": f"{fingerprint}, {num_samples} samples"}, accelerator)
    origin = _load_origin(run, model)
    if config.optimizer.freeze is not None:
        freeze(model, config.optimizer.freeze)
        origin += [f"{describe_parameters(model)}: {config.optimizer.freeze}"] * (run.checkpoint is None)
    onnx = OnnxExport(copy_model(model), task, eval_loader) if config.run.onnx and is_main else None
    preparation = Stopwatch()
    model = place_model(model, accelerator, config.runtime)
    compiled = _compile(run, model, preparation) if config.runtime.compile else None
    _refuse_unused(config, optimizer=optimizer is not None, schedule=schedule is not None)
    if optimizer is None:
        chosen = build_optimizer(model, config.optimizer)
    else:
        chosen = build_own_optimizer(optimizer, model)
        config = replace(config, optimizer=OptimizerConfig(learning_rate=float(chosen.param_groups[0]["lr"])))
    peak_learning_rate, learning_rate_at = plan_learning_rate(config, loader.plan)
    num_steps = _count_steps(config, loader.plan)
    rate = f"peak learning rate {peak_learning_rate:g}"
    if schedule is not None:
        learning_rate_at, rate = checked_schedule(schedule, num_steps=num_steps), "the recipe's learning rates"
    check_same_everywhere(
        {
            "model": _describe_model(model),
            "optimizer": _describe_optimizer(chosen),
            "metrics": "\n".join(["metrics", *(type(metric).__qualname__ for metric in metrics)]),
            "task": f"{type(task).__qualname__}\n{task_fingerprint}",
            "schedule": "\n".join(f"step {at}: {learning_rate_at(at)}" for at in (0, num_steps // 2, num_steps - 1)),
        },
        accelerator,
    )
    banner = (
        f"{describe_machine(accelerator)}\n{loader.plan.describe()}, {_describe_length(config, loader.plan)}\n"
        f"{rate}, {describe_parameters(model)}, reduce: {loader.plan.reduce}\n"
        f"{num_samples[0]} + {num_samples[1]} samples; a resume checks {describe_fingerprint(fingerprint)}\n"
        f"run folder {run.folder}"
    )
    progress = ProgressBar(config.trainer, banner=banner, is_quiet=config.run.quiet or not is_main)
    history = run.resources.enter_context(closing(MetricsFile(run.folder / "metrics.jsonl"))) if is_main else None
    has_trackers = is_main and config.run.track
    trackers = [Trackers(config.run.track, run=run.folder, config=config_to_dict(run.config))] if has_trackers else []
    phase_s, patience, max_time_s = run.watchdog.phase_s, config.trainer.patience, config.trainer.max_time_s
    log = MetricLogger(
        accelerator, history=history, every_n_steps=config.trainer.log_every_n_steps, preparation=preparation,
        phase_s=phase_s, sinks=[progress.show, *(each.show for each in trackers)],
    )  # fmt: skip
    result = ResultWriter(
        run.folder,
        log=log,
        num_eval_samples=eval_loader.num_samples,
        phase_s=phase_s,
        nondeterministic=run.nondeterministic,
    )
    metadata = {
        "config_sha256": identity_sha256(run.config), "data_fingerprint": fingerprint,
        "task_fingerprint": task_fingerprint, "origin": origin, "num_samples": num_samples,
        "num_processes": accelerator.num_processes, "reduce": loader.plan.reduce, "compiled": compiled,
        "global_batch_size": loader.plan.global_batch_size, "versions": library_versions(),
    }  # fmt: skip
    checkpointer = Checkpointer(
        run.folder / "checkpoints", config=config.checkpoint, metadata=metadata,
        before_commit=history.sync if history is not None else lambda: None,
        peers=join_peers(accelerator, timeout_s=config.runtime.timeout_s) if saves_shards(accelerator) else ALONE,
    )  # fmt: skip
    run.resources.callback(checkpointer.close)
    num_parts = loader.plan.num_parts if loader.plan.reduce == "exact" else None
    if config.run.dry_run:
        eval_loader = limit_evaluation(eval_loader, num_parts=num_parts, accelerator=accelerator)
        parts = {"model": model, "optimizer": chosen, "task": task}
        callbacks = [*callbacks, UnseenRecorder(run.folder, parts, model=model)]
    trainer = trainer_class(
        config.trainer, accelerator=accelerator, model=model, optimizer=chosen,
        learning_rate_at=learning_rate_at, task=task, loader=loader,
        evaluator=Evaluator(
            eval_loader, task=task, metrics=metrics, accelerator=accelerator,
            num_parts=num_parts, seed=config.seed,
        ),
        checkpointer=checkpointer, seed=config.seed, watchdog=run.watchdog,
        on_micro_batch_halved=run.save_micro_batch if config.batch.fit_batch else None,
        callbacks=[
            *([] if patience is None else [EarlyStopping(patience=patience)]),
            *([] if max_time_s is None else [TimeLimit(run.watchdog.stop_flag, max_seconds=max_time_s)]),
            log,
            progress,
            Exporter(run.folder, weights="model" if config.trainer.ema_decay is None else "ema",
                     config=export_config or {}, onnx=onnx),
            *([result] if is_main else []),
            *([Profile(run.folder / "profile", show=progress.write)] if config.run.profile else []),
            *trackers,
            *callbacks,
        ],
    )  # fmt: skip
    prepare_checkpoints(trainer, checkpointer)
    if is_main:
        run.resources.enter_context(kept_in_place(checkpointer.directory))
    if run.checkpoint is not None:
        data_changes = _data_changes(run.checkpoint.manifest, metadata, config.run.allow_change)
        _check_task(run.checkpoint, task_fingerprint)
        _warn_of_changes(run.checkpoint, metadata)
        _restore(trainer, run.checkpoint, [*run.changes, *data_changes])
    elif history is not None:
        history.truncate(0)  # rows of an attempt that died before its first checkpoint
    return trainer


def _describe_model(model: nn.Module) -> str:
    """Return the class and a line per parameter and buffer."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    lines = (f"{name} {list(each.shape)} {each.dtype}" + " trained" * each.requires_grad for name, each in tensors)
    return "\n".join([type(model).__qualname__, *lines])


def _describe_optimizer(optimizer: Optimizer) -> str:
    """Return the class and a line per group, with its settings that are plain values."""
    lines = [type(optimizer).__qualname__]
    for group in optimizer.param_groups:
        plain = {name: value for name, value in group.items() if isinstance(value, bool | int | float | str)}
        lines.append(f"{len(group['params'])} parameters, {plain}")
    return "\n".join(lines)


def _load_origin(run: Run, model: nn.Module) -> list[str]:
    """Load the initial weights of a new run, and return in lines where weights come from; later starts repeat them."""
    if run.checkpoint is not None:
        return list(run.checkpoint.manifest.get("origin", []))
    origin, path = [str(model.weights_origin)] if hasattr(model, "weights_origin") else [], run.config.run.init_from
    if path is not None:
        origin.append(load_initial_weights(model, path, skip=run.config.run.init_skip))
        if run.accelerator.is_main_process:
            _logger.info("%s", origin[-1])
    return origin


def _compile(run: Run, model: nn.Module, preparation: Stopwatch) -> bool:
    """Compile `model` if the run does; return whether. **Collective.**"""
    compiler, stored = Compiler(preparation), {} if run.checkpoint is None else run.checkpoint.manifest
    decided = compiler.decide(run.accelerator, decided=stored.get("compiled"))
    if decided:
        compiler.compile(model)
    return decided


def _refuse_wrapped(model: nn.Module) -> None:
    """Raise ConfigError for a model that another wrapper spreads over devices."""
    for module in model.modules():
        if isinstance(module, nn.DataParallel | DistributedDataParallel):
            fact = f"the model is, or has, a {type(module).__name__}"
            raise ConfigError("MODEL", f"{fact}: give the plain module, and start a process for each device")


def _refuse_unused(config: RecipeConfig, *, optimizer: bool, schedule: bool) -> None:
    """Raise ConfigError for settings of an optimizer or a schedule that the recipe builds itself."""
    default = config if not optimizer else replace(config, optimizer=OptimizerConfig(freeze=config.optimizer.freeze))
    if schedule:
        rates = replace(default.optimizer, learning_rate=None, learning_rate_scaling="none")
        default = replace(default, optimizer=rates, schedule=ScheduleConfig())
    if unused := diff_config(config_to_dict(with_defaults(default)), config_to_dict(config)):
        fact = f"{unused[0][0]} has no effect: the recipe sets {'the optimizer' if optimizer else 'a schedule'} itself"
        raise ConfigError("CONFIG", f"{fact}: leave it out, or change the recipe")


def _count_steps(config: RecipeConfig, plan: BatchPlan) -> int:
    """Return the number of steps of the whole run, up to `max_steps`."""
    num_steps, max_steps = config.trainer.num_epochs * plan.steps_per_epoch, config.trainer.max_steps
    return num_steps if max_steps is None else min(num_steps, max_steps)


def _describe_length(config: RecipeConfig, plan: BatchPlan) -> str:
    num_epochs, num_steps = config.trainer.num_epochs, _count_steps(config, plan)
    is_limited = num_steps < num_epochs * plan.steps_per_epoch
    return f"{num_epochs} epochs, {num_steps} steps" + " (--max-steps)" * is_limited


def prepare_checkpoints(trainer: Trainer, checkpointer: Checkpointer) -> None:
    """Check, before any work, that a checkpoint can be stored and has room. **Collective.**"""
    states = trainer.state_dict()
    run_on_main(lambda: checkpointer.prepare(states), trainer.accelerator)
    checkpointer.check_shared_disk()


def plan_learning_rate(config: RecipeConfig, plan: BatchPlan) -> tuple[float, Schedule]:
    """Return the peak learning rate, scaled to the global batch, and the learning rate of every step."""
    optimizer, steps_per_epoch = config.optimizer.with_learning_rate(), plan.steps_per_epoch
    assert optimizer.learning_rate is not None
    peak_learning_rate = scale_learning_rate(
        optimizer.learning_rate, rule=optimizer.learning_rate_scaling,
        global_batch_size=plan.global_batch_size, base_batch_size=optimizer.base_batch_size,
    )  # fmt: skip
    return peak_learning_rate, build_schedule(
        config.schedule, peak_learning_rate=peak_learning_rate,
        total_steps=config.trainer.num_epochs * steps_per_epoch, steps_per_epoch=steps_per_epoch,
    )  # fmt: skip


def _fingerprint(loader: Loader, eval_loader: EvalLoader) -> str:
    """Return a hash that identifies the data of both loaders; empty if one of them has none."""
    parts = [each.fingerprint() if hasattr(each, "fingerprint") else "" for each in (loader, eval_loader)]
    return join_fingerprints(parts)


def _data_changes(stored: Mapping[str, Any], now: Mapping[str, Any], allowed: Sequence[str]) -> list[str]:
    """Return `["data"]` if the data differs from the checkpoint's, and that is allowed; else nothing."""
    before, after = stored.get("num_samples", now["num_samples"]), now["num_samples"]
    old, new = stored.get("data_fingerprint", ""), now["data_fingerprint"]
    if before == after and is_same_data(old, new):
        return []
    if "data" in allowed:
        return ["data"]
    change = f"{tuple(before)} -> {tuple(after)} samples" if before != after else f"{old[:16]} -> {new[:16]}"
    fix = "restore it, choose another --output-dir, or continue on purpose with --allow-change data"
    raise CheckpointError("DATA_CHANGED", f"the data is not what this run was trained on ({change}): {fix}")


def _check_task(checkpoint: LoadedCheckpoint, fingerprint: str) -> None:
    if checkpoint.manifest.get("task_fingerprint", fingerprint) != fingerprint:
        fact = "the task is not what this run was trained with, such as its class weights or its teacher"
        raise CheckpointError("TASK_CHANGED", f"{fact}: restore it, or choose another --output-dir")


def _warn_of_changes(checkpoint: LoadedCheckpoint, metadata: Mapping[str, Any]) -> None:
    """Warn of other libraries or processes than the checkpoint's: the last bits may differ."""
    before, now = (
        {**(each.get("versions") or {}), "num_processes": each["num_processes"]}
        for each in (checkpoint.manifest, metadata)
    )
    if metadata["reduce"] == "exact":
        del before["num_processes"]
    if changed := [f"{name} {old} -> {now.get(name)}" for name, old in before.items() if old != now.get(name)]:
        text = "changed since %s was saved: %s; the results may differ in the last bits"
        _logger.warning(text, checkpoint.name, ", ".join(changed))


def _restore(trainer: Trainer, checkpoint: LoadedCheckpoint, changes: Sequence[str]) -> None:
    """Restore the checkpoint. Raises CheckpointError, also for content that no run has saved."""
    try:
        trainer.restore(checkpoint.pieces, changes=changes)
        for stored in checkpoint.slices:
            stored.kept = None  # verified here, and read on another process
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        message = f"{checkpoint.name} contains state that this run cannot load ({reason}): use another checkpoint"
        raise CheckpointError("CKPT_STATE", message) from error
