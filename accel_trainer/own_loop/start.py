"""Starts a run around a loop that its owner writes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderAdapter
from torch import nn
from torch.optim import Optimizer

from ..callbacks.metrics_file import MetricsFile
from ..callbacks.result import record_attempt, write_result
from ..checkpoint.manager import copy_metadata
from ..checks.loop_body import CarriedState
from ..checks.parts import check_states
from ..checks.same_everywhere import check_same_states
from ..core.config import check_types
from ..core.errors import ConfigError, Preempted
from ..core.filesystem import writes_to
from ..core.logger import logger
from ..core.parameters import named_parts
from ..core.rng import preserved_generators
from ..core.train_state import TrainState
from ..distributed.collectives import gather_numbers, run_on_main
from ..distributed.determinism import choose_kernels, is_too_late_for_cublas
from ..distributed.launch_env import setup_launch_env
from ..distributed.machine import peak_memory_bytes
from ..run.config import RecipeConfig, RunConfig
from ..run.folder import moved_folder, open_folder, record_start
from ..run.joining import JoinedRun, joined_run
from ..run.keywords import build_config
from ..run.resume import Resume, begin_history, load_resume
from ..training.callback import RunResult
from .attributes import Attributes
from .identity import FIXED, advise, check_same_run, identify
from .loader import OrderedLoader
from .loop import ExactRun
from .parts import Parts
from .updates import Updates


@contextmanager
def exact_run(
    accelerator: Accelerator,
    folder: Path | str,
    *,
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: Optimizer | Mapping[str, Optimizer],
    loader: Any,
    states: Mapping[str, Any] = MappingProxyType({}),
    settings: Mapping[str, Any] = MappingProxyType({}),
    seed: int = 0,
    save_every: int | None = None,
    keep_last: int = 2,
    digest_every: int | None = None,
    allow_change: Collection[str] = (),
    ignore: Collection[str] = (),
    timeout_s: float = 600.0,
) -> Iterator[ExactRun]:
    """Make the loop in the block a run that is killed anywhere and resumes to the same bits.

    **Collective.**

    `model`, `optimizer` and `loader` are what `accelerator.prepare` returned; several models or
    optimizers are dicts by name. `loader` is a torch DataLoader over a map-style dataset, whose
    batches the loop takes from `run.batches()` or `run.steps(n)`. `states` are all other objects
    that a resume needs, by name, with `state_dict` and `load_state_dict`: schedulers, averages, a
    gradient scaler of your own. `settings` are plain JSON values that decide the result: a resume
    with others is refused, unless `allow_change` names them, or `data` for changed data.

    A checkpoint is saved every `save_every` steps and at the end, or at the end of each epoch
    (None); the last `keep_last` stay. It is taken at a boundary: after an optimizer's step that
    leaves no gradients of the other optimizers. The gradients of those that have stepped are
    dropped there. `seed` decides the order of the samples and all random numbers of the loop. Every
    `digest_every` steps a row has digests of what is trained, by which `accel-trainer why` finds
    where two runs diverge.
    `timeout_s` is how long a process waits for the others.

    What the loop changes in each step and no state holds, such as a scheduler that was forgotten,
    is one warning after its first steps; `ignore` has names that decide nothing.

    A run that is started again with the same command goes on after its last checkpoint; a finished
    one loads its last state, and yields no epoch.

    Raises:
        ConfigError: an argument cannot be continued exactly, or differs from that of the run that
            the folder holds.
        OutputError: the folder cannot be written or is in use.
        CheckpointError: there are checkpoints, and none is valid or fits.
        ProcessError: another process failed.
        Preempted: a signal came, and all is saved. In a script it is a SystemExit with code 75.
    """
    setup_launch_env()
    parts = Parts.of(accelerator, model, optimizer)
    check_states(states)
    settings = copy_metadata(settings, "settings")
    moved = moved_folder(Path(folder))
    checked = build_config(
        RecipeConfig,
        {"checkpoint.every_n_steps": save_every, "checkpoint.keep_last_n": keep_last, "seed": seed},
        {"checkpoint.every_n_steps": "save_every=", "checkpoint.keep_last_n": "keep_last="},
    )
    check_types(checked, RecipeConfig)
    joined = joined_run(
        accelerator,
        partial(open_folder, lambda: moved, RunConfig(output_dir=moved)),
        timeout_s=timeout_s,
    )
    with joined as run:
        _choose_kernels(accelerator)
        # The order matters.
        # 1. What the run continues from is read, and the order of the data is asked for.
        load = partial(
            load_resume,
            run.source,
            accelerator,
            loop="own",
            allowed={*allow_change} - {*FIXED},
            advise=advise,
            timeout_s=timeout_s,
        )
        resume = load()
        ordered = OrderedLoader(loader, seed=seed, process_index=accelerator.process_index)
        run.resources.callback(ordered.close)
        with preserved_generators(accelerator.device):
            ordered.begin(0)  # each start is known by it, as epochs may have other lengths
            header = identify(accelerator, ordered, settings, seed)
            if resume is not None:
                run.activity.state = TrainState.from_dict(resume.checkpoint.manifest)
                ordered.begin(run.activity.state.epoch)
            _check_equal_rounds(len(ordered.batches), accelerator)
        if resume is not None:
            check_same_run(resume, header)
        # 2. What watches and saves is closed with the run.
        updates = Updates(parts.given, run.resources)
        history = run.open_history()
        checkpointer = run.open_checkpointer(
            checked.checkpoint, header, parts.module, parts.optimizers, history
        )
        loop = ExactRun(
            run,
            ordered,
            updates,
            seed=seed,
            save_every=save_every,
            digest_every=digest_every,
            history=history,
        )
        loop.states = parts.registry(accelerator, states, loop)
        loop.store = checkpointer.save
        same = {**states, "model": parts.module}
        trained = {"model": parts.module, **named_parts(parts.optimizers)}
        loop.attributes = Attributes({**states, **trained, "data": ordered.dataset}, accelerator)
        loop.check_same = partial(check_same_states, same, accelerator=accelerator)
        loop.carried_by = partial(
            CarriedState,
            trained=trained,
            known=[loop, *parts.known(accelerator, states)],
            ignored={*ignore},
        )
        # 3. A trial shows that a checkpoint can be stored, and the last one is loaded.
        pieces = loop.states.state_dict()
        _check_orders(pieces["loop"]["orders"], resume, loader)
        run_on_main(lambda: checkpointer.prepare(pieces), accelerator)
        if resume is not None:
            loop.reload = partial(_load_again, load, loop, parts)
            resume.apply(loop.states.load_state_dict, parts.module)
            loop.begin_loaded()
        run_on_main(lambda: begin_history(history, run.folder, resume), accelerator)
        # 4. Nothing is refused any more.
        config = {
            "loop": "own",
            "seed": seed,
            "settings": settings,
            "checkpoint": vars(checked.checkpoint),
            "run": {"output_dir": str(run.folder), "resume": "auto", "init_from": None},
        }
        run_on_main(partial(_record, run, config), accelerator)
        try:
            yield loop
            loop.finish()
            checkpointer.wait(must_succeed=True)
            run_on_main(partial(_record_end, run, loop, history), accelerator)
            run.activity.phase = "done"
        except Preempted:
            stop = run.stop_flag.agreed  # by all processes, unless the loop has not begun
            if stop and accelerator.is_main_process:
                checkpointer.wait(must_succeed=True)
                _record_end(run, loop, history, stopped_by=stop.reason)
            raise


def _load_again(load: Callable[[], Resume | None], loop: ExactRun, parts: Parts) -> None:
    if (resume := load()) is not None:
        resume.apply(loop.states.load_state_dict, parts.module)


def _choose_kernels(accelerator: Accelerator) -> None:
    """Use deterministic kernels; warn of what CUDA has already fixed."""
    if accelerator.device.type != "cuda":
        return
    if is_too_late_for_cublas():
        logger.warning(
            "[CUBLAS_LATE] CUDA was in use before the run, so matrix products may differ in their "
            "last bits: set CUBLAS_WORKSPACE_CONFIG=:4096:8 before Python starts"
        )
    choose_kernels(True)


def _check_equal_rounds(num_batches: int, accelerator: Accelerator) -> None:
    """Raise ConfigError if processes have other numbers of batches. **Collective.**"""
    numbers = gather_numbers(num_batches, accelerator)
    if len({*numbers}) > 1:
        raise ConfigError(
            "LOOP_LOADER",
            f"the processes have {', '.join(map(str, numbers))} batches in an epoch, and one would "
            "wait for the others for ever: use DataLoaderConfiguration(even_batches=True)",
        )


def _check_orders(orders: Sequence[int], resume: Resume | None, loader: Any) -> None:
    """Raise ConfigError if all processes read the same batches, or others than before."""
    if len(orders) > len({*orders}) == 1 and not isinstance(loader, DataLoaderAdapter):
        raise ConfigError(
            "LOOP_LOADER",
            f"all {len(orders)} processes read the same batches: give loader= what "
            "accelerator.prepare returned",
        )
    if resume is None or not resume.checkpoint.manifest["step_in_epoch"]:
        return
    if orders != resume.checkpoint.pieces["loop"]["orders"]:
        raise ConfigError(
            "LOOP_ORDER",
            "the order of the epoch in progress is not that of the run: the sampler depends on "
            "more than the seed, the epoch and the data",
        )


def _record(run: JoinedRun, config: dict[str, Any]) -> None:
    record_start(config, run.accelerator, run.folder)
    record_attempt(
        run.folder,
        "start",
        run.activity.state.optimizer_step,
        {"num_processes": run.accelerator.num_processes},
    )


def _record_end(
    run: JoinedRun, loop: ExactRun, history: MetricsFile | None, stopped_by: str | None = None
) -> None:
    if history is not None:
        with writes_to(run.folder):
            history.sync()  # what was written after the last checkpoint
    reason = stopped_by or ("run.stop()" if loop.is_stopped else "all steps are done")
    result = RunResult(
        "preempted" if stopped_by else "done", reason, loop.state, loop.metrics, None, run.folder
    )
    phases = run.activity.phase_s
    record_attempt(run.folder, "end", loop.step, {"state": result.state, "phase_s": phases})
    peak = peak_memory_bytes(run.accelerator)
    write_result(
        run.folder, result, {}, {"wall_s": sum(phases.values()), "peak_memory_bytes": peak}
    )
