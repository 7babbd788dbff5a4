"""One of two processes fails, is killed, leaves or hangs: the job soon ends, and says why."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from accel_trainer import Callback, RecipeConfig, Trainer, main
from tests import processes, workload
from tests.faults.signals import PAUSE_AT_STEP, pause_in
from tests.training.test_exactness import final_files
from tests.variants import slow_but

pytestmark = pytest.mark.signal

TIMEOUT_S = 15.0
SAYS = {
    "raise": "ValueError: a fault",
    "kill": "exited without an error report",
    "exit": "exited without an error report",
    "hang": "stuck, no progress for",
}
PHASES = {"step": "training", "evaluation": "evaluation", "save": "save"}
SHOWN = [("raise", "evaluation"), ("kill", "save"), ("exit", "step"), ("hang", "step")]


def fault(kind: str | None) -> None:
    if kind == "raise":
        raise ValueError("a fault")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        os._exit(0)
    time.sleep(600)


class InSave(Callback):
    """Here a process hands over its state, before the writer's thread takes it."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def before_save(self, trainer: Trainer) -> None:
        if trainer.state.optimizer_step == PAUSE_AT_STEP:
            self._act()


def child(folder: Path, kind: str | None, phase: str, rank: int) -> None:
    is_here = kind is not None and rank == int(os.environ["RANK"])
    act = partial(fault, kind) if is_here else do_nothing
    if phase not in ("", "save"):
        pause_in(phase, act)
    config = workload.make_config(folder / "run")
    config = replace(
        config, runtime=replace(config.runtime, timeout_s=TIMEOUT_S if kind == "hang" else 300.0)
    )
    callbacks = (InSave(act),) if phase == "save" else ()
    main(
        lambda _: workload.train(config, dropout=0.1, callbacks=callbacks),
        RecipeConfig,
        description="",
        argv=[],
    )


def do_nothing() -> None:
    pass


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    processes.run(child, folder, None, "", 0, num_processes=2, folder=folder / "logs")
    return final_files(folder / "run")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "phase"), slow_but(SHOWN, itertools.product(SAYS, PHASES)))
def test_the_job_ends_names_the_process_and_resumes_exactly(
    tmp_path: Path, effort: int, kind: str, phase: str, undisturbed: dict[str, bytes]
) -> None:
    """Fault (Signals and processes): one process raises an exception -> all processes end within
    seconds; after the stack trace, the last line reports the process, step, phase and error

    Fault (Signals and processes): one process is killed, for lack of memory or otherwise -> all
    processes end within seconds; the line says that this rank exited without an error report, so it
    was killed or ran out of memory

    Fault (Signals and processes): one process hangs -> it ends itself shortly after
    `--runtime.timeout-s` and reports where it is stuck, with stack traces on stderr; exit 70
    """
    for trial in range(max(1, effort // 5)):
        # Odd and even trials fail on either rank; in the first, the kinds are spread over both.
        rank = (trial + list(SAYS).index(kind) + list(PHASES).index(phase)) % 2
        folder = tmp_path / str(trial)
        job = processes.start(
            child, folder, kind, phase, rank, num_processes=2, folder=folder / "logs"
        )
        codes = job.wait()
        outputs = [job.output(one) for one in (0, 1)]
        said = "\n".join(outputs)
        assert 0 not in codes or kind == "exit", codes
        assert None not in codes, said
        last_lines = [
            output.splitlines()[-1] for output in outputs if "accel_trainer: error" in output
        ]
        assert last_lines, said
        for line in last_lines:
            assert f"rank {rank}, step " in line, said
            assert SAYS[kind] in line, said
            # Of a process that left no word, the phase is that in which it was missed.
            assert kind in ("kill", "exit") or f", {PHASES[phase]}: " in line, said
        records = [
            json.loads((folder / "run" / "logs" / f"rank-{one:05d}.json").read_text())
            for one in (0, 1)
        ]
        expected = {0, 1} if kind in ("raise", "hang") else {1 - rank}
        assert {one for one in (0, 1) if records[one]["failure"]} == expected, said
        processes.run(child, folder, None, "", 0, num_processes=2, folder=folder / "resume-logs")
        assert final_files(folder / "run") == undisturbed
