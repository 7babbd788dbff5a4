"""`accel-trainer plan` against what real runs do, and what it measures on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accel_trainer import main
from accel_trainer.checkpoint.format import list_checkpoints
from accel_trainer.cli.flags.parser import parse_config
from accel_trainer.cli.main import main as door
from accel_trainer.cli.plan.measure import Measured, measure
from accel_trainer.cli.plan.steps import plan_run
from accel_trainer.cli.plan.timer import Times
from accel_trainer.core.batch_plan import BatchPlan
from accel_trainer.run.config import RecipeConfig
from recipes import cifar
from tests.cli.conftest import run_command
from tests.digits import ON_DIGITS
from tests.processes import run
from tests.variants import slow

RECIPES = Path(cifar.__file__).parent
FLAGS = [
    *ON_DIGITS,
    "--model.norm",
    "group",
    "--model.width",
    "4",
    "--global-batch-size",
    "256",
    "--accumulate",
    "2",
    "--epochs",
    "3",
    "--optimizer.learning-rate-scaling",
    "linear",
    "--schedule.warmup-epochs",
    "0.5",
    "--max-steps",
    "14",
    "--checkpoint-every-n-steps",
    "4",
    "--checkpoint.keep-every-n-steps",
    "1",
    "--trainer.log-every-n-steps",
    "1",
    "--runtime.num-threads",
    "1",
]


def train(flags: list[str]) -> None:
    main(cifar.train, cifar.Config, description="", argv=flags)


@pytest.mark.parametrize(("num_processes", "every"), [(2, "4steps"), *slow([(1, "2epochs")])])
def test_a_run_does_what_was_planned(num_processes: int, every: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    flags = [
        *FLAGS,
        "--evaluate-every",
        every,
        "--cache-dir",
        str(tmp_path / "cache"),
        "--output-dir",
        str(tmp_path / "run"),
    ]
    config = parse_config(cifar.Config, flags, description="")
    plan = plan_run(config, config.batch.plan(1438, num_processes=num_processes))
    job = run(train, flags, num_processes=num_processes, folder=tmp_path / "logs")
    banner = job.output().splitlines()
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    trained = [row for row in rows if row["event"] == "train"]
    assert banner[1].startswith(plan.batch.describe())
    says_what_keeps_the_steps = f"--global-batch-size {plan.batch.global_batch_size}" in banner[1]
    assert says_what_keeps_the_steps == (num_processes > 1)
    assert banner[2].startswith(f"peak learning rate {plan.peak_learning_rate:g},")
    assert [row["optimizer_step"] for row in trained] == list(range(1, plan.num_steps + 1))
    assert [row["optim/learning_rate"] for row in trained] == [
        plan.learning_rate_at(step) for step in range(plan.num_steps)
    ]
    saved = {
        int(path.name.split("-")[1]) for path in list_checkpoints(tmp_path / "run" / "checkpoints")
    }
    assert saved == set(plan.save_steps)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    evaluated = {row["optimizer_step"] for row in rows if row["event"] == "eval"} | {
        result["optimizer_step"]
    }
    assert evaluated == set(plan.evaluation_steps)


def plan(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, list[str], str]:
    code, out, err = run_command(capsys, ["plan", *argv])
    return code, out.splitlines(), err


def test_a_plan_for_any_number_of_processes_starts_none_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = ["--config", RECIPES / "configs" / "digits.yaml", "--num-samples", "1438"]
    code, lines, _ = plan(capsys, RECIPES / "cifar.py", *config, "--num-processes", "8")
    assert code == 0
    assert lines[:4] == [
        "512 samples per step (64 per device x 8 processes x 1 accumulation), 3 steps per epoch of "
        "1438 samples",
        "the last step of an epoch has 414 samples",
        "10 epochs, 30 steps",
        "peak learning rate 0.1, warmup ends with step 8 (epoch 2.67)",
    ]
    assert "        8     2.67            0.1" in lines
    assert lines[-2:] == [
        "evaluates after step 3, 6, 9, ... 30 (10 times)",
        "saves after step 3, 6, 9, ... 30 (10 times), and after each best evaluation",
    ]


def test_flags_that_all_recipes_have_are_planned_without_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--num-samples", "469", "--epochs", "2", "--optimizer.learning-rate-scaling", "sqrt"]
    code, lines, _ = plan(capsys, *flags, "--batch-size", "64")
    assert code == 0
    assert lines[0].endswith("8 steps per epoch of 469 samples")
    assert lines[3] == "peak learning rate 0.05 = 0.1 x sqrt(64/256), no warmup"


# --- what is measured ---

OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from accel_trainer import ClassificationTask, RecipeConfig, build_trainer, main, start_run


def samples(number):
    return TensorDataset(torch.randn(number, 4), torch.arange(number) % 2)


def train(config):
    with start_run(config, recipe="own") as run:
        return build_trainer(
            run,
            model=nn.Linear(4, 2),
            task=ClassificationTask(),
            train_set=samples(300),
            eval_sets=samples(1000),
            test_set=samples(700),
        ).fit()


if __name__ == "__main__":
    main(train, RecipeConfig)
"""
SHORT = ["--batch-size", "10", "--batch.eval-batch-size", "100", "--ema", "0.9"]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe of one's own, in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


