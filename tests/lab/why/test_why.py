"""Two runs of a small recipe are compared, and the planted reason why they differ is named."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from accel_trainer.checkpoint.format import list_checkpoints
from accel_trainer.cli.main import main
from accel_trainer.commands import compare_runs, read_run
from accel_trainer.lab.why.finding import Finding
from accel_trainer.lab.why.records import differences
from accel_trainer.lab.why.why import why

pytestmark = pytest.mark.usefixtures("python_is_forked")

RECIPE = Path(__file__).with_name("planted.py")
FLAGS = (
    "--batch-size 32 --epochs 1 --runtime.num-threads 1 --quiet --checkpoint-every-n-steps 2"
    " --checkpoint.keep-for-replay 4 --trainer.log-every-n-steps 2"
    " --trainer.digest-every-n-steps 2"
)


def train(
    python: Path, folder: Path, plant: str, *, until: int, flags: str = "", recipe: Path = RECIPE
) -> Path:
    """Train the recipe with a plant up to a step; the same folder goes on from where it is."""
    command = [python, recipe, *FLAGS.split(), "--plant", plant, "--max-steps", until]
    command += [*flags.split(), "--output-dir", folder]
    subprocess.run([str(word) for word in command], check=True)
    return folder


def found_in(one: Path, other: Path | None = None) -> Finding:
    return why(one, other, recipes=[RECIPE], say=lambda line: None)


@pytest.fixture(scope="module")
def clean(one_that_forks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps without a plant."""
    return train(one_that_forks, tmp_path_factory.mktemp("why") / "clean", "nothing", until=2)


