"""An honest run passes an audit; of a forged run, the audit names what was forged."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_trainer.checkpoint.format import list_checkpoints
from accel_trainer.checkpoint.serialization import pack_tensors, unpack_tensors
from accel_trainer.cli.main import main
from accel_trainer.core.digest import digest_of
from tests.faults.mutations import rehash

pytestmark = pytest.mark.usefixtures("python_is_forked")

RECIPE = Path(__file__).with_name("recipe_with_data.py")
FLAGS = (
    "--batch-size 8 --epochs 3 --runtime.num-threads 1 --quiet --checkpoint-every-n-steps 8"
    " --checkpoint.keep-for-replay 3 --trainer.log-every-n-steps 2 --evaluate-every 6steps"
    " --trainer.digest-every-n-steps 2 --max-steps 28"
)


def train(python: Path, folder: Path, samples: Path, *flags: str) -> Path:
    command = [python, RECIPE, *FLAGS.split(), "--samples", samples, *flags]
    subprocess.run([*map(str, command), "--output-dir", str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "samples.pt"
    generator = torch.Generator().manual_seed(5)
    classes = torch.arange(128) % 3
    torch.save((torch.randn(128, 8, generator=generator) + classes[:, None], classes), path)
    return path


@pytest.fixture(scope="module")
def honest(one_that_forks: Path, samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 28 steps, 12 an epoch, that was stopped and continued once."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(one_that_forks, folder, samples, "--max-steps", "13")
    return train(one_that_forks, folder, samples)


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be forged."""
    return shutil.copytree(honest, tmp_path / "run")


