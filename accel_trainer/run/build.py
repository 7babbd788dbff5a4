"""From the parts of a recipe (model, data, task) to a trainer that is ready to fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..callbacks.console import say
from ..callbacks.evaluation_file import add_details
from ..callbacks.metrics_file import MetricsFile
from ..callbacks.onnx import OnnxExport
from ..callbacks.plateau import ReduceLROnPlateau
from ..checkpoint.format import Manifest
from ..checkpoint.frozen import digests_of
from ..checkpoint.initial_weights import load_initial_weights
from ..checkpoint.manager import Checkpointer, copy_metadata
from ..checks.agreement import (
    check_same_everywhere,
    describe_model,
    describe_optimizer,
    describe_schedule,
)
from ..checks.boundaries import BoundaryChecks
from ..checks.endless import refuse_epochs
from ..checks.first_reading import FirstReadings
from ..checks.modes import (
    KEPT_IN_EVALUATION,
    describe_switched,
    refuse_older_rule,
    warn_of_untrained_norms,
)
from ..checks.parts import (
    check_coupling,
    check_model,
    check_optimizers,
    check_part,
    check_parts,
    check_states,
)
from ..checks.rates import describe_rates
from ..checks.reader_trial import try_reader
from ..checks.rehearsal import Rehearsal
from ..checks.schedules import describe_misfit
from ..checks.subject import Subject
from ..core.batch_plan import BatchConfig, BatchPlan
from ..core.config import answers_unknown, config_to_dict
from ..core.errors import ConfigError
from ..core.logger import logger
from ..core.module_order import take_order
from ..core.parameters import named_parts
from ..core.registry import Pieces
from ..core.tensor_memory import copy_model
from ..core.types import Loader, Metric, Samples, Task
from ..core.wording import counted
from ..data.loader import DEFAULT_OPTIONS, DatasetOptions
from ..data.reader import Reader
from ..distributed.accelerator import describe_machine, library_versions
from ..distributed.collectives import run_on_main
from ..optim.parameter_groups import describe_parameters, freeze
from ..training.assembly import assemble
from ..training.callback import Callback
from ..training.callback_runner import named
from ..training.compile import compile_model
from ..training.evaluation.evaluation import TEST, Evaluation, Evaluations
from ..training.evaluation.evaluator import Evaluator
from ..training.progress import EVALUATION, choose_monitor
from ..training.strategy import choose_strategy
from ..training.strategy.base import Strategy
from ..training.trainer import Trainer
from .best_weights import load_best_weights
from .callbacks import build_callbacks
from .config import decisive_values
from .data import TEST_SET, EvalSet, Metrics, RunData, build_data, choose_metrics, fingerprint_of
from .extra_callbacks import Observer, extra_callbacks
from .folder import record_start
from .modes import kept_in_evaluation, put_into_training
from .optimization import (
    BuildOptimizer,
    Optimization,
    describe_length,
    plan_optimization,
)
from .provenance import defaults_of
from .resume import begin_history
from .session import Run


@answers_unknown
def build_trainer(
    run: Run,
    *,
    model: nn.Module,
    task: Task,
    train_set: Samples | Reader | Loader,
    eval_sets: EvalSet | Mapping[str, EvalSet],
    test_set: EvalSet | None = None,
    metrics: Metrics | None = None,
    options: DatasetOptions = DEFAULT_OPTIONS,
    data_fingerprint: str | None = None,
    export_config: Mapping[str, Any] | None = None,
    processor: Any = None,
    optimizer: BuildOptimizer | Mapping[str, BuildOptimizer] | None = None,
    schedule: Callable[..., float] | None = None,
    callbacks: Sequence[Callback] = (),
    states: Mapping[str, Any] = MappingProxyType({}),
    metadata: Mapping[str, Any] | None = None,
    trainer_class: type[Trainer] = Trainer,
) -> Trainer:
    """Assemble a trainer for `run`, and restore the checkpoint that the run continues from.

    **Collective.**

        with start_run(recipe="digits", epochs=20, lr=0.1) as run:
            trainer = build_trainer(
                run, model=model, task=ClassificationTask(), train_set=train, eval_sets=val
            )
            trainer.fit()

    Args:
        run: that of `start_run`.
        model: a plain module on the CPU.
        task: turns a batch into the losses of its samples.
        train_set: a map-style dataset, whose samples become batches as `options` say, a `Reader`,
            or a loader.
        eval_sets: such a dataset or reader, an evaluation loader, an `Evaluation` of your own, or a
            dict of several by name, whose first one decides the best checkpoint.
        test_set: is evaluated once, at the end, with the best weights, as `test/...`.
        metrics: those of all sets, or a dict of lists by the names of sets; None: the task's
            `metrics`, or else the mean loss.
        options: how samples become batches.
        data_fingerprint: identifies the content of the data: a run does not continue on other data;
            None: a hash of some samples, if the loaders have one.
        export_config: is written beside the exported weights as JSON.
        processor: of a model with `save_pretrained`, as in transformers, diffusers or peft, which
            both write `export/pretrained/`; it may be a tokenizer.
        optimizer: a function that builds your optimizer for the model on its device, or a dict of
            several by name, each over its own parameters of the whole model; the task's `turn` or
            `updates` say which of them step, all if it has neither. None: as the config says.
        schedule: returns the learning rate at each step, and may ask for `steps_per_epoch`, too;
            other groups and optimizers keep their ratio to the first. None: as the config says.
        callbacks: are called at each moment of the training, in this order.
        states: objects of your own with `state_dict` and `load_state_dict`, by the names under
            which checkpoints store them.
        metadata: plain JSON values that the manifest of every checkpoint stores; a run that
            continues keeps those of its checkpoint, and adds what they lack.
        trainer_class: a subclass that overrides `train_step`.

    Raises:
        ConfigError: an argument has the wrong type, `metadata` is not plain JSON, some processes
            have other data than the main process, a setting has no effect, or a step splits the
            pairs of a loss.
        CheckpointError: the checkpoint to continue from does not fit, or the disk has no room for a
            checkpoint.
    """
    # The order matters.
    # 1. Parts and data are checked first: nothing has been changed yet.
    check_part("run", run)
    check_model(model)
    check_part("task", task)
    callbacks = check_parts("callbacks", callbacks)
    check_optimizers(optimizer, task, run.accelerator)
    check_states(states)
    if processor is not None:
        check_part("processor", processor)
    noted = copy_metadata(metadata)
    export_config = copy_metadata(export_config, "export_config")
    extra = extra_callbacks()
    observers = [each for each in extra if isinstance(each, Observer)]
    _refuse_endless(run, observers)
    build: Callable[..., RunData] = build_data
    for each in observers:
        build = partial(each.build_data, build)
    data = build(run, train_set, eval_sets, test_set, options)
    if not hasattr(train_set, "step_batches"):  # a loader has a batch of its own
        run = _with_batch_of(run, data.plan)
    refuse_epochs(run.config.trainer, run.config.schedule, data.plan)
    check_coupling(task, data.plan)
    run.activity.couples_batch = getattr(task, "couples_batch", False)
    readings = FirstReadings(data.loaders, run.accelerator)
    try_reader(data.train, run.accelerator)
    metrics_of = choose_metrics(metrics, task, data)
    strategy = _choose_strategy(run, data.plan, optimizer, task)
    identity = _identify(run, data, data_fingerprint, task)

    # 2. The model gets its order, initial weights and frozen parameters on the CPU, where it is
    # copied for the ONNX export.
    switched, origin = _prepare_model(run, model, export_config.get("class_names", ()))
    onnx = _copy_for_onnx(run, model, task, data)

    # 3. Everything built from here on refers to the tensors on the device.
    model = strategy.place(model, run.config.runtime)
    kept = kept_in_evaluation(model, run.config.optimizer.freeze, switched)
    refuse_older_rule(run.checkpoint, model, kept)
    if mode := run.config.runtime.compile:
        compile_model(model, run.activity.compilation, None if mode is True else mode)

    # 4. The optimizers have these parameters, and the learning rate of every step is known.
    optimization = plan_optimization(run.config, model, data.plan, optimizer, schedule)
    if misfit := describe_misfit(schedule, num_steps=optimization.num_steps):
        logger.warning("[SCHEDULE] %s", misfit)

    # 5. The processes are compared before any of them waits for the others in training.
    own = [each for each in data.evaluation.values() if isinstance(each, Evaluation)]
    _check_same_parts(run, model, optimization, task, [*chain(*metrics_of.values()), *own])

    # 6. What checkpointer and callbacks open is closed with the run.
    header = {**identity, "origin": origin, KEPT_IN_EVALUATION: [*kept]}
    history = run.open_history()
    peers = strategy.checkpoint_peers(timeout_s=run.config.runtime.timeout_s)
    checkpointer = run.open_checkpointer(
        run.config.checkpoint, header, model, optimization.optimizers, history, peers
    )
    parts = {"model": model, **named_parts(optimization.optimizers), "task": task}
    parts |= {"schedule": schedule, "collate": options.collate}
    parts |= named([*callbacks, *own])
    for each in observers:
        each.see_parts({**parts, "decay": optimization.decay})
    if run.config.run.dry_run:
        data = data.limited()
    all_callbacks = build_callbacks(
        run,
        banner=_banner(run, data.train, model, optimization, header)
        + describe_switched(switched, kept)
        + describe_rates(optimization.optimizers),
        history=history,
        num_eval_samples=sum(each.num_samples for each in data.eval_loaders[:1]),
        export_config=export_config,
        onnx=onnx,
        savers=[each for each in (model, processor) if hasattr(each, "save_pretrained")],
        callbacks=[*callbacks, *extra],
    )

    # 7. The trainer is assembled, which wraps the model. The checks see what a resume would build.
    assembly = assemble(
        run.config.trainer,
        strategy=strategy,
        model=model,
        optimizers=optimization.optimizers,
        task=task,
        checkpointer=checkpointer,
        activity=run.activity,
        kept_in_evaluation=kept.values(),
        states={**states, **_order_states(data)},
    )
    evaluations = _build_evaluations(run, data, task, metrics_of, strategy)
    _prepare_plateaus(run, callbacks, evaluations, optimization)
    subject = Subject(
        model=model,
        optimizers=optimization.optimizers,
        parts=parts,
        train_set=train_set,
        states=states,
        accelerator=run.accelerator,
    )
    trainer = trainer_class(
        run.config.trainer,
        assembly,
        loader=data.train,
        evaluations=evaluations,
        schedule=optimization.schedule,
        decay=optimization.decay,
        stop_flag=run.stop_flag,
        callbacks=all_callbacks,
        load_best=partial(load_best_weights, run),
        inspector=_inspect(run, subject, readings, evaluations, checkpointer),
    )
    trainer.metadata |= noted
    assembly.set_training_mode()  # of the checks at the start, too

    # 8. A trial shows that a checkpoint can be stored and has room on the disk.
    prepare_checkpoints(trainer, checkpointer)

    # 9. The checkpoint is applied: everything that it is loaded into is complete.
    _continue(run, trainer, history)
    checkpointer.frozen = digests_of(
        trainer.state_dict()["model"], _frozen_so_far(run, checkpointer)
    )
    warn_of_untrained_norms(kept)

    # 10. Nothing is refused any more: the folder gets the config that its run now has.
    run_on_main(
        partial(
            record_start,
            config_to_dict(run.config),
            run.accelerator,
            run.folder,
            recipe_defaults=defaults_of(type(run.config)),
            copies_recipe=run.config.run.copy_recipe,
            is_quiet=run.config.run.quiet,
        ),
        run.accelerator,
    )
    return trainer


# --- 1. parts and data ---


def _refuse_endless(run: Run, observers: Sequence[Observer]) -> None:
    """Raise ConfigError for `--hours` if nothing decides when the run ends."""
    trainer = run.config.trainer
    if trainer.hours is None or trainer.max_steps is not None:
        return
    if not any(each.ends_run for each in observers):
        raise ConfigError(
            "CONFIG",
            f"--hours {trainer.hours:g} needs accel_trainer.main: call it with your function, or "
            "set --steps",
        )


def _with_batch_of(run: Run, plan: BatchPlan) -> Run:
    """Return the run with the batch of `plan` in its settings, which is lowered for small data."""
    batch = run.config.batch
    size = plan.global_batch_size
    fact = ""
    if size != batch.global_batch_size:
        fact = f"the default batch of {batch.global_batch_size} is larger than the data"
    elif size < batch.per_device_batch_size != BatchConfig.per_device_batch_size:
        fact = f"--batch-size {batch.per_device_batch_size} is larger than a step of the run"
    if fact and run.accelerator.is_main_process and not run.config.run.quiet:
        say(f"{fact}: {counted(size, 'sample')} per step")
    batch = replace(batch, global_batch_size=size)
    return replace(run, config=replace(run.config, batch=batch))


def _choose_strategy(run: Run, plan: BatchPlan, optimizer: object, task: Task) -> Strategy:
    """Return how the processes train together.

    Raises ConfigError for settings that it does not support.
    """
    strategy = choose_strategy(plan, run.accelerator, task, seed=run.config.seed)
    is_in_use = {
        "a dict of optimizers": isinstance(optimizer, Mapping),
        "--reduce exact": plan.reduce == "exact",
        "--compile": bool(run.config.runtime.compile),
        "--optimizer.name muon": run.config.optimizer.name == "muon",
        "--mixed-precision fp16": run.accelerator.scaler is not None,
        "--check-every": run.config.trainer.check_every_n_steps is not None,
    }
    strategy.refuse([*filter(is_in_use.get, is_in_use)])
    return strategy


# --- 2. weights ---


def _prepare_model(
    run: Run, model: nn.Module, class_names: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Order, load and freeze the parameters of `model`, and put it into training mode.

    Return the modules that were in evaluation mode, and where the weights come from.

    **Collective.**
    """
    # The order is that of the checkpoint, or of the main process's model.
    if run.checkpoint is None:
        order = run_on_main(lambda: [*model.state_dict()], run.accelerator)
    else:
        order = run.checkpoint.pieces.get("model", ())
    take_order(model, order)
    # What a module computes in evaluation mode is not to be mixed with other weights.
    switched = put_into_training(model)
    return switched, _load_weights(run, model, class_names)


