from __future__ import annotations

import itertools
import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from accel_trainer import (
    Batch,
    MeanLoss,
    Preempted,
    RecipeConfig,
    RunResult,
    StepOutput,
    Trainer,
    main,
)
from accel_trainer.core.platform import RUN_SIGNALS, SAVE_SIGNALS, STOP_SIGNALS
from accel_trainer.core.train_state import TrainState
from accel_trainer.fault_tolerance import preemption
from accel_trainer.fault_tolerance.activity import Activity
from accel_trainer.fault_tolerance.preemption import (
    TIME_LIMIT,
    EvaluationStopped,
    Stop,
    StopFlag,
    program_stopped,
    stop_on_signals,
)

from .. import evaluated, processes
from ..joined import joined_processes
from ..variants import slow

pytestmark = pytest.mark.signal


def training() -> Activity:
    """What a process is doing once its run has begun."""
    activity = Activity()
    activity.phase = "training"
    return activity


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_raises_the_flag_and_the_next_poll_stops(number: int) -> None:
    flag = StopFlag()
    with stop_on_signals(flag, training()):
        assert not flag.poll()
        os.kill(os.getpid(), number)
        assert flag.poll()
    assert flag.agreed == Stop(number)
    assert flag.agreed.reason == signal.Signals(number).name
    assert flag.agreed.is_preemption


