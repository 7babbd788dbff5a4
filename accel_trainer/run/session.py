"""Starts a run: joins its processes, opens its folder and loads the checkpoint to continue from."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from accelerate import Accelerator

from ..checkpoint.format import LoadedCheckpoint
from ..core.activity import Activity
from ..core.config import check_types
from ..core.errors import ConfigError
from ..core.guards import guarded_folder
from ..core.rng import preserved_generators, seed_generators
from ..distributed.accelerator import start_accelerator
from ..distributed.collectives import run_on_main, show_life, shutdown, wait_for_main
from ..distributed.determinism import is_too_late_for_cublas, nondeterminism_named
from ..distributed.launch_env import find_launcher
from ..fault_tolerance.failure_report import failures_reported
from ..fault_tolerance.out_of_memory import explain_out_of_memory
from ..fault_tolerance.preemption import StopFlag, program_stopped, stop_on_signals
from ..fault_tolerance.watchdog import Watchdog
from ..training.compile import compile_errors_explained
from .agreement import check_same_everywhere, describe_identity
from .config import RecipeConfig, check_allowed_changes, with_defaults
from .folder import open_folder
from .preflight import find_warnings, refuse_launch
from .resume import Source, continued, load_for_all

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A started run, on every process."""

    config: RecipeConfig
    """With the global batch size filled in, which stays the same after a change of hardware."""
    accelerator: Accelerator
    folder: Path
    checkpoint: LoadedCheckpoint | None
    """What the run continues from; `build_trainer` restores it. None: the run is new."""
    nondeterministic: set[str]
    """Operations without a deterministic kernel that this process has used so far."""
    activity: Activity
    stop_flag: StopFlag
    resources: ExitStack
    """Closed at the end of the run, also after an error."""


@contextmanager
def start_run(config: RecipeConfig, *, recipe: str) -> Iterator[Run]:
    """Join the processes, lock the run folder and load the checkpoint. **Collective.**

    A program may start several runs, one after the other: a signal that stops one of them ends the
    program on every process. Random numbers continue after the block as if there had been no run.

    Raises:
        ConfigError: the config is of the wrong type, or differs from that of the run it would
            continue, or from that of another process.
        ProcessError: the other processes cannot be reached, or one of them failed.
        OutputError: the folder cannot be written or is in use.
        CheckpointError: there are checkpoints, and none is valid.
        Preempted: a signal came, and the block has ended without an error. Alone in a script it
            is a SystemExit, and in a notebook or a thread a KeyboardInterrupt.
    """
    # The order matters; what is entered is left in reverse.
    # 1. Mistakes in settings are reported before any process waits for another.
    if not isinstance(config, RecipeConfig):
        raise ConfigError("CONFIG", f"start_run was given {config!r:.60}: give a RecipeConfig")
    check_types(config, RecipeConfig)
    config = with_defaults(config)
    check_allowed_changes(config)
    refuse_launch(config)
    is_late = is_too_late_for_cublas()  # before the accelerator is in use
    # 2. The processes join, and check that code and settings are the same on all of them.
    accelerator = start_accelerator(config.runtime)
    check_same_everywhere(describe_identity(config), accelerator)
    # 3. Signals are handled and hangs are noticed before any file changes.
    rank = accelerator.process_index
    num_processes = accelerator.num_processes
    activity = Activity()
    timeout_s = config.runtime.timeout_s
    stop_flag = StopFlag(num_processes=num_processes, timeout_s=timeout_s)
    watchdog = Watchdog(
        activity,
        stop_flag,
        timeout_s=config.runtime.stuck_timeout_s or (timeout_s if num_processes > 1 else math.inf),
        launcher_pid=find_launcher(),
        show_life=partial(show_life, accelerator),
    )
    is_quiet = config.run.quiet and not config.run.dry_run
    with (
        program_stopped(stop_flag, activity, is_main=rank == 0, is_quiet=is_quiet),
        preserved_generators(accelerator.device),
        ExitStack() as folder_resources,
        stop_on_signals(stop_flag),
        watchdog,
    ):
        stop_flag.is_starting = True  # until the trainer begins
        seed_generators(config.seed % 2**32, accelerator.device)  # for the initial weights
        if config.run.shared:
            folder_resources.callback(os.umask, os.umask(0o027))  # the inner call sets it
        # 4. The main process opens the folder, and tells the others what the run continues from.
        folder, source = _open_on_main(config, recipe, accelerator, stop_flag, folder_resources)
        # 5. Errors are reported in that folder; those of memory and of compilation are explained.
        with failures_reported(folder, activity, watchdog, rank=rank, num_processes=num_processes):
            with (
                compile_errors_explained(),
                nondeterminism_named(warns=accelerator.is_main_process) as operations,
                ExitStack() as resources,
            ):
                # 6. The checkpoint is loaded, and a change of settings is refused.
                checkpoint = load_for_all(source, accelerator, timeout_s=timeout_s)
                config = continued(config, checkpoint, source, num_processes=num_processes)
                if accelerator.is_main_process:
                    found = find_warnings(config, is_too_late_for_cublas=is_late)
                    for code, message in found.items():
                        _logger.warning("[%s] %s", code, message)
                with explain_out_of_memory(config.batch, activity, accelerator):
                    yield Run(
                        config=config,
                        accelerator=accelerator,
                        folder=folder,
                        checkpoint=checkpoint,
                        nondeterministic=operations,
                        activity=activity,
                        stop_flag=stop_flag,
                        resources=resources,
                    )
            wait_for_main(accelerator, timeout_s=timeout_s)
            stop_flag.agree()  # a signal may have come after the last step
            shutdown(accelerator)


def _open_on_main(
    config: RecipeConfig,
    recipe: str,
    accelerator: Accelerator,
    stop_flag: StopFlag,
    resources: ExitStack,
) -> tuple[Path, Source | None]:
    """Open the run folder on the main process; return what that returned. **Collective.**"""
    open_it = partial(open_folder, config, recipe, stop_flag=stop_flag, resources=resources)
    path, source = run_on_main(open_it, accelerator)
    folder = Path(path)
    if not accelerator.is_main_process and folder.is_dir():  # perhaps on another machine's disk
        resources.enter_context(guarded_folder(folder))
    return folder, source and Source(*source)