def _load_weights(run: Run, model: nn.Module, class_names: Sequence[str]) -> list[str]:
    """Load the initial weights of a new run, or of a damaged one, and freeze what is not trained.

    A head of other classes is matched by `class_names`.

    Return lines that say where the weights come from. A run that continues repeats the lines of its
    checkpoint.
    """
    origin = [str(model.weights_origin)] if hasattr(model, "weights_origin") else []
    path = run.config.run.init_from
    if path is not None and (run.checkpoint is None or run.checkpoint.missing):
        origin.append(
            load_initial_weights(
                model, path, skip=run.config.run.init_skip, class_names=class_names
            )
        )
    pattern = run.config.optimizer.freeze
    if pattern is not None:
        freeze(model, pattern)
        origin.append(f"{describe_parameters(model)}: {pattern}")
    if run.checkpoint is None:
        return origin
    stored = [*run.checkpoint.manifest.get("origin", [])]
    if path is not None and f"{path} (" not in "".join(stored):
        raise ConfigError(
            "INIT_FROM",
            f"--init-from {path} has no effect: {run.folder} has checkpoints of a run that started "
            "without it: leave it out, or choose a different --output-dir",
        )
    return stored


def _copy_for_onnx(run: Run, model: nn.Module, task: Task, data: RunData) -> OnnxExport | None:
    if not run.config.run.onnx:
        return None
    if not data.eval_loaders:
        raise ConfigError("ONNX", "--onnx traces an evaluation: add a dataset to eval_sets=")
    if run.activity.couples_batch == "gathered" and run.accelerator.num_processes > 1:
        raise ConfigError(
            "ONNX",
            "--onnx calls eval_step on the main process only, where a gather would wait for the "
            "others: leave it out, and start the finished run again on one process with --onnx",
        )
    if run.accelerator.is_main_process:
        return OnnxExport(copy_model(model), task, data.eval_loaders[0])
    return None