def test_handlers_are_restored_however_the_block_ends() -> None:
    def handle(number: int, frame: object) -> None:
        raise AssertionError

    before = {number: signal.signal(number, handle) for number in RUN_SIGNALS}
    try:
        with stop_on_signals(StopFlag(), training()):
            assert all(signal.getsignal(number) is not handle for number in RUN_SIGNALS)
        assert all(signal.getsignal(number) is handle for number in RUN_SIGNALS)
        with pytest.raises(KeyError), stop_on_signals(StopFlag(), training()):
            raise KeyError
        assert all(signal.getsignal(number) is handle for number in RUN_SIGNALS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_outside_the_main_thread_the_block_runs_without_handlers() -> None:
    before = {number: signal.getsignal(number) for number in RUN_SIGNALS}
    ran: list[bool] = []

    def work() -> None:
        flag = StopFlag()
        with stop_on_signals(flag, training()):
            ran.append(
                not flag.poll() and signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
            )

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran == [True]
    assert {number: signal.getsignal(number) for number in RUN_SIGNALS} == before


def test_an_error_outside_the_main_thread_comes_through() -> None:
    caught: list[BaseException] = []

    def work() -> None:
        try:
            with stop_on_signals(StopFlag(), training()):
                raise ValueError("of the block")
        except ValueError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [str(error) for error in caught] == ["of the block"]


@pytest.mark.parametrize(
    ("numbers", "factor", "code"),
    [
        ((signal.SIGINT,), 1e4, 0),
        ((signal.SIGINT, signal.SIGINT), 1e4, 130),
        # A scheduler repeats itself; the run is being saved.
        ((signal.SIGTERM, signal.SIGTERM), 1e4, 0),
        ((signal.SIGTERM, signal.SIGINT), 0, 130),  # so late that somebody has pressed Ctrl-C
        # Ctrl-C on a terminal: the launcher's TERM and the terminal's INT come in any order.
        ((signal.SIGTERM, signal.SIGINT), 1e4, 0),
        ((signal.SIGINT, signal.SIGTERM), 1e4, 0),
        ((signal.SIGTERM, signal.SIGINT, signal.SIGINT), 1e4, 130),
    ],
)
def test_a_second_interrupt_leaves_at_once(
    tmp_path: Path, numbers: tuple[int, ...], factor: float, code: int
) -> None:
    """Fault (Signals and processes): a second signal -> after a second SIGINT, the run prints how
    many steps are lost and exits at once with code 130; a second SIGTERM changes nothing,
    because schedulers repeat it
    """
    job = processes.run(interrupt_myself, numbers, factor, folder=tmp_path, codes=[code])
    assert job.output() == ("" if code else "saved\n")


def interrupt_myself(numbers: tuple[int, ...], factor: float) -> None:
    """Send signals; the time in which two of them are one Ctrl-C is longer by a factor."""
    preemption._SAME_INTERRUPT_S *= factor
    # A shell that starts the tests in the background has them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with stop_on_signals(StopFlag(), training()):
        try:
            for number in numbers:
                os.kill(os.getpid(), number)
        finally:
            print("saved", flush=True)


def test_the_first_stop_request_is_kept() -> None:
    flag = StopFlag()
    flag.request(signal.SIGTERM)
    flag.request(TIME_LIMIT)
    assert flag.poll()
    assert flag.agreed == Stop(signal.SIGTERM)


def test_a_stop_gives_its_reason() -> None:
    assert (Stop().reason, bool(Stop()), Stop().is_preemption) == (None, False, False)
    limit = Stop(TIME_LIMIT)
    assert (limit.reason, bool(limit), limit.is_preemption) == ("time limit", True, False)
    assert all(number < TIME_LIMIT for number in signal.valid_signals())


@pytest.mark.parametrize("number", SAVE_SIGNALS)
def test_a_save_signal_stops_nothing_and_asks_for_one_save(number: int) -> None:
    flag = StopFlag()
    with stop_on_signals(flag, Activity()):  # at the start, it does not raise either
        for _ in range(2):
            os.kill(os.getpid(), number)
        for _ in range(3):  # as in an evaluation, which polls and does not save
            assert not flag.poll()
            assert flag.is_save_agreed
    flag.is_save_agreed = False  # as a save does
    assert not flag.poll()
    assert not flag.is_save_agreed


@pytest.mark.parametrize("num_processes", [2, 3])
def test_all_processes_agree_on_one_save_though_each_asks_when_it_will(
    tmp_path: Path, num_processes: int
) -> None:
    processes.run(save_together, tmp_path, num_processes=num_processes, folder=tmp_path / "logs")
    saved = {(tmp_path / str(rank)).read_text() for rank in range(num_processes)}
    # Asked for before the polls of step 5 and, by the others, of step 6; then before that of 9.
    assert saved == {"6 10"}


def save_together(folder: Path) -> None:
    with joined_processes() as accelerator:
        flag = StopFlag(num_processes=accelerator.num_processes)
        saved = []
        with stop_on_signals(flag, training()):
            for step in range(12):
                if step == (5 if accelerator.is_last_process else 6):
                    os.kill(os.getpid(), signal.SIGUSR2)
                if step == 9 and accelerator.is_main_process:
                    os.kill(os.getpid(), signal.SIGUSR2)
                assert not flag.poll()
                if flag.is_save_agreed:
                    flag.is_save_agreed = False
                    saved.append(step)
        flag.drain()
        (folder / str(accelerator.process_index)).write_text(" ".join(map(str, saved)))


@pytest.mark.parametrize("num_processes", [2, 3])
def test_all_processes_stop_at_the_same_step_though_only_one_got_a_signal(
    tmp_path: Path, num_processes: int
) -> None:
    """Fault (Signals and processes): a signal to only one process -> all stop at the same step"""
    processes.run(stop_together, tmp_path, num_processes=num_processes, folder=tmp_path / "logs")
    stopped = {(tmp_path / str(rank)).read_text() for rank in range(num_processes)}
    assert stopped == {"6 SIGTERM"}  # raised before the poll of step 5, agreed one step later


def stop_together(folder: Path) -> None:
    with joined_processes() as accelerator:
        flag = StopFlag(num_processes=accelerator.num_processes)
        with stop_on_signals(flag, training()):
            for step in range(20):
                if step == 5 and accelerator.is_last_process:
                    os.kill(os.getpid(), signal.SIGTERM)
                if flag.poll():
                    break
        assert flag.poll()  # once agreed, always
        flag.drain()
        (folder / str(accelerator.process_index)).write_text(f"{step} {flag.agreed.reason}")


def test_the_stop_flag_is_agreed_on_with_a_process_group_only_for_gpus(tmp_path: Path) -> None:
    """As of a PartialState that was made before the run: NCCL reduces no tensor of the CPU."""
    processes.run(agree_beside_a_group, num_processes=2, folder=tmp_path)


def agree_beside_a_group() -> None:
    dist.init_process_group("cuda:gloo")
    flag = StopFlag(num_processes=2, timeout_s=60)
    if dist.get_rank() == 1:
        flag.request(signal.SIGTERM)
    flag.agree()
    assert flag.agreed.reason == "SIGTERM"
    dist.destroy_process_group()


def test_a_signal_outranks_the_time_limit_of_another_process(tmp_path: Path) -> None:
    processes.run(wish_differently, num_processes=2, folder=tmp_path)


def wish_differently() -> None:
    with joined_processes() as accelerator:
        flag = StopFlag(num_processes=2)
        flag.request(TIME_LIMIT if accelerator.is_main_process else signal.SIGTERM)
        flag.request_save()
        assert not flag.poll()
        assert flag.poll()
        assert flag.agreed == Stop(signal.SIGTERM)


def test_a_process_that_shuts_down_waits_for_the_reduction_in_flight(tmp_path: Path) -> None:
    processes.run(leave_after_a_poll, num_processes=2, folder=tmp_path)


def leave_after_a_poll() -> None:
    """Without `drain` the process that leaves first breaks the other's reduction."""
    with joined_processes() as accelerator:
        flag = StopFlag(num_processes=2)
        assert not flag.poll()
        flag.drain()
        flag.drain()  # nothing is left to wait for
        assert accelerator.reduce(torch.ones(1), reduction="sum").item() == 2


def test_data_workers_outlive_every_signal_to_a_run(tmp_path: Path) -> None:
    processes.run(ignore_all, folder=tmp_path)


def ignore_all() -> None:
    from accel_trainer.data.signals import ignore_signals

    ignore_signals()
    for number in RUN_SIGNALS:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGHUP, *SAVE_SIGNALS])
