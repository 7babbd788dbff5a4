"""Joins a run: its signals, its watchdog, its folder and its reports, for every kind of loop."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from torch import nn

from ..callbacks.metrics_file import MetricsFile
from ..checkpoint.config import CheckpointConfig
from ..checkpoint.format import Manifest
from ..checkpoint.manager import Checkpointer
from ..core.guards import guarded_folder
from ..core.logger import main_speaks
from ..core.parameters import Optimizers, unstepped_parameters
from ..core.rng import preserved_generators
from ..distributed.collectives import (
    SINGLE_PROCESS,
    Peers,
    run_on_main,
    show_life,
    wait_for_main,
)
from ..distributed.launch_env import find_launcher
from ..fault_tolerance.activity import Activity
from ..fault_tolerance.failure_report import failures_reported
from ..fault_tolerance.interrupts import say_interrupted
from ..fault_tolerance.preemption import StopFlag, program_stopped, stop_on_signals
from ..fault_tolerance.watchdog import Watchdog
from .resume import Source

OpenFolder = Callable[[ExitStack], tuple[str, Source | None]]
"""Locks the folder of a run on the main process; returns it, and what the run continues from."""


@dataclass(frozen=True)
class JoinedRun:
    """What every process of a run has, whoever writes its loop."""

    accelerator: Accelerator
    folder: Path
    source: Source | None
    """What the run continues from; None: it is new."""
    activity: Activity
    stop_flag: StopFlag
    resources: ExitStack
    """Closed at the end of the run, also after an error, and before the errors are reported."""

    def open_history(self) -> MetricsFile | None:
        """Return the rows of the run, which the main process writes; None on the others."""
        if not self.accelerator.is_main_process:
            return None
        return self.resources.enter_context(closing(MetricsFile(self.folder / "metrics.jsonl")))

    def open_checkpointer(
        self,
        config: CheckpointConfig,
        header: Manifest,
        model: nn.Module,
        optimizers: Optimizers,
        history: MetricsFile | None,
        peers: Peers = SINGLE_PROCESS,
    ) -> Checkpointer:
        """Return the checkpointer, which syncs the rows before it commits."""
        checkpointer = Checkpointer(
            self.folder / "checkpoints",
            config=config,
            header=header,
            masks=[name for name, each in model.named_buffers() if each.isinf().any()],
            before_commit=history.sync if history is not None else lambda: None,
            unstepped=partial(unstepped_parameters, model, optimizers),
            peers=peers,
        )
        self.resources.callback(checkpointer.close)
        return checkpointer


@contextmanager
def joined_run(
    accelerator: Accelerator,
    open_folder: OpenFolder,
    *,
    timeout_s: float,
    stuck_timeout_s: float | None = None,
    is_quiet: bool = False,
    is_shared: bool = False,
    leave: Callable[[], None] = lambda: None,
) -> Iterator[JoinedRun]:
    """Handle signals, notice hangs, lock the folder and report errors in it. **Collective.**

    A process without progress for `stuck_timeout_s` is ended; None: `timeout_s`, or never if there
    is one process. `leave` is called once all processes have ended the block. Random numbers
    continue after it as if there had been no run.

    Raises what `open_folder` raises, ProcessError if another process failed, and Preempted after a
    signal.
    """
    rank = accelerator.process_index
    num_processes = accelerator.num_processes
    activity = Activity()
    stop_flag = StopFlag(num_processes=num_processes, timeout_s=timeout_s)
    watchdog = Watchdog(
        activity,
        stop_flag,
        timeout_s=stuck_timeout_s or (timeout_s if num_processes > 1 else math.inf),
        launcher_pid=find_launcher(),
        show_life=partial(show_life, accelerator),
    )
    # The order matters; what is entered is left in reverse. Signals are handled and hangs are
    # noticed before any file changes.
    with (
        main_speaks(rank == 0),
        program_stopped(stop_flag, activity, is_main=rank == 0, is_quiet=is_quiet),
        preserved_generators(accelerator.device),
        ExitStack() as folder_resources,
        stop_on_signals(stop_flag, activity),
        watchdog,
    ):
        if is_shared:
            folder_resources.callback(os.umask, os.umask(0o027))  # the inner call sets it
        # The main process opens the folder, and tells the others what the run continues from.
        path, source = run_on_main(partial(open_folder, folder_resources), accelerator)
        folder = Path(path)
        if rank == 0 and not is_quiet:
            stop_flag.on_interrupt = partial(
                say_interrupted, activity=activity, checkpoints=folder / "checkpoints"
            )
        if rank > 0 and folder.is_dir():  # perhaps on another machine's disk
            folder_resources.enter_context(guarded_folder(folder))
        with failures_reported(folder, activity, watchdog, rank=rank, num_processes=num_processes):
            with ExitStack() as resources:
                yield JoinedRun(
                    accelerator=accelerator,
                    folder=folder,
                    source=source and Source(*source),
                    activity=activity,
                    stop_flag=stop_flag,
                    resources=resources,
                )
            wait_for_main(accelerator, timeout_s=timeout_s)
            stop_flag.agree()  # a signal may have come after the last step
            leave()