def audit(run: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code, and the verdicts that are not `equal` by what they are of."""
    capsys.readouterr()
    code = main(["audit", str(run), "--recipe", str(RECIPE), "--json", *flags])
    verdicts = json.loads(capsys.readouterr().out)
    return code, {each["what"]: each for each in verdicts if each["outcome"] != "equal"}


def test_an_honest_run_passes(honest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(honest), "--recipe", str(RECIPE), "--segments", "2"]) == 0
    shown = capsys.readouterr().out
    assert "training " in shown
    assert len(re.findall("equal .*trained again: their rows and all tensors of step", shown)) == 2
    assert "DIFFERS" not in shown
    assert "not checked" not in shown


def edit_rows(run: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_checkpoint(
    path: Path, file: str, change: Callable[[bytes], bytes], manifest: Any = lambda values: None
) -> None:
    """Change a file of a checkpoint, and let all its hashes agree."""
    files = {each.name: each.read_bytes() for each in path.iterdir()}
    files[file] = change(files[file])
    rehash(files, manifest)
    for name, data in files.items():
        (path / name).write_bytes(data)


def with_changed_weight(data: bytes) -> bytes:
    tensors = unpack_tensors(data)
    tensors["4.weight"][1, 2] += 0.5
    return b"".join(bytes(chunk) for chunk in pack_tensors(tensors))


def forge_weight(run: Path) -> None:
    newest = list_checkpoints(run / "checkpoints")[-1]
    edit_checkpoint(newest, "model.safetensors", with_changed_weight)


def set_better(rows: list[dict[str, Any]]) -> None:
    row = next(row for row in rows if row["event"] == "eval")
    row["eval/accuracy"] = 0.96875


def remove_rows(rows: list[dict[str, Any]]) -> None:
    rows[:] = [row for row in rows if row["optimizer_step"] != 10]


def change_digest(rows: list[dict[str, Any]]) -> None:
    row = next(row for row in rows if row["optimizer_step"] == 28)
    row["digest/model"] = "0" * 16


def export_another(run: Path) -> None:
    path = run / "export" / "model.safetensors"
    path.write_bytes(with_changed_weight(path.read_bytes()))


def set_config(run: Path, old: str, new: str) -> None:
    path = run / "config.yaml"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


FORGERIES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a weight, with its hashes": (
        forge_weight,
        "digests",
        "digest/model: model of step-0000000028-epoch-00002 has the digest",
    ),
    "a better number in rows": (
        lambda run: edit_rows(run, set_better),
        "best.json",
        r"eval/accuracy is better at step 6 \(0.96875\)",
    ),
    "a best without a number": (
        lambda run: edit_json(
            run / "checkpoints" / "best.json",
            lambda best: best.update({"metric": "eval/nothing", "value": None}),
        ),
        "best.json",
        "eval/nothing of step-.* is None",
    ),
    "another best in result.json": (
        lambda run: edit_json(
            run / "checkpoints" / "best.json", lambda best: best.update({"mode": "min"})
        ),
        "result.json",
        "the mode of its best is max, but min in best.json",
    ),
    "a better number in result.json": (
        lambda run: edit_json(
            run / "result.json", lambda result: result["metrics"].update({"eval/accuracy": 0.96875})
        ),
        "result.json",
        "eval/accuracy is 0.96875, but .* in the rows to step 28",
    ),
    "a learning rate": (
        lambda run: set_config(run, "  learning_rate: 0.1", "  learning_rate: 0.2"),
        "config.yaml",
        "optimizer.learning_rate is 0.2, but step-0000000028-epoch-00002 was trained with 0.1",
    ),
    "another seed": (
        lambda run: set_config(run, "seed: 0", "seed: 1"),
        "config.yaml",
        "seed is 1, but step-0000000028-epoch-00002 was trained with 0",
    ),
    "rows removed": (
        lambda run: edit_rows(run, remove_rows),
        "metrics.jsonl",
        "there is no train row of step 10",
    ),
    "all rows removed": (
        lambda run: (run / "metrics.jsonl").unlink(),
        "metrics.jsonl",
        "there is no train row of step",
    ),
    "the export of another run": (
        export_another,
        "export",
        "model.safetensors does not match the hash in its config.json",
    ),
    "a digest": (
        lambda run: edit_rows(run, change_digest),
        "digests",
        "digest/model: .* its row has 0000000000000000",
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_is_named_without_training(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    forge, what, words = FORGERIES[name]
    forge(run)
    code, found = audit(run, capsys, "--segments", "0")
    assert code == 1
    assert re.match(words, found[what]["detail"]), found


def redo_seed(run: Path) -> None:
    """Let config and checkpoints agree on another seed."""
    set_config(run, "seed: 0", "seed: 1")
    for path in list_checkpoints(run / "checkpoints"):
        edit_checkpoint(
            path,
            "trainer.json",
            lambda data: data,
            lambda manifest: manifest["settings"].update({"seed": 1}),
        )


def test_a_seed_that_all_files_agree_on_is_told_by_training(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    redo_seed(run)
    assert audit(run, capsys, "--segments", "0")[0] == 0
    code, found = audit(run, capsys, "--segments", "1")
    assert code == 1
    ((what, verdict),) = found.items()
    assert re.match("steps .* to", what)
    assert re.match("the train row of step .*: digest/samples_so_far is", verdict["detail"])


def test_a_weight_whose_digest_agrees_is_named_by_training(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge_weight(run)
    newest = list_checkpoints(run / "checkpoints")[-1]
    forged = digest_of(unpack_tensors((newest / "model.safetensors").read_bytes()))

    def agree(rows: list[dict[str, Any]]) -> None:
        next(row for row in rows if row["optimizer_step"] == 28)["digest/model"] = forged

    edit_rows(run, agree)
    shutil.rmtree(run / "export")
    assert audit(run, capsys, "--segments", "0")[0] == 0
    code, found = audit(run, capsys, "--segments", "9")
    assert code == 1
    assert found.keys() == {"export", "steps 25 to 28"}
    detail = found["steps 25 to 28"]["detail"]
    assert "digest/model is" in detail
    assert detail.endswith("step-0000000028-epoch-00002: model: 4.weight")


def change_sample(run: Path, samples: Path, folder: Path, number: int) -> None:
    """Let the run have been trained on a file in which one sample is another one."""
    inputs, classes = torch.load(samples)
    inputs[number, 3] += 1
    path = folder / "changed.pt"
    torch.save((inputs, classes), path)
    set_config(run, str(samples), str(path))
    for checkpoint in list_checkpoints(run / "checkpoints"):
        edit_checkpoint(
            checkpoint,
            "trainer.json",
            bytes,
            lambda manifest: manifest["settings"].update({"samples": str(path)}),
        )


def test_a_changed_sample_is_told_by_the_loss(
    run: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_sample(run, samples, tmp_path, 17)  # not among those that a resume hashes
    code, found = audit(run, capsys, "--segments", "9")
    assert code == 1
    details = " ".join(verdict["detail"] for verdict in found.values())
    assert re.search("train/loss is .* trained again, for samples with the same indices", details)


def test_a_changed_sample_that_a_resume_hashes_ends_the_replay(
    run: Path, samples: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    change_sample(run, samples, tmp_path, 18)
    assert main(["audit", str(run), "--recipe", str(RECIPE), "--segments", "1"]) == 1
    shown = capfd.readouterr()
    assert "this run was trained on different data" in shown.err
    assert "ended with exit code 74: see its error above" in shown.out


def test_a_stretch_that_cannot_be_trained_again_is_not_a_difference(
    run: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wider = tmp_path / "recipe.py"
    wider.write_text(RECIPE.read_text().replace("nn.Linear(8, 8)", "nn.Linear(8, 8, bias=False)"))
    code, found = audit(run, capsys, "--segments", "1", "--recipe", str(wider))
    assert (code, "exit code 74" in str(found)) == (0, True)
    samples.rename(samples.with_suffix(".gone"))
    try:
        code, found = audit(run, capsys, "--segments", "1")
    finally:
        samples.with_suffix(".gone").rename(samples)
    assert (code, "exit code 80" in str(found)) == (0, True)
    assert {each["outcome"] for each in found.values()} == {"not checked"}


def test_no_program_of_the_folder_is_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_json(
        run / "environment.json",
        lambda values: values["code"].update({"recipe": str(run / "recipe.py")}),
    )
    capsys.readouterr()
    assert main(["audit", str(run)]) == 64
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1].startswith("training")
    assert shown.err.endswith(f": accel-trainer audit {run} --recipe {run / 'recipe.py'}\n")


def test_malformed_records_are_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_json(run / "checkpoints" / "best.json", lambda best: best.update(value=[1], metric=3))
    (run / "export" / "config.json").write_text("[]")
    assert main(["audit", str(run), "--segments", "0"]) == 64 + 9
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_folder_to_keep_is_a_new_one(
    honest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(honest.iterdir())
    for folder in (tmp_path, honest):
        assert main(["audit", str(honest), "--segments", "0", "--keep", str(folder)]) == 73
        assert "give a new folder" in capsys.readouterr().err
    assert sorted(honest.iterdir()) == before


def test_an_honest_run_of_some_hours_passes(
    one_that_forks: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    length = ("--epochs", "None", "--max-steps", "None", "--hours", "0.0008")
    run = train(one_that_forks, tmp_path / "run", samples, *length, "--schedule.shape", "trunk")
    assert main(["audit", str(run), "--recipe", str(RECIPE), "--segments", "9"]) == 0
    shown = capsys.readouterr().out
    assert "trained again: their rows and all tensors" in shown
    assert "DIFFERS" not in shown
