"""`--hours` decides the length of a run once, and from then on only the numbers count."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from accelerate import Accelerator

from accel_trainer import (
    BatchConfig,
    ConfigError,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
    ScheduleConfig,
    TrainerConfig,
)
from accel_trainer.checkpoint.format import list_checkpoints, read_manifest
from accel_trainer.cli.recipe.hours import Hours, ending_in_time
from accel_trainer.cli.recipe.start import this_start
from accel_trainer.commands import Start, command_of, environment_of, read_run
from accel_trainer.core.batch_plan import ENDLESS
from accel_trainer.core.learning_rate import Decay
from accel_trainer.core.types import StepReport
from accel_trainer.run.extra_callbacks import START_VARIABLE
from accel_trainer.training.callback import TrainerView
from tests.cli.conftest import run_command
from tests.lab.replay import poisoned

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "tests" / "cli" / "recipe" / "hours_recipe.py"
FLAGS = (
    "--batch-size 8 --lr 0.05 --runtime.num-threads 1 --schedule.shape trunk --ema 0.9"
    " --schedule.warmup-epochs 0.25 --checkpoint-every-n-steps 20"
)
HOURS = ["0.0009", "0.004"]  # on one process and on two: time for some hundred steps of 10 ms

# --- when it decides, by a clock that the test sets ---


class Simulated:
    """What `Hours` reads of a trainer, whose steps take as many seconds as the test says."""

    def __init__(self, hours: float, *, metadata: dict[str, Any] | None = None) -> None:
        self.metadata = metadata or {}
        self.state = SimpleNamespace(optimizer_step=0)
        self.accelerator = Accelerator(cpu=True)
        self.num_saves = 0
        self.stop_reason: str | None = None
        self.spent_s = 0.0
        self.decay = Decay(ENDLESS, ENDLESS)
        self._hours = Hours(hours, start_s=0.0, is_quiet=True, clock=lambda: self.spent_s)
        self._hours.see_parts({"decay": self.decay})

    def request_save(self) -> None:
        self.num_saves += 1

    def request_stop(self, reason: str) -> None:
        self.stop_reason = reason

    def train(self, step_s: Callable[[int], float], *, until: float = float("inf")) -> float:
        """Train from where it stands, and return the seconds that this attempt has spent."""
        view = cast(TrainerView, self)
        self._hours.on_fit_start(view)
        while self.stop_reason is None and self.state.optimizer_step < until:
            self.state.optimizer_step += 1
            step = self.state.optimizer_step
            self.spent_s += step_s(step)
            report = SimpleNamespace(optimizer_step=step, loss_sum=0.0)
            self._hours.on_step_end(view, cast(StepReport, report))
        self._hours.before_save(view)
        return self.spent_s


def slower_at(step: int) -> Callable[[int], float]:
    return lambda number: 10.0 if number <= 3 else 1.0 if number < step else 2.0


def test_the_decay_begins_when_a_tenth_of_the_steps_fills_the_time_left() -> None:
    """In an hour there are 3 steps of 10 s, then 3,570 of 1 s."""
    run = Simulated(1.0)
    spent_s = run.train(slower_at(ENDLESS))
    assert run.stop_reason == "hours reached"
    assert run.state.optimizer_step == run.decay.end
    assert (run.decay.start, run.decay.end) == pytest.approx((3248, 3573), abs=3)
    assert spent_s == pytest.approx(3600, abs=5)
    assert run.num_saves == 1, "the decision is saved at once"


def test_a_machine_that_becomes_slower_after_the_decision_ends_late() -> None:
    run = Simulated(1.0)
    assert run.train(slower_at(3300)) == pytest.approx(3600 + 273, abs=5)
    assert (run.decay.start, run.decay.end) == pytest.approx((3248, 3573), abs=3)


def test_the_time_of_all_attempts_counts() -> None:
    first = Simulated(1.0)
    first.train(slower_at(ENDLESS), until=2000)
    second = Simulated(1.0, metadata=first.metadata)
    second.state.optimizer_step = 2000
    spent_s = first.spent_s + second.train(lambda step: 1.0)
    assert spent_s == pytest.approx(3600, abs=5)
    assert second.state.optimizer_step == pytest.approx(3573, abs=5)


def test_what_was_decided_is_followed_whatever_the_clock_says() -> None:
    first = Simulated(1.0)
    first.train(slower_at(ENDLESS), until=3300)
    second = Simulated(1.0, metadata=first.metadata)
    second.state.optimizer_step = 3300
    second.train(lambda step: 1000.0)
    assert (second.decay.start, second.decay.end) == (first.decay.start, first.decay.end)
    assert second.state.optimizer_step == first.decay.end
    assert second.num_saves == 0


# --- settings that are refused ---


@pytest.mark.parametrize(
    ("schedule", "trainer"),
    [
        ({"shape": "cosine"}, {}),
        ({"shape": "trunk", "decay_at": 5}, {}),
        ({"shape": "trunk"}, {"max_time_s": 60.0}),
    ],
)
def test_what_would_set_the_end_as_well_is_refused(
    schedule: dict[str, Any], trainer: dict[str, Any]
) -> None:
    config = RecipeConfig(
        schedule=ScheduleConfig(**schedule), trainer=TrainerConfig(hours=1.0, **trainer)
    )
    refused = pytest.raises(ConfigError, match="--hours 1 .*--schedule.shape trunk")
    with refused, ending_in_time(config):
        pass


def test_no_later_run_of_the_program_gets_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RecipeConfig(schedule=ScheduleConfig(shape="trunk"), trainer=TrainerConfig(hours=1.0))
    for until in (None, 5):
        if until is not None:
            monkeypatch.setenv(START_VARIABLE, json.dumps({"recipe": "mine.py", "until": until}))
        before = os.environ.get(START_VARIABLE)
        with ending_in_time(config):
            start = this_start()
            assert start is not None
            assert len(start.callbacks) == 1
            assert start.until == until
            monkeypatch.setenv("SET_BY_THE_RECIPE", str(until))
        assert os.environ.get(START_VARIABLE) == before
        assert os.environ["SET_BY_THE_RECIPE"] == str(until)


@pytest.mark.parametrize("length", ["num_epochs", "num_steps"])
def test_a_second_length_is_refused(length: str) -> None:
    lengths: dict[str, Any] = {"hours": 1.0, length: 5}
    with pytest.raises(ConfigError, match=r"5 and hours=1\.0 both set the length"):
        TrainerConfig(**lengths)


def test_a_run_that_nothing_would_end_is_refused(tmp_path: Path) -> None:
    """The function of the recipe was called without `main`."""
    config = RecipeConfig(
        batch=BatchConfig(per_device_batch_size=8),
        trainer=TrainerConfig(hours=1.0),
        optimizer=OptimizerConfig(learning_rate=0.1),
        schedule=ScheduleConfig(shape="trunk"),
        run=RunConfig(output_dir=tmp_path / "run"),
    )
    with pytest.raises(ConfigError, match="hours=1 .*accel_trainer.main"):
        poisoned.train(config)


# --- real runs ---

KILLS = """
import os, pathlib, signal, time
from accel_trainer import Callback