# --- 5. what is the same on all processes ---


def _check_same_parts(
    run: Run,
    model: nn.Module,
    optimization: Optimization,
    task: Task,
    measuring: Sequence[object],
) -> None:
    """Raise ConfigError if a part of some process differs, such as the model or the metrics.

    **Collective.**
    """
    parts = {
        "model": describe_model(model),
        **{
            name: describe_optimizer(each, model)
            for name, each in named_parts(optimization.optimizers).items()
        },
        "metrics": "\n".join(["metrics", *(type(each).__qualname__ for each in measuring)]),
        "task": f"{type(task).__qualname__}\n{fingerprint_of(task)}",
        "schedule": describe_schedule(optimization.schedule, optimization.num_steps),
    }
    check_same_everywhere(parts, run.accelerator)


# --- 6. checkpoints and callbacks ---


def _identify(run: Run, data: RunData, fingerprint: str | None, task: Task) -> Manifest:
    """Return what manifests have of the data and the training, the same as those of a resume.

    **Collective.** Raises CheckpointError if the run has begun with others.
    """
    now = {
        **data.identify(run, fingerprint),
        "settings": decisive_values(run.config),
        "task_fingerprint": fingerprint_of(task),
        "num_processes": run.accelerator.num_processes,
        "num_threads": torch.get_num_threads(),
        "reduce": data.plan.reduce,
        "global_batch_size": data.plan.global_batch_size,
        "versions": library_versions(),
    }
    if run.resume is not None:
        run.resume.compare(now)
    return now


