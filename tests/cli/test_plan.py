"""`accel-trainer plan` against what real runs do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from accel_trainer import main
from accel_trainer.checkpoint.format import list_checkpoints
from accel_trainer.cli.plan import plan_run
from accel_trainer.run.parser import parse_config
from accel_trainer.vision import load_photos
from recipes import cifar
from tests.cli.conftest import run_command
from tests.processes import run
from tests.variants import slow

RECIPES = Path(cifar.__file__).parent
FLAGS = [
    "--dataset",
    "digits",
    "--model",
    "resnet8",
    "--model.norm",
    "group",
    "--model.width",
    "4",
    "--augment.crop-padding",
    "1",
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
    plan = plan_run(
        parse_config(cifar.Config, flags, description=""),
        num_samples=1438,
        num_processes=num_processes,
    )
    job = run(train, flags, num_processes=num_processes, folder=tmp_path / "logs")
    banner = job.output().splitlines()
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    trained = [row for row in rows if row["event"] == "train"]
    assert banner[1].startswith(plan.batch.describe())
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
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    config = ["--config", RECIPES / "configs" / "digits.yaml", "--cache-dir", tmp_path]
    code, lines, _ = plan(capsys, RECIPES / "cifar.py", *config, "--num-processes", "8")
    assert code == 0
    assert lines[:4] == [
        "64 per device x 8 processes x 1 accumulation = 512 per step, 3 steps per epoch of 1438 "
        "samples",
        "the last step of an epoch has 414 samples",
        "10 epochs, 30 steps",
        "peak learning rate 0.1, warmup ends with step 8 (epoch 2.67)",
    ]
    assert "        8     2.67            0.1" in lines
    assert lines[-2:] == [
        "evaluates after step 3, 6, 9, ... 30 (10 times)",
        "saves after step 3, 6, 9, ... 30 (10 times), and after each best evaluation",
    ]


def test_a_recipe_of_another_kind_is_planned_by_its_number_of_samples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("sklearn")
    flags = ["--num-samples", "469", "--epochs", "2", "--optimizer.learning-rate-scaling", "sqrt"]
    code, lines, _ = plan(capsys, RECIPES / "minimal.py", *flags, "--batch-size", "64")
    assert code == 0
    assert lines[0].endswith("= 64 per step, 8 steps per epoch of 469 samples")
    assert lines[3] == "peak learning rate 0.05 = 0.1 x sqrt(64/256), no warmup"
    assert plan(capsys, *flags, "--batch-size", "64")[1] == lines, (
        "without a recipe: what all have in common"
    )


def test_a_recipe_for_photos_is_planned_by_its_own_reader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(40):
        path = tmp_path / "photos" / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (80 + index, 70), (index, 0, 0)).save(path)
    data = [
        "--dataset",
        tmp_path / "photos",
        "--cache-dir",
        tmp_path / "cache",
        "--batch-size",
        "8",
    ]
    num_samples = len(
        load_photos(tmp_path / "photos", val_fraction=0.25, cache_dir=tmp_path / "cache").train
    )
    code, lines, _ = plan(capsys, RECIPES / "images.py", *data, "--val-fraction", "0.25")
    assert code == 0
    assert lines[0].endswith(
        f"= 8 per step, {-(-num_samples // 8)} steps per epoch of {num_samples} samples"
    )
    code, _, err = plan(capsys, RECIPES / "images.py", *data)
    assert code == 65
    assert "has no validation split: set one aside with --val-fraction 0.1" in err, (
        "as the run itself says"
    )


def test_a_dataset_with_a_reader_of_the_users_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "from accel_trainer import RecipeConfig\nfrom dataclasses import dataclass\n"
    source += (
        "@dataclass(frozen=True, kw_only=True)\nclass Config(RecipeConfig):\n    dataset: "
        "str = 'mine'\n"
    )
    (tmp_path / "recipe.py").write_text(source)
    code, _, err = plan(capsys, tmp_path / "recipe.py")
    assert code == 64
    assert "is counted: add --num-samples" in err
    assert err.count("\n") == 1


def test_a_run_of_no_epochs_evaluates_and_saves_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = plan(capsys, "--num-samples", "500", "--epochs", "0")[1]
    assert lines[-2:] == [
        "evaluates after step 0",
        "saves after step 0, and after each best evaluation",
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["absent.py"], "absent.py is not a recipe: give the path of a Python file"),
        (
            [RECIPES / "minimal.py"],
            "this recipe has no --dataset to count samples in: add --num-samples",
        ),
        (["--num-samples", "0"], "0 training samples are too few for 1 processes: add data"),
        (
            ["--num-samples", "9", "--num-processes", "0"],
            "--num-processes is 0: set it to 1 or more",
        ),
        (
            ["--num-samples", "9", "--batch-size", "5", "--num-processes", "2"],
            "global batch 10 is larger",
        ),
        (
            ["--num-samples", "9" * 20, "--epochs", "2"],
            "steps: plan fewer, such as with --max-steps 1000000",
        ),
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