@pytest.mark.usefixtures("python_is_forked")
def test_a_few_steps_and_samples_of_a_recipe_are_measured(own: Path) -> None:
    measured = measure(own, SHORT, num_processes=1, seconds=0)
    assert measured.batch.num_samples == 300
    assert measured.times.num_steps == 3, "after the first ones"
    assert measured.times.num_evaluated == 2 * 512, "of the model, and of its EMA"
    assert measured.times.rest_of_test_s > 0
    assert measured.times.peak_memory_bytes > 2**20
    assert [path.name for path in own.parent.iterdir()] == ["own.py"], "nothing is left"


@pytest.mark.slow
def test_all_processes_of_a_measurement_stop_at_the_same_step(own: Path) -> None:
    measured = measure(own, SHORT, num_processes=2, seconds=0.5)
    assert measured.batch.num_processes == 2
    assert measured.times.num_steps > 3


@pytest.mark.usefixtures("python_is_forked")
def test_any_recipe_is_planned_with_its_time_and_memory(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--epochs", "4", "--evaluate-every", "2epochs", "--seconds", "0"]
    code, lines, _ = plan(capsys, own, *SHORT, *more)
    assert code == 0
    assert lines[0].startswith("10 samples per step, ")
    assert lines[0].endswith("of 300 samples")
    begin = next(number for number, line in enumerate(lines) if line.startswith("here, by "))
    assert lines[begin].startswith(
        "here, by 3 steps after the first 3 and 1,024 samples of evaluation, in "
    )
    named = ["start", "training", "evaluation", "checkpoints", "end", "the whole run", "memory"]
    assert [line[:13].rstrip() for line in lines[begin + 1 :]] == named
    assert "120 steps of " in lines[begin + 2]
    assert " 2 of " in lines[begin + 3]
    assert lines[-1].endswith("GiB  peak of the process")


@pytest.mark.usefixtures("python_is_forked")
def test_a_plan_shows_what_hours_would_decide_at_the_measured_speed(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--batch-size", "10", "--lr", "0.1", "--schedule.shape", "trunk", "--hours", "1"]
    code, lines, _ = plan(capsys, own, *flags, "--seconds", "0")
    assert code == 0
    (total,) = (line for line in lines if line.startswith("the whole run "))
    assert "59 min" in total or " h " in total, total
    (length,) = (line for line in lines[:3] if line.endswith(" steps"))
    num_steps = int(length.split()[0].replace(",", ""))
    (rates,) = (line for line in lines if line.startswith("peak learning rate 0.1, "))
    decay_at = int(rates.rpartition("decays after step ")[2].replace(",", ""))
    assert num_steps == pytest.approx(1.1 * decay_at, abs=2)


@pytest.mark.usefixtures("python_is_forked")
def test_a_recipe_that_fails_says_why_itself(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own.write_text(OWN.replace("ClassificationTask(),", "None,"))
    assert door(["plan", str(own), *SHORT]) == 64
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("accel_trainer: error[CONFIG]: task")
    assert err.count("\n") == 1
    own.write_text(OWN.replace("    main(train, RecipeConfig)", "    pass"))
    assert door(["plan", str(own), *SHORT]) == 73
    assert "the recipe trained nothing: start it by itself" in capfd.readouterr().err


def measured_run(**times: Any) -> Measured:
    batch = BatchPlan(num_samples=1000, global_batch_size=10, per_device_batch_size=10)
    values = {"start_s": 20.0, "num_steps": 50, "steps_s": 100.0, "evaluation_s": 30.0, **times}
    rest = {
        "device": "cpu",
        "num_evaluated": 512,
        "num_saves": 2,
        "evaluated_time": 0.0,
        "rest_of_test_s": 0.0,
        "peak_memory_bytes": 2**30,
    }
    return Measured(
        batch=batch,
        times=Times(batch={}, **{**rest, **values}),
        save_s=1.0,
        end_s=4.0,
        total_s=9.0,
    )


def test_the_costs_of_a_run_add_up_from_its_parts() -> None:
    measured = measured_run()
    config = parse_config(RecipeConfig, ["--epochs", "5", "--max-steps", "403"], description="")
    assert measured.costs(plan_run(config, measured.batch)) == {
        "start": 20.0,
        "training": 800.0,
        "evaluation": 150.0,
        "checkpoints": 5.0,
        "end": 4.0,
    }


def test_a_run_of_some_steps_is_planned_by_steps() -> None:
    """Each evaluation is in a checkpoint; an epoch has 100 steps."""
    measured = measured_run()
    flags = ["--steps", "250", "--evaluate-every", "120steps", "--checkpoint-every-n-steps", "180"]
    plan = plan_run(parse_config(RecipeConfig, flags, description=""), measured.batch)
    assert (plan.num_steps, plan.evaluation_steps) == (250, [120, 240, 250])
    assert plan.save_steps == [100, 120, 180, 200, 240, 250]  # and the ends of epochs
    assert plan.learning_rate_at(125) == pytest.approx(plan.peak_learning_rate / 2)
    cost = 247 * 2.0 + 3 * 30.0 + 6 * 1.0  # of the steps but the first 3, evaluations, saves
    assert measured.repeated_s(plan) == pytest.approx(cost / 250)


def test_a_run_of_no_epochs_evaluates_and_saves_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = plan(capsys, "--num-samples", "500", "--epochs", "0")[1]
    assert lines[-2:] == [
        "evaluates after step 0",
        "saves after step 0, and after each best evaluation",
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["absent.py"], "absent.py does not exist: give the path of a Python file"),
        ([], "a plan without a recipe does not know the data: add --num-samples"),
        ([RECIPES / "minimal.py", "--start"], "plan --start is gone: use --hours of the recipe"),
        (
            [RECIPES / "minimal.py", "--hours", "1"],
            "plan --hours is gone: use --hours with",
        ),
        (
            ["--num-samples", "9", "--schedule.shape", "trunk", "--hours", "1"],
            "leave --num-samples out",
        ),
        ([RECIPES / "minimal.py", "--seconds", "-1"], "--seconds: it is -1, and must be 0 or more"),
        (["--num-samples", "0"], "0 training samples for 1 process: add data"),
        (["--num-samples", "9", "--num-processes", "0"], "it is 0, and must be 1 or more"),
        (
            ["--num-samples", "9", "--batch-size", "5", "--num-processes", "2"],
            "global batch 10 is larger",
        ),
        (["--num-samples", "9" * 20, "--epochs", "2"], "steps: plan fewer, such as with"),
        (["--num-samples", "500", "--epoch", "2"], "unknown flag --epoch: did you mean --epochs?"),
    ],
)
def test_bad_input_is_one_line(
    argv: list[object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    code, _, err = plan(capsys, *argv)
    assert code != 0
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("source", ["import nonsense_that_is_not_installed", "def f(:", "x = 1"])
def test_a_file_without_a_recipe_is_one_line(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.py"
    path.write_text(source)
    code, _, err = plan(capsys, path, "--num-samples", "9")
    assert code == 64
    assert err.startswith(f"accel_trainer: error[RECIPE]: {path} ")
    assert err.count("\n") == 1