def _build_evaluations(
    run: Run,
    data: RunData,
    task: Task,
    metrics: Mapping[str, Sequence[Metric]],
    strategy: Strategy,
) -> Evaluations:
    """Return the evaluations by name, such as `eval_hard`; the task evaluates a loader."""
    evaluations: dict[str, Evaluation] = {}
    for set_name, part in data.evaluation.items():
        name = TEST if set_name == TEST_SET else "eval" + f"_{set_name}" * bool(set_name)
        evaluations[name] = (
            part
            if isinstance(part, Evaluation)
            else Evaluator(
                part,
                task=task,
                metrics=metrics[set_name],
                accelerator=run.accelerator,
                num_parts=data.plan.num_parts if data.plan.reduce == "exact" else None,
                seed=run.config.seed,
                has_collective_forward=strategy.has_collective_forward
                or run.activity.couples_batch == "gathered",
            )
        )
    return evaluations


def _order_states(data: RunData) -> dict[str, Any]:
    """Return what checkpoints store of an order that does not follow from the settings."""
    state = getattr(getattr(data.train, "order", None), "state", None)
    return {} if state is None else {"sample_order": state}


def _prepare_plateaus(
    run: Run,
    callbacks: Sequence[Callback],
    evaluations: Evaluations,
    optimization: Optimization,
) -> None:
    """Tell the callbacks that follow a number which one it is. Raises ConfigError."""
    monitors = choose_monitor(run.config.trainer, evaluations)
    for each in callbacks:
        if isinstance(each, ReduceLROnPlateau):
            each.prepare(
                monitors,
                optimization.schedule,
                num_steps=optimization.num_steps,
                is_same_data=run.resume is None or EVALUATION not in run.resume.changes,
            )