def test_a_signal_that_was_ignored_stays_ignored(number: int) -> None:
    """Under nohup the end of a session is no reason to stop.

    Fault (Signals and processes): SIGHUP, when a connection drops -> like SIGTERM; ignored if it
    was already ignored, as under nohup
    """
    before = signal.signal(number, signal.SIG_IGN)
    try:
        flag = StopFlag()
        with stop_on_signals(flag, training()):
            os.kill(os.getpid(), number)
            assert not flag.poll()
            assert not flag.is_save_agreed
    finally:
        signal.signal(number, before)


def test_a_signal_before_there_is_anything_to_save_leaves_at_once() -> None:
    """Fault (Signals and processes): a signal at the start, while data is loaded -> exit 75 at
    once: there is nothing to save
    """
    flag = StopFlag()
    with stop_on_signals(flag, Activity()):
        with pytest.raises(Preempted, match="SIGUSR1 before training"):
            os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)  # does not interrupt the cleanup
    assert flag.poll()  # whoever catches it stops before the first step
    assert flag.agreed.reason == "SIGUSR1"


def test_a_signal_in_the_moment_when_training_begins_raises_or_is_kept() -> None:
    assert {begin_with_a_signal(at_bytecode) for at_bytecode in range(60)} == {
        "raised",
        "kept",
    }


def begin_with_a_signal(at_bytecode: int) -> str:
    """Send a signal before one of the bytecodes by which the start ends, or after them."""
    flag = StopFlag()
    activity = Activity()
    num_left = at_bytecode

    def send(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num_left
        frame.f_trace_opcodes = True
        if event == "opcode":
            num_left -= 1
            if num_left == -1:
                os.kill(os.getpid(), signal.SIGTERM)
        return send

    before = sys.gettrace()
    with stop_on_signals(flag, activity):
        try:
            sys.settrace(send)
            activity.phase = "training"
        except Preempted:
            assert num_left < 0
            return "raised"
        finally:
            sys.settrace(before)
        if num_left >= 0:
            os.kill(os.getpid(), signal.SIGTERM)
    assert flag.poll()
    return "kept"


def stopped_program(*codes: int) -> list[BaseException]:
    """Return the exception that ends a program which the requests `codes` have reached."""
    flag = StopFlag()
    activity = Activity()
    try:
        with program_stopped(flag, activity, is_main=True, is_quiet=True):
            for code in codes:
                flag.request(code)
            activity.result = RESULT
    except BaseException as error:
        return [error]
    return []


RESULT = RunResult("preempted", "SIGINT", TrainState(), {"eval/loss": 0.5}, None, Path("run"))
LINE = "SIGINT: saved step 0: run the same command to continue"


def test_a_signal_ends_a_script_with_its_exit_code_and_one_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    (error,) = stopped_program(TIME_LIMIT, signal.SIGINT)
    assert isinstance(error, Preempted)
    assert isinstance(error, SystemExit)
    assert not isinstance(error, Exception)
    assert (error.code, error.exit_code, error.result) == (75, 75, RESULT)
    assert capfd.readouterr().err == f"accel_trainer: {LINE}\n"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.code, again.message) == (type(error), 75, LINE)
    assert again.result == RESULT


@pytest.mark.parametrize("is_thread", [False, True])
def test_at_a_prompt_and_in_a_thread_a_signal_is_a_keyboard_interrupt(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], is_thread: bool
) -> None:
    if is_thread:
        with ThreadPoolExecutor(1) as thread:
            (error,) = thread.submit(stopped_program, signal.SIGINT).result()
    else:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
        (error,) = stopped_program(signal.SIGINT)
    assert isinstance(error, Preempted)
    assert isinstance(error, KeyboardInterrupt)
    assert not isinstance(error, SystemExit)
    assert error.result == RESULT
    assert error._render_traceback_() == [LINE], "what IPython shows"  # type: ignore[attr-defined]
    assert capfd.readouterr().err == "", "whoever shows the exception says it"


def test_a_time_limit_ends_no_program_and_an_error_goes_first() -> None:
    assert stopped_program() == stopped_program(TIME_LIMIT) == []
    flag = StopFlag()
    flag.request(signal.SIGTERM)
    with (
        pytest.raises(ZeroDivisionError),
        program_stopped(flag, Activity(), is_main=True, is_quiet=True),
    ):
        raise ZeroDivisionError


