from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from accel_trainer.cli.runs.run_reader import read_run
from accel_trainer.cli.share.evaluate import _class_rows
from accel_trainer.cli.share.evaluation_data import DataChoice, _load_photos
from accel_trainer.cli.share.export import export, reported_metrics
from accel_trainer.core.errors import DataError
from accel_trainer.vision.pretrained import read_export_content
from tests.vision.make_data import write_image_folder, write_parquet_folder

from .conftest import run_command

pytestmark = pytest.mark.usefixtures("quiet_datasets")


def evaluate(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    code, out, err = run_command(capsys, ["evaluate", *argv, "--json"])
    assert code == 0, err
    return dict(json.loads(out))


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    named = ("loss", "accuracy", "top5_accuracy")
    return {name: metrics[name] for name in named if name in metrics}


def cache(runs: Path) -> tuple[str, Path]:
    return "--cache-dir", runs.parent / "cache"


def test_a_run_gets_the_numbers_of_its_own_evaluation_bit_for_bit(
    runs: Path, photo_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run, split in ((runs / "fast", "test"), (photo_run, "validation")):
        found = evaluate(capsys, run, *cache(runs if run != photo_run else photo_run))
        assert numbers(found["metrics"]) == numbers(
            reported_metrics(read_run(run), read_export_content(run / "export"))
        )
        assert found["split"] == split
        assert found["num_samples"] == sum(map(sum, found["metrics"]["confusion_matrix"]))


def test_the_data_of_a_run_is_recognised_in_any_spelling(
    photo_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the photos that it was trained on would count as well."""
    monkeypatch.chdir(photo_run.parent)
    for spelling in ("photos", "photos/", "./photos", photo_run.parent / "photos"):
        found = evaluate(capsys, photo_run, "--dataset", spelling, *cache(photo_run))
        assert found["split"] == "validation"


@pytest.mark.parametrize(("weights", "group"), [("model", "eval/"), ("ema", "eval_ema/")])
def test_each_checkpoint_gets_the_numbers_that_were_logged_at_its_step(
    runs: Path, capsys: pytest.CaptureFixture[str], weights: str, group: str
) -> None:
    run = read_run(runs / "fast")
    checkpoints = sorted((runs / "fast" / "checkpoints").glob("step-*"))
    assert len(checkpoints) == 2
    for path in checkpoints:
        found = evaluate(capsys, path, "--weights", weights, *cache(runs))
        (row,) = (
            row
            for row in run.evaluations()
            if row["optimizer_step"] == int(path.name.split("-")[1])
        )
        expected = {name: row[group + name] for name in ("loss", "accuracy", "top5_accuracy")}
        assert numbers(found["metrics"]) == expected
        assert found["weights"] == f"{weights} of {path.name}"


def test_classes_are_matched_by_name_in_any_order_and_number(
    photo_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--cache-dir", tmp_path / "cache")
    photos = photo_run.parent / "photos"
    shutil.copytree(photos / "cow", tmp_path / "two" / "cow")
    shutil.copytree(photos / "ant", tmp_path / "two" / "ant")
    whole = evaluate(capsys, photo_run, "--dataset", photos, "--split", "train", *flags)
    assert whole["num_samples"] == 45
    two = evaluate(capsys, photo_run, "--dataset", tmp_path / "two", *flags)
    assert two["num_samples"] == 30
    assert [two["metrics"]["confusion_matrix"][at] for at in (0, 2)] == [
        whole["metrics"]["confusion_matrix"][at] for at in (0, 2)
    ]
    assert two["metrics"]["per_class_accuracy"][1] is None


def test_a_class_that_the_model_does_not_have_is_one_line(
    photo_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(photo_run.parent / "photos", tmp_path / "more")
    shutil.copytree(tmp_path / "more" / "ant", tmp_path / "more" / "yak")
    argv = [
        "evaluate",
        photo_run,
        "--dataset",
        tmp_path / "more",
        "--cache-dir",
        tmp_path / "cache",
    ]
    code, _, err = run_command(capsys, argv)
    assert (code, len(err.splitlines())) == (65, 1)
    assert "classes that the model does not have (yak): the model has ant, bee, cow" in err


@pytest.mark.parametrize(("fraction", "has_val"), [(0.0, False), (0.2, True)])
def test_a_run_whose_validation_split_is_gone_asks_for_a_split(
    fraction: float, has_val: bool, tmp_path: Path
) -> None:
    write_image_folder(tmp_path / "photos")
    if not has_val:
        shutil.rmtree(tmp_path / "photos/test")
    choice = DataChoice(
        dataset=str(tmp_path / "photos"),
        split=None,
        of_run={"val_fraction": fraction},
        cache_dir=tmp_path / "cache",
    )
    with pytest.raises(DataError, match="--split") as caught:
        _load_photos(choice)
    assert caught.value.code == "DATA_SPLIT"
    assert "--val-fraction" not in str(caught.value)


def test_an_export_without_its_run_needs_the_data(
    photo_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jinja2")
    export(read_run(photo_run), tmp_path / "model")
    code, _, err = run_command(capsys, ["evaluate", tmp_path / "model"])
    assert code == 64
    assert "set --dataset" in err
    photos = photo_run.parent / "photos"
    argv = ["evaluate", tmp_path / "model", "--dataset", photos, "--cache-dir", tmp_path / "cache"]
    code, out, _ = run_command(capsys, argv)
    assert code == 0
    assert "(train, 45 images)" in out
    assert len(out.splitlines()) == 1 + 3 + 4


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_weights_that_have_changed_since_their_export_are_not_used(
    photo_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    shutil.copytree(photo_run / "export", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    photos = photo_run.parent / "photos"
    data_of = {"evaluate": ["--dataset", photos, "--cache-dir", tmp_path], "predict": [photos]}
    code, _, err = run_command(capsys, [command, tmp_path / "model", *data_of[command]])
    assert (code, err.count("\n")) == (74, 1)
    assert "its SHA-256 is not the one in config.json): export the run again" in err


def test_images_of_another_size_without_a_transform_are_one_line(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parquet_folder(tmp_path / "small")
    argv = [
        "evaluate",
        runs / "fast",
        "--dataset",
        tmp_path / "small",
        "--cache-dir",
        tmp_path / "cache",
    ]
    code, _, err = run_command(capsys, argv)
    assert code == 65
    assert "(3, 8, 8), the model was trained on (1, 16, 16)" in err


def test_of_a_thousand_classes_the_worst_and_the_best_are_shown() -> None:
    counts = [[0] * 1000 for _ in range(1000)]
    for label in range(1, 1000):
        counts[label][label], counts[label][0] = label, 1000 - label
    accuracies = [None, *(label / 1000 for label in range(1, 1000))]
    metrics = {"confusion_matrix": counts, "per_class_accuracy": accuracies}
    rows = _class_rows(metrics, [f"class {label}" for label in range(1000)])
    assert len(rows) == 21
    assert rows[0] == ["class 1", "1,000", "0.1%"]
    assert rows[10][0] == "(979 more classes)"
    assert rows[-1] == ["class 999", "1,000", "99.9%"]


def test_a_number_of_threads_below_zero_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["evaluate", "runs/x"], ["predict", "runs/x", "a.jpg"], ["data", "photos"]):
        code, _, err = run_command(capsys, [*command, "--num-workers", "-1"])
        assert code == 64
        assert "--num-workers: it is -1" in err


# --- predict and verify, with the transform that is stored with the model ---


def test_a_folder_is_predicted_in_order_and_batches_as_the_run_evaluates(
    photo_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = photo_run.parent / "photos"
    argv = ["predict", photo_run, photos, "--jsonl", "--top", "3"]
    code, out, _ = run_command(capsys, [*argv, "--batch-size", "7"])
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["path"] for row in rows] == [str(path) for path in sorted(photos.rglob("*.jpg"))]
    names = ["ant", "bee", "cow"]
    counts = [[0] * 3 for _ in names]
    for row in rows:
        assert sum(each["probability"] for each in row["predictions"]) == pytest.approx(1, abs=1e-5)
        counts[names.index(Path(row["path"]).parent.name)][
            names.index(row["predictions"][0]["label"])
        ] += 1
    found = evaluate(
        capsys,
        photo_run,
        "--dataset",
        photos,
        "--split",
        "train",
        "--cache-dir",
        tmp_path / "cache",
    )
    assert counts == found["metrics"]["confusion_matrix"]


def test_an_unreadable_image_is_reported_and_the_others_are_predicted(
    photo_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(photo_run.parent / "photos" / "ant", tmp_path / "ant")
    (tmp_path / "ant" / "03.jpg").write_bytes(b"no picture")
    code, out, err = run_command(capsys, ["predict", photo_run, tmp_path / "ant"])
    assert code == 65
    assert len(out.splitlines()) == 14
    assert (len(err.splitlines()), "03.jpg" in err) == (1, True)
    code, out, _ = run_command(capsys, ["predict", photo_run, tmp_path / "ant", "--jsonl"])
    rows = [json.loads(line) for line in out.splitlines()]
    assert [index for index, row in enumerate(rows) if "error" in row] == [3]
    code, _, err = run_command(
        capsys, ["predict", photo_run, tmp_path / "ant", tmp_path / "nothing.jpg"]
    )
    assert code == 65
    assert "nothing.jpg" in err


def test_a_folder_without_images_is_one_line(
    photo_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    code, _, err = run_command(capsys, ["predict", photo_run, tmp_path / "empty"])
    assert code == 65
    assert "contains no images" in err


@pytest.mark.usefixtures("python_is_forked")
def test_an_export_of_photos_gives_its_numbers_without_this_package(
    photo_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jinja2")
    export(read_run(photo_run), tmp_path / "model")
    flags = ["--dataset", photo_run.parent / "photos", "--cache-dir", tmp_path / "cache"]
    for argv in (["verify", photo_run, *flags[2:]], ["verify", tmp_path / "model", *flags]):
        code, out, err = run_command(capsys, argv)
        assert code == 0, out + err
        assert {line.split()[0] for line in out.splitlines()} >= {"accuracy", "loss"}


def test_the_transform_stands_beside_the_model_as_numbers(photo_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    export(read_run(photo_run), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    transform = config["eval_transform"]
    assert (transform["size"], transform["crop_ratio"], transform["interpolation"]) == (
        24,
        0.875,
        "bilinear",
    )
    assert transform["mean"] == config["normalization"]["mean"]
    assert transform["std"] == config["normalization"]["std"]