def _inspect(
    run: Run,
    subject: Subject,
    readings: FirstReadings,
    evaluations: Evaluations,
    checkpointer: Checkpointer,
) -> Rehearsal:
    """Return what looks at the training; it ends with the run."""
    inspector = Rehearsal(
        subject,
        BoundaryChecks(subject, readings),
        config=run.config.trainer,
        evaluations=evaluations,
        checkpointer=checkpointer,
        activity=run.activity,
    )
    run.resources.callback(inspector.close)
    return inspector


def prepare_checkpoints(trainer: Trainer, checkpointer: Checkpointer) -> None:
    """Check, before any work, that a checkpoint can be stored and has room. **Collective.**"""
    states = trainer.state_dict()
    run_on_main(lambda: checkpointer.prepare(states), trainer.accelerator)
    checkpointer.check_shared_disk()


def _banner(
    run: Run, loader: Loader, model: nn.Module, optimization: Optimization, data: Manifest
) -> str:
    """Return what a run prints about itself at its start, with the loader's `description`."""
    plan = loader.plan
    described = getattr(getattr(loader, "reader", None), "description", "")
    described += f"{loader.description}\n" if hasattr(loader, "description") else ""
    origin = "".join(f"{line}\n" for line in data["origin"])
    same_steps = (
        "; for the same steps on any number of processes: "
        f"--global-batch-size {plan.global_batch_size}"
        if plan.num_processes > 1
        else ""
    )
    num_train, *num_evaluated = data["num_samples"]
    return (
        f"{describe_machine(run.accelerator)}\n"
        f"{plan.describe()}, {describe_length(run.config, plan)}{same_steps}\n"
        f"{optimization.description}, {describe_parameters(model)}"
        f"{', gradients summed in a fixed order (--reduce exact)' * (plan.reduce == 'exact')}\n"
        f"{num_train or 'a stream of'} samples to train on, "
        f"{' + '.join(map(str, num_evaluated)) or 'none'} to evaluate"
        f"{'' if data['data_fingerprint'] else '; a resume compares only their number'}\n"
        f"{described}{origin}run folder {run.folder}"
    )


# --- 9. the checkpoint that the run continues from, and the record of this start ---


def _frozen_so_far(run: Run, checkpointer: Checkpointer) -> set[str]:
    """Return the names of the parameters that nothing has changed since the run began.

    They do not depend on where a run was interrupted, and so neither do the files of checkpoints.
    """
    unstepped = {*checkpointer.unstepped()}
    return unstepped if run.checkpoint is None else unstepped & {*run.checkpoint.frozen}


def _continue(run: Run, trainer: Trainer, history: MetricsFile | None) -> None:
    """Apply what the run continues from, or begin a new run. **Collective.**"""
    if run.resume is not None:
        resume = run.resume

        def restore(pieces: Pieces) -> None:
            if run.accelerator.is_main_process:
                add_details(pieces, run.folder)
            trainer.restore(pieces, changes=resume.changes)

        resume.apply(restore, trainer.model)
        trainer.metadata.update(run.resume.checkpoint.manifest.get("metadata", {}))
    run_on_main(lambda: begin_history(history, run.folder, run.resume), run.accelerator)