class Interrupted(evaluated.Points):
    """Gets a signal as it reads its first sample; `has_fallback`: it then reads another one."""

    calls: Iterator[int]
    has_fallback = False

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        try:
            interrupt(self.calls)
            return super().__getitem__(index)
        except Exception:
            if not self.has_fallback:
                raise
            return super().__getitem__(0)


class InterruptedLoss(MeanLoss):
    calls: Iterator[int]
    unsaved_attributes = ("calls",)

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        interrupt(self.calls)
        super().update(sums, batch, output)


def interrupt(calls: Iterator[int]) -> None:
    """Send TERM to this process in the first call."""
    if next(calls) == 0:
        os.kill(os.getpid(), signal.SIGTERM)


def train_interrupted(folder: Path, place: str) -> None:
    """Train, with a signal to the last process while the run starts, at `place`."""
    is_last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
    Interrupted.calls = itertools.count(0 if is_last and place in ("sample", "fallback") else 1)
    Interrupted.has_fallback = place == "fallback"
    InterruptedLoss.calls = itertools.count(0 if is_last and place == "metric" else 1)
    parts: dict[str, Any] = {
        "train_set": Interrupted(38, seed=0),
        "test_set": evaluated.test_set(),
        "metrics": {"": [MeanLoss()], "test_set": [InterruptedLoss()]},
    }
    config = evaluated.make_config(folder)
    main(lambda _: evaluated.train(config, **parts), RecipeConfig, description="", argv=[])


@pytest.mark.parametrize("place", ["sample", "fallback", "metric"])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_signal_in_the_start_is_no_error_of_what_it_interrupts(
    tmp_path: Path, place: str, num_processes: int
) -> None:
    run = tmp_path / "run"

    def attempt(place: str) -> processes.Job:
        logs = tmp_path / f"logs-{place}"
        return processes.start(
            train_interrupted, run, place, num_processes=num_processes, folder=logs
        )

    job = attempt(place)
    assert job.wait() == [75] * num_processes, job.output()
    line = (job.output(num_processes - 1).splitlines() or [job.output()])[-1]
    # Metrics are tried by the trainer, which saves.
    assert ("SIGTERM: saved step" if place == "metric" else "SIGTERM before training began") in line
    assert "same command" in line
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("preempted", 75)
    assert attempt("nowhere").wait() == [0] * num_processes


def evaluate_interrupted(folder: Path, is_trained: bool) -> None:
    """Evaluate around `fit`, with a signal to the last process."""

    def fit(trainer: Trainer) -> RunResult:
        if is_trained:
            trainer.fit()
        if trainer.accelerator.is_last_process:
            trainer.model.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        trainer.evaluate()
        raise AssertionError

    config = evaluated.make_config(folder)
    main(lambda _: evaluated.train(config, fit=fit), RecipeConfig, description="", argv=[])


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("num_processes", [1, *slow([2])])
def test_a_signal_in_an_evaluation_of_the_program_ends_it_as_any_other(
    tmp_path: Path, is_trained: bool, num_processes: int
) -> None:
    job = processes.run(
        evaluate_interrupted,
        tmp_path / "run",
        is_trained,
        num_processes=num_processes,
        folder=tmp_path / "logs",
        codes=[75] * num_processes,
    )
    assert job.output() == "accel_trainer: SIGTERM: run the same command again\n"
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("preempted", 75)


@pytest.mark.parametrize(("stops_at", "num_seen"), [(None, [9, 2, 0]), (3, [5, 2, 0])])
def test_processes_with_unequal_shares_go_through_them_together(
    tmp_path: Path, stops_at: int | None, num_seen: list[int]
) -> None:
    """The process that asks for the stop has the most to do, and one item more until that is
    agreed."""
    processes.run(go_through, tmp_path, stops_at, num_processes=3, folder=tmp_path / "logs")
    assert [int((tmp_path / str(rank)).read_text()) for rank in range(3)] == num_seen


def go_through(folder: Path, stops_at: int | None) -> None:
    with joined_processes() as accelerator:
        rank = accelerator.process_index
        flag, seen = StopFlag(num_processes=3), 0
        assert not flag.poll()  # a step of training before, and one after
        with nullcontext() if stops_at is None else pytest.raises(EvaluationStopped):
            for item in flag.until_preempted(range([9, 2, 0][rank])):
                seen += 1
                if item == stops_at:
                    flag.request(signal.SIGTERM)
        assert flag.agreed.is_preemption is (stops_at is not None)
        flag.agree()
        assert bool(flag.agreed) is (stops_at is not None)
        (folder / str(rank)).write_text(str(seen))