def test_equal_runs_are_equal_without_training(
    clean: Path, one_that_forks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = train(one_that_forks, tmp_path / "again", "nothing", until=2)
    assert main(["why", str(clean), str(again)]) == 0
    assert "equal: 2 steps, " in capsys.readouterr().out
    assert main(["why", str(clean), str(again), "--until", "9"]) == 0
    shown = capsys.readouterr().out
    assert "equal: 2 steps, " in shown
    assert "continue" not in shown


def test_runs_whose_files_cannot_be_compared_are_trained_again(
    clean: Path, one_that_forks: Path, tmp_path: Path
) -> None:
    other = train(one_that_forks, tmp_path / "other", "nothing", until=1, flags="--lr 0.05")
    found = found_in(clean, other)
    assert not found.is_equal
    assert found.step == 1
    same = train(one_that_forks, tmp_path / "same", "nothing", until=1)
    assert found_in(clean, same).is_equal


def test_a_setting_of_several_values_is_named(one_that_forks: Path, tmp_path: Path) -> None:
    runs = [
        train(
            one_that_forks,
            tmp_path / first,
            "nothing",
            until=2,
            flags=f"--optimizer.name adamw --optimizer.betas {first} 0.9",
        )
        for first in ("0.7", "0.8")
    ]
    assert found_in(*runs).cause == "optimizer.betas"


def test_a_difference_before_a_branch_is_not_looked_for_in_it(
    clean: Path, one_that_forks: Path, tmp_path: Path
) -> None:
    flags = f"--resume {list_checkpoints(clean / 'checkpoints')[-1]}"
    branch = train(one_that_forks, tmp_path / "branch", "nothing", until=4, flags=flags)
    other = train(one_that_forks, tmp_path / "other", "nothing", until=4, flags="--lr 0.05")
    found = found_in(other, branch)
    assert not found.is_equal
    assert "branched off after that" in found.text
    assert "training again" not in found.text
    assert main(["why", str(branch), "--until", "1"]) == 64


def test_runs_without_a_step_are_not_equal(clean: Path, tmp_path: Path) -> None:
    empty = shutil.copytree(clean, tmp_path / "empty")
    (empty / "metrics.jsonl").write_bytes(b"")
    shutil.rmtree(empty / "checkpoints")
    for runs in ([clean, empty], [empty, clean], [empty]):
        assert main(["why", *map(str, runs), "--recipe", str(RECIPE)]) == 64


def test_a_branch_is_trained_again_from_where_it_began(
    clean: Path, one_that_forks: Path, tmp_path: Path
) -> None:
    flags = f"--resume {list_checkpoints(clean / 'checkpoints')[-1]}"
    branch = train(one_that_forks, tmp_path / "branch", "nothing", until=4, flags=flags)
    flags += " --lr 0.05 --allow-change optimizer.learning_rate"
    other = train(one_that_forks, tmp_path / "other", "nothing", until=4, flags=flags)
    found = found_in(branch)
    assert found.is_equal
    assert "from step 2 to 4" in found.text
    assert found_in(other, branch).cause == "optimizer.learning_rate"


def test_an_operator_that_draws_unseeded_numbers_is_named(
    one_that_forks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant = "generator of its own"
    runs = [train(one_that_forks, tmp_path / name, plant, until=2) for name in "ab"]
    command = ["why", *map(str, runs), "--recipe", str(RECIPE), "--json"]
    assert main(command) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 1
    assert (found["phase"], found["module"]) == ("forward", "middle")
    assert found["operator"] == "aten.rand.generator"
    assert found["inputs_equal"] is True
    assert "planted.py" in found["line"]
    assert found["element"] == [0, 0, 0, 0]
    assert found["cause"] == "a generator that is not seeded"


def test_state_that_no_checkpoint_holds_is_named_after_a_resume(
    one_that_forks: Path, tmp_path: Path
) -> None:
    plant = "Python state"
    whole = train(one_that_forks, tmp_path / "whole", plant, until=4)
    parts = train(one_that_forks, tmp_path / "parts", plant, until=2)
    train(one_that_forks, parts, plant, until=4)
    found = found_in(whole, parts)
    assert found.step == 3
    assert found.cause == "state that no checkpoint holds"
    assert "model.middle.num_calls" in found.text


def test_a_learning_rate_in_the_recipes_code_is_named_with_both_values(
    one_that_forks: Path, tmp_path: Path
) -> None:
    runs = []
    for rate in ("0.25", "0.125"):
        optimizer = f"optimizer=lambda net: torch.optim.SGD(net.parameters(), lr={rate}),"
        recipe = tmp_path / f"{rate}.py"
        recipe.write_text(RECIPE.read_text().replace("callbacks=", f"{optimizer} callbacks="))
        folder = tmp_path / f"run-{rate}"
        runs.append(train(one_that_forks, folder, "nothing", until=2, recipe=recipe))
    found = why(*runs, say=lambda line: None)
    assert found.cause == "optimizer"
    assert found.values == ("0.25", "0.125")
    assert "].lr is 0.25 in A and 0.125 in B" in found.text.splitlines()[-1]


@pytest.mark.slow
def test_samples_of_other_data_are_named(clean: Path, one_that_forks: Path, tmp_path: Path) -> None:
    other = train(one_that_forks, tmp_path / "other", "nothing", until=2, flags="--data changed")
    found = found_in(clean, other)
    assert found.phase == "data"
    assert "different contents of sample 17\n" in found.text
    assert found.cause == "data"


@pytest.mark.slow
def test_another_order_of_the_same_samples_is_named(one_that_forks: Path, tmp_path: Path) -> None:
    runs = []
    for first in ("0", "1"):
        order = f"order=lambda epoch: [*range({first}, 192, 2)], collate="
        recipe = tmp_path / f"{first}.py"
        recipe.write_text(RECIPE.read_text().replace("collate=", order, 1))
        runs.append(train(one_that_forks, tmp_path / first, "nothing", until=2, recipe=recipe))
    found = why(*runs, say=lambda line: None)
    assert (found.step, found.cause) == (1, "order of samples")
    assert "order= differs" in found.text
    assert [name for name, *_ in compare_runs(*map(read_run, runs))["data"]] == ["order"]


def test_one_run_that_repeats_itself_is_equal(clean: Path) -> None:
    found = found_in(clean)
    assert found.is_equal
    assert "repeats itself" in found.text


def test_three_runs_are_refused_in_one_line(
    clean: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", *[str(clean)] * 3]) == 64
    assert "two can be compared" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reduce", "named"), [("float", ["hardware.num_processes"]), ("exact", [])]
)
def test_processes_change_the_order_of_sums_unless_it_is_fixed(
    reduce: str, named: list[str], one_that_forks: Path, tmp_path: Path
) -> None:
    one = train(one_that_forks, tmp_path / "1", "nothing", until=2, flags=f"--reduce {reduce}")
    other = shutil.copytree(one, tmp_path / "2")
    environment = json.loads((one / "environment.json").read_text())
    environment["hardware"]["num_processes"] = 2
    (other / "environment.json").write_text(json.dumps(environment))
    found = differences(read_run(one), read_run(other))
    assert [name for name, *_ in found.order_of_sums] == named
    assert found.decisive == []