saved = []

class Kills(Callback):
    def on_step_end(self, trainer, report):
        time.sleep(0.01)
        left = steps_left(trainer)
        if left is None and report.optimizer_step > 2:
            kill("before")
        elif left is not None and 0 < left < 6:
            kill("after", trainer)

    def on_checkpoint(self, trainer, name):
        saved.append(name)
        if steps_left(trainer) == 1:  # on a busy machine it is decided that the next is the last
            kill("after", trainer)

def steps_left(trainer):
    note = trainer.metadata.get("hours", {})
    return note["num_steps"] - trainer.state.optimizer_step if "num_steps" in note else None

def kill(name, trainer=None):
    if not (marker := pathlib.Path(%r, name)).exists():
        while trainer and not pathlib.Path(
            trainer.log.folder, "checkpoints", saved[-1], "COMMIT"
        ).exists():
            time.sleep(0.01)
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def weights_of(run: Path) -> dict[str, str]:
    """Return what the last checkpoint has of the weights, their average and the optimizer."""
    files = read_manifest(list_checkpoints(run / "checkpoints")[-1])[1]["files"]
    kinds = ("model", "ema", "optim")
    return {name: files[name]["sha256"] for name in files if name.startswith(kinds)}


def train(
    folder: Path, *flags: object, kills: Path | None = None, num_processes: int = 1
) -> tuple[int, str]:
    """Train, and return the exit code and all that was printed."""
    words = [*FLAGS.split(), *map(str, flags), "--output-dir", str(folder)]
    variables = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    if kills is not None:
        kills.mkdir(exist_ok=True)
        (kills / "kills.py").write_text(KILLS % str(kills))
        variables["ACCEL_TRAINER_CALLBACKS"] = str(kills / "kills.py")
    start = Start(recipe=str(RECIPE), flags=words, num_processes=num_processes, variables=variables)
    environment = environment_of(start, {**os.environ, "PYTHONPATH": str(ROOT)})
    done = subprocess.run(
        command_of(start, environment), env=environment, cwd=ROOT, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.usefixtures("python_is_forked")
@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_run_ends_as_one_that_is_told_the_numbers(
    num_processes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, kills = tmp_path / "run", tmp_path / "kills"
    hours = ["--hours", HOURS[num_processes - 1]]

    def attempt(folder: Path, *flags: object) -> tuple[int, str]:
        return train(folder, *flags, kills=kills, num_processes=num_processes)

    def at_full_speed(folder: Path, *flags: object) -> tuple[int, str]:
        return train(folder, *flags, num_processes=num_processes)

    killed = [attempt(run, *hours)[0] != 0 for _ in range(2)]
    assert killed == [True, True]
    assert {each.name for each in kills.iterdir()} >= {"before", "after"}
    decided = read_run(run).decided
    code, out = attempt(run, *hours)
    assert code == 0, out
    assert read_run(run).decided == decided != {}, "a resume does not decide again"
    told = ["--steps", decided["trainer.num_steps"], "--schedule.decay-at"]
    code, out = at_full_speed(tmp_path / "told", *told, decided["schedule.decay_at"])
    assert code == 0, out
    assert weights_of(run) == weights_of(tmp_path / "told")
    assert len(weights_of(run)) >= 4
    rates = [read_run(each).series("optim/learning_rate") for each in (run, tmp_path / "told")]
    assert rates[0] == rates[1]
    # It is finished, and refuses a different time.
    code, out = attempt(run, *hours)
    assert (code, "this run is finished" in out) == (0, True)
    code, out = attempt(run, "--hours", 2)
    assert (code, "error[CONFIG_CHANGED]" in out, "trainer.hours" in out) == (64, True, True)
    rows = (run / "metrics.jsonl").read_bytes()
    code, out = attempt(run, "--hours", 2, "--allow-change", "trainer.hours")
    assert (code, "--hours 2: with" in out) == (64, True)
    assert (run / "metrics.jsonl").read_bytes() == rows, "a refused start changes nothing"
    if num_processes == 1:
        code, out, _ = run_command(capsys, ["rerun", run])
        assert (code, "equal: the same weights" in out) == (0, True)
