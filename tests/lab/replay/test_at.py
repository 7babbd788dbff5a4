"""`accel-trainer at` rebuilds the state after any step of a run."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest

from accel_trainer import OutputError
from accel_trainer.checkpoint.format import list_checkpoints, read_manifest
from accel_trainer.commands import complete_by_step, read_run
from accel_trainer.lab.replay.at import copy_checkpoint, made
from tests.cli.conftest import run_command

from .conftest import NAMED, ROOT, Train

pytestmark = pytest.mark.usefixtures("python_is_forked")


def hashes(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of the weights and of the optimizer's state."""
    files = read_manifest(checkpoint)[1]["files"]
    return {name: files[name]["sha256"] for name in files if name.startswith(("model", "optim"))}


def test_a_replay_of_a_step_after_the_end_is_one_line(
    poisoned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_command(capsys, ["replay", poisoned, "--step", "61"])
    assert code == 64
    assert "no step 61: it ends after step 60" in err


def test_a_branch_has_no_steps_before_it_began(
    poisoned: Path, train_poisoned: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = list_checkpoints(poisoned / "checkpoints")[0]
    branch = train_poisoned("--resume", start, "--max-steps", "20")
    for argv in (
        ["at", branch, "--step", "15", "--to", tmp_path / "at"],
        ["replay", branch, "--step", "15"],
        ["probe", branch, ROOT / "tests" / "lab" / "replay" / "logs_gradients.py", "--from", "15"],
    ):
        code, _, err = run_command(capsys, argv)
        assert code == 64
        assert "15" in err
    assert not (tmp_path / "at").exists()
    code, out, err = run_command(capsys, ["bisect", branch, "--where", "train/loss > 0", "--json"])
    assert code == 0, err
    assert json.loads(out)["step"] == 16


def test_at_rebuilds_the_bits_of_a_run_that_stopped_there(
    poisoned: Path, train_poisoned: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = train_poisoned("--max-steps", "26")
    folder = tmp_path / "rebuilt"
    code, out, err = run_command(capsys, ["at", poisoned, "--step", 26, "--to", folder])
    assert (code, err) == (0, NAMED)
    assert f"training 6 steps of run again, from step 20, in {folder}\n" in out
    assert "\n3 of 3 digests and 1 of 1 rows on the way are equal\n" in out
    (made,) = list_checkpoints(folder / "checkpoints")
    expected = list_checkpoints(stopped / "checkpoints")[-1]
    assert made.name == expected.name
    assert hashes(made) == hashes(expected) != {}


def test_at_copies_a_checkpoint_that_the_run_still_has(
    poisoned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "copied"
    argv = ["at", poisoned, "--step", 30, "--to", folder]
    code, out, err = run_command(capsys, [*argv, "--json"])
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["copied"]
    assert hashes(Path(report["checkpoint"])) == hashes(Path(report["from"]))
    *_, last = (folder / "metrics.jsonl").read_text().splitlines()
    assert json.loads(last)["optimizer_step"] == 28
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for taken in (folder, loop):
        code, out, err = run_command(capsys, [*argv[:-1], taken])
        assert (code, "error[RUN_EXISTS]" in err) == (73, True)


def test_at_trains_a_kept_step_again_and_names_what_differs(
    poisoned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forged = tmp_path / "forged"
    shutil.copytree(poisoned, forged)
    lines = (forged / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    (row,) = [each for each in rows if (each["event"], each["optimizer_step"]) == ("train", 24)]
    row["digest/model"] = "0" * 16
    # Blanks keep the length, which the checkpoints have.
    text = [json.dumps(each).ljust(len(line)) for each, line in zip(rows, lines, strict=True)]
    (forged / "metrics.jsonl").write_text("\n".join(text) + "\n")
    folder = tmp_path / "again"
    code, out, _ = run_command(capsys, ["at", forged, "--step", 30, "--to", folder, "--again"])
    assert code == 1
    assert "DIFFERENT from the run: step 24, digest/model 0000000000000000 -> " in out


@pytest.mark.parametrize("step", [0, 61])
def test_at_refuses_a_step_that_the_run_does_not_have(
    poisoned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int
) -> None:
    code, _, err = run_command(capsys, ["at", poisoned, "--step", step, "--to", tmp_path / "at"])
    assert (code, "give a step from 1 to 60" in err) == (64, True)
    assert not (tmp_path / "at").exists()


FILL = "import pathlib\nplace = pathlib.Path({place!r})\n"
# What takes the place of the new folder while it is trained, and how that training ends.
TAKEN = {
    "a folder with a file": "place.mkdir()\n(place / 'thesis.txt').write_text('mine')\n",
    "a folder with a folder": "(place / 'photos').mkdir(parents=True)\n",
    "a file": "place.write_text('mine')\n",
    "a link": "place.symlink_to(place.with_name('elsewhere'))\n",
}
ENDS = {
    "refused": ("raise SystemExit(65)\n", 65),
    "killed": ("import os\nos.kill(os.getpid(), 9)\n", 73),
    "interrupted": (
        "import os, signal, time\nos.kill({pid}, signal.SIGINT)\ntime.sleep(60)\n",
        130,
    ),
    "finished": ("import runpy\nrunpy.run_path({recipe!r}, run_name='__main__')\n", 73),
}


def test_what_takes_the_place_of_the_new_folder_is_left_alone(
    poisoned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However the training ends, nothing is removed that the command has not written."""
    for number, (taken, ended) in enumerate(itertools.product(TAKEN, ENDS)):
        folder = tmp_path / str(number)
        (folder / "elsewhere").mkdir(parents=True)
        (folder / "elsewhere" / "thesis.txt").write_text("mine")
        recipe = tmp_path / f"recipe-{number}.py"
        text, expected = ENDS[ended]
        end = text.format(pid=os.getpid(), recipe=str(ROOT / "tests/lab/replay/poisoned.py"))
        recipe.write_text(FILL.format(place=str(folder / "new")) + TAKEN[taken] + end)
        argv = ["at", poisoned, "--step", 2, "--to", folder / "new", "--recipe", recipe]
        code, _, err = run_command(capsys, argv)
        assert code == expected, (taken, ended, err)
        assert ("in the meantime: run this one again" in err) is (ended == "finished")
        there = {str(path.relative_to(folder)) for path in folder.rglob("*")}
        assert {"new", "elsewhere", "elsewhere/thesis.txt"} <= there
        more = there - {"new", "elsewhere", "elsewhere/thesis.txt"}
        is_folder = taken.startswith("a folder")
        assert len(more) == is_folder, (taken, ended, more)
        assert more <= {"new/thesis.txt", "new/photos"}


def test_the_new_folder_is_a_run_that_names_itself(
    poisoned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new"
    folder.mkdir()  # an empty one is taken
    assert run_command(capsys, ["at", poisoned, "--step", 2, "--to", folder])[0] == 0
    assert f"output_dir: {folder}\n" in (folder / "config.yaml").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"new"}


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_one_line(
    poisoned: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(poisoned, tmp_path / "run")
    kept = [*complete_by_step(run).values()][0]
    kept.path.rename(kept.path.with_name(".del"))  # as its retention does
    said = f"has deleted {kept.name} while it was copied"
    with pytest.raises(OutputError, match=said), made(tmp_path / "at") as folder:
        copy_checkpoint(read_run(run), kept, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
