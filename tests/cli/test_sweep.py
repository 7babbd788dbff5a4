"""`accel-trainer sweep`: which runs it asks for, and what it makes of them."""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from accel_trainer import ConfigError, RecipeConfig, main
from accel_trainer.cli.sweep.trials import Trial, plan_trials
from recipes import cifar, images
from tests.cli.conftest import run_command
from tests.vision.make_photos import write_classes

ROOT = Path(__file__).parents[2]


def plan(folder: Path, *flags: str) -> list[Trial]:
    return plan_trials(cifar.Config, flags, folder=folder)


def test_a_sweep_is_over_the_flags_with_several_values(tmp_path: Path) -> None:
    trials = plan(
        tmp_path, "--seed", "0", "1", "--epochs", "3", "--track", "a", "b", "--lr", "0.1", "0.2"
    )
    assert [(t.config.seed, t.config.optimizer.learning_rate) for t in trials] == [
        (0, 0.1),
        (0, 0.2),
        (1, 0.1),
        (1, 0.2),
    ]
    assert {t.config.trainer.num_epochs for t in trials} == {3}
    assert {t.config.run.track for t in trials} == {("a", "b")}, (
        "a flag that takes several values is one value"
    )
    assert [t.folder.name for t in trials][:2] == ["seed-0_lr-0.1", "seed-0_lr-0.2"]
    assert all(t.config.run.output_dir == t.folder for t in trials)


@dataclass(frozen=True, kw_only=True)
class Containers(RecipeConfig):
    weights: dict[str, float] | None = None
    layers: list[int] = field(default_factory=list)


def test_the_items_of_one_value_are_not_swept(tmp_path: Path) -> None:
    flags = ["--weights", "a", "1", "b", "2", "--layers", "3", "4", "--seed", "0", "1"]
    trials = plan_trials(Containers, flags, folder=tmp_path)
    assert [trial.folder.name for trial in trials] == ["seed-0", "seed-1"]
    for trial in trials:
        assert isinstance(trial.config, Containers)
        assert (trial.config.weights, trial.config.layers) == ({"a": 1.0, "b": 2.0}, [3, 4])


