"""Starts a run: joins its processes, opens its folder and loads the checkpoint to continue from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..checkpoint.format import LoadedCheckpoint
from ..checks.agreement import check_same_everywhere, describe_identity
from ..checks.explain import explain
from ..checks.preflight import find_launch_warnings, find_setting_warnings, refuse_launch
from ..core.config import answers_unknown
from ..core.errors import ConfigError, told_in_python
from ..core.logger import logger
from ..core.rng import seed_generators
from ..distributed.accelerator import start_accelerator
from ..distributed.collectives import shutdown
from ..distributed.determinism import is_too_late_for_cublas, nondeterminism_named
from ..names.everyday import Everyday
from .config import (
    RecipeConfig,
    checked_config,
    describe_shared,
)
from .folder import open_folder
from .joining import JoinedRun, joined_run
from .keywords import everyday_config
from .resume import Resume, advise_flags, allowed_names, choose_folder, continued, load_resume

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Run(JoinedRun):
    """A started run, on every process."""

    config: RecipeConfig
    """With the global batch size filled in, which stays the same after a change of hardware."""
    resume: Resume | None
    """What the run continues from, which `build_trainer` applies. None: the run is new."""
    nondeterministic: set[str]
    """Operations without a deterministic kernel that this process has used so far."""

    @property
    def checkpoint(self) -> LoadedCheckpoint | None:
        """The checkpoint that the run continues from; None: the run is new."""
        return None if self.resume is None else self.resume.checkpoint


@answers_unknown
@contextmanager
def start_run(
    config: RecipeConfig | None = None, *, recipe: str, **settings: Unpack[Everyday]
) -> Iterator[Run]:
    """Join the processes, lock the run folder and load the checkpoint. **Collective.**

    `recipe` names the run's folder. The everyday settings can be given instead of a config, under
    the names of their flags: `start_run(recipe="digits", epochs=20, lr=0.1, batch_size=32)`.

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
    with told_in_python():
        if config is None:
            config = everyday_config(settings)
        elif settings:
            given = ", ".join(f"{name}=" for name in settings)
            raise ConfigError(
                "CONFIG", f"start_run was given a config and {given}: give one of them"
            )
        with _started(config, recipe) as run:
            yield run


@contextmanager
def _started(config: RecipeConfig, recipe: str) -> Iterator[Run]:
    # The order matters; what is entered is left in reverse.
    # 1. Mistakes in settings are reported before any process waits for another.
    if not isinstance(config, RecipeConfig):
        raise ConfigError(
            "CONFIG",
            f"start_run was given {config!r:.60}: give a RecipeConfig, or its everyday settings "
            "as keywords",
        )
    config = checked_config(config)
    refuse_launch(config.runtime)
    is_late = is_too_late_for_cublas()  # before the accelerator is in use
    # 2. The processes join, and check that code and settings are the same on all of them.
    accelerator = start_accelerator(config.runtime)
    if accelerator.num_processes > 1:  # the sources are read for it
        check_same_everywhere(describe_identity(describe_shared(config)), accelerator)
    # 3. Signals, the run folder and the reports of errors are those of every loop.
    timeout_s = config.runtime.timeout_s
    joined = joined_run(
        accelerator,
        partial(open_folder, partial(choose_folder, config, recipe), config.run),
        timeout_s=timeout_s,
        stuck_timeout_s=config.runtime.stuck_timeout_s,
        is_quiet=config.run.quiet and not config.run.dry_run,
        is_shared=config.run.shared,
        leave=partial(shutdown, accelerator),
    )
    with joined as run:
        seed_generators(config.seed % 2**32, accelerator.device)  # for the initial weights
        with nondeterminism_named() as operations:
            # 4. The checkpoint is loaded, and a change of settings is refused.
            resume = load_resume(
                run.source,
                accelerator,
                loop="recipe",
                allowed=allowed_names(config.run),
                advise=advise_flags,
                timeout_s=timeout_s,
            )
            config = continued(config, resume, num_processes=accelerator.num_processes)
            for code, message in find_warnings(config, is_too_late_for_cublas=is_late).items():
                logger.warning("[%s] %s", code, message)
            # 5. Errors of memory and of compilation are explained.
            try:
                yield Run(**vars(run), config=config, resume=resume, nondeterministic=operations)
            except Exception as error:
                if explained := explain(error, config.batch, run.activity, accelerator):
                    raise explained from error
                raise


def find_warnings(config: RecipeConfig, *, is_too_late_for_cublas: bool) -> dict[str, str]:
    """Return warnings by their codes: each says what is probably not meant, and the fix."""
    of_launch = find_launch_warnings(config.runtime, is_too_late_for_cublas=is_too_late_for_cublas)
    of_settings = find_setting_warnings(
        trainer=config.trainer,
        batch=config.batch,
        optimizer=config.optimizer,
        schedule=config.schedule,
        has_weights=config.run.init_from is not None,
    )
    return of_launch | of_settings