def test_values_that_are_equal_are_trained_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However they are written, of each kind of setting."""
    for flag, *values in (
        ("--lr", "0.1", "0.10", "1e-1", ".1", "+0.1"),
        ("--seed", "1", "01", "+1", "1_0", "10"),
        ("--max-steps", "7", "07"),
        ("--evaluate-every", "1epoch", "2epochs"),
    ):
        trials = plan(tmp_path, flag, *values)
        settings = [replace(each.config.run, output_dir=None) for each in trials]
        configs = [replace(t.config, run=run) for t, run in zip(trials, settings, strict=True)]
        assert len(configs) == len({repr(config) for config in configs}), flag
        said = capsys.readouterr().err.splitlines()
        assert len(said) == len(values) - len(trials), flag
        assert all(
            "has the same settings as" in line and line.startswith("note: ") for line in said
        )
    both = plan(tmp_path, "--run.init-from", "a", "b")
    assert len(both) == 2, "a setting of the run is one, too"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seed", "1"], "nothing to sweep"),
        (["--seed", "1", "1"], "two runs would be seed-1: give each value once"),
        (["--freeze", "a/b", "a b"], "two runs would be freeze-a-b: give each value once"),
        (["--sed", "1", "2"], "did you mean --seed?"),
        (["--lr", "0.1", "fast"], "--lr fast: expected a number"),
    ],
)
def test_a_mistake_is_found_before_any_run(tmp_path: Path, flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan(tmp_path, *flags)
    assert message in str(error.value)


@pytest.mark.usefixtures("python_is_forked")
def test_a_sweep_tables_mean_and_spread_and_trains_no_finished_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    folder = tmp_path / "sweep"
    command = [
        "sweep",
        ROOT / "recipes" / "minimal.py",
        "--epochs",
        "1",
        "--runtime.num-threads",
        "1",
    ]
    code, out, err = run_command(capsys, [*command, "--output-dir", folder, "--seed", "0", "1"])
    assert (code, err) == (0, "")
    results = [json.loads((folder / f"seed-{seed}" / "result.json").read_text()) for seed in (0, 1)]
    accuracies = [result["metrics"]["eval/accuracy"] for result in results]
    shown = f"{statistics.fmean(accuracies):.2%} +- {statistics.stdev(accuracies):.2%}"
    assert out.splitlines()[-1].split()[:2] == ["2", "eval/accuracy"]
    assert out.splitlines()[-1].endswith(f"{shown}  {shown}")
    before = {path: path.stat().st_mtime_ns for path in (folder / "seed-0").rglob("*")}

    (folder / "seed-1" / "result.json").unlink()  # as if it had been killed at its end
    code, out, _ = run_command(capsys, [*command, "--output-dir", folder, "--seed", "0", "1"])
    assert code == 0
    assert "[1/2] seed-0: finished before\n[2/2] seed-1: training" in out
    assert {path: path.stat().st_mtime_ns for path in (folder / "seed-0").rglob("*")} == before
    assert out.splitlines()[-1].endswith(f"{shown}  {shown}")
    assert [line.split()[0] for line in run_command(capsys, ["runs", folder])[1].splitlines()[1:]]
    (row,) = json.loads((folder / "sweep.json").read_text())
    assert row["last"]["values"] == accuracies

    code, out, _ = run_command(capsys, [*command, "--output-dir", folder, "--lr", "0.1", "nan"])
    assert code == 64, "a wrong value ends it before any run"


def test_a_run_with_a_setting_that_is_no_longer_given_is_not_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = write_classes(tmp_path / "photos", ["ant", "bee"], per_class=12)
    flags = ["--dataset", str(photos), "--val-fraction", "0.25", "--image-size", "32"]
    flags += ["--cache-dir", str(tmp_path / "cache"), "--runtime.num-threads", "1"]
    flags += ["--epochs", "1"]
    place = ["--seed", "0", "--output-dir", str(tmp_path / "sweep" / "seed-0")]
    with pytest.raises(SystemExit):
        main(
            images.train,
            images.Config,
            description="",
            argv=[*flags, "--max-steps", "1", *place],
        )
    capsys.readouterr()

    def seeds_to_train(*extra: str) -> list[str]:
        recipe = ROOT / "recipes" / "images.py"
        command = ["sweep", recipe, *flags, *extra, "--output-dir", tmp_path / "sweep", "--print"]
        _, out, _ = run_command(capsys, [*command, "--seed", "0", "1"])
        return re.findall(r"--seed (\d)", out)

    assert seeds_to_train("--max-steps", "1") == ["1"], "what the rules have chosen is no change"
    assert seeds_to_train() == ["0", "1"], "the run of seed 0 stopped at its first step"


@pytest.mark.parametrize("kind", ["a link", "a pipe", "a folder"])
def test_a_log_is_not_written_into_something_else(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "sweep" / "seed-1.log"
    log.parent.mkdir()
    (tmp_path / "mine").write_text("mine")
    make = {"a link": lambda: log.symlink_to(tmp_path / "mine"), "a folder": log.mkdir}
    make.get(kind, lambda: os.mkfifo(log))()
    recipe = tmp_path / "recipe.py"
    recipe.write_text("from accel_trainer import RecipeConfig")
    code, _, err = run_command(
        capsys, ["sweep", recipe, "--seed", "1", "2", "--output-dir", log.parent]
    )
    assert (code, f"cannot write to {log}" in err) == (73, True)
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("text", ["mine", "{}x", '["mine"]', "[3]"])
def test_a_table_of_something_else_is_not_replaced(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "sweep.json"
    table.write_text(text)
    recipe = tmp_path / "recipe.py"
    recipe.write_text("from accel_trainer import RecipeConfig")
    code, _, err = run_command(
        capsys, ["sweep", recipe, "--seed", "1", "2", "--output-dir", tmp_path]
    )
    assert (code, f"{table} would be overwritten" in err) == (73, True)
    assert {*tmp_path.iterdir()} == {table, recipe}


@pytest.mark.usefixtures("python_is_forked")
def test_a_sweep_whose_recipe_trains_nothing_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text("if __name__ != '__main__':\n    from accel_trainer import RecipeConfig")
    command = ["sweep", recipe, "--seed", "1", "2", "--output-dir", tmp_path / "sweep"]
    code, out, _ = run_command(capsys, command)
    assert (code, "no run has finished" in out) == (1, True)


def test_print_shows_a_command_a_line_and_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = ROOT / "recipes" / "minimal.py"
    folder = tmp_path / "my sweep"
    flags = ["--seed", "0", "1", "--epochs", "2"]
    code, out, _ = run_command(capsys, ["sweep", recipe, *flags, "--print", "--output-dir", folder])
    assert code == 0
    assert [shlex.split(line) for line in out.splitlines()] == [
        [sys.executable, str(recipe), "--epochs", "2", "--seed", seed]
        + ["--output-dir", str(folder / f"seed-{seed}")]
        for seed in ("0", "1")
    ]
    assert not folder.exists()


@pytest.mark.usefixtures("python_is_forked")
def test_a_run_that_fails_does_not_end_the_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    command = [
        "sweep",
        ROOT / "recipes" / "minimal.py",
        "--epochs",
        "1",
        "--output-dir",
        tmp_path / "sweep",
    ]
    code, out, err = run_command(capsys, [*command, "--batch-size", "1000", "128"])
    assert code == 1
    assert "batch-size-1000: exit code 64" in out
    assert out.splitlines()[-1].split()[:3] == ["128", "1", "eval/accuracy"]


@pytest.mark.usefixtures("python_is_forked")
def test_a_signal_ends_the_sweep_even_while_a_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWEEP", str(os.getpid()))
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "import os, signal, time\n"
        "from accel_trainer import RecipeConfig\n"
        "if __name__ == '__main__':\n"
        "    os.kill(int(os.environ['SWEEP']), signal.SIGTERM)\n"
        "    time.sleep(600)\n"  # it has no handlers yet
    )
    command = ["sweep", recipe, "--seed", "0", "1", "2", "--output-dir", tmp_path / "sweep"]
    code, out, _ = run_command(capsys, command)
    assert (code, "seed-0: training" in out) == (75, True)
    assert "run the same command again" in out
    assert "seed-1" not in out, "no other was begun"
