"""`recipes/images.py` as people start it, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from accel_trainer import ExitCode, main
from accel_trainer.checkpoint.format import FROZEN_FILE, list_checkpoints
from accel_trainer.vision import ModelConfig, build_model
from recipes import images
from tests import processes
from tests.test_architecture import count_tokens
from tests.training.test_exactness import final_files, history, largest_difference

from .make_photos import write_classes

EVERYTHING = ["--augment.mixup", "0.2", "--augment.cutmix", "1", "--augment.erase", "0.5"]
EVERYTHING += [
    "--augment.policy",
    "trivialaugment",
    "--augment.color-jitter",
    "0.2",
    "0.2",
    "0.2",
    "0.1",
]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classes(tmp_path_factory.mktemp("photos"), ["ant", "bee", "cow"], per_class=16)


def flags(photos: Path, folder: Path, *extra: str) -> list[str]:
    return [
        *("--dataset", str(photos), "--val-fraction", "0.25", "--image-size", "16", "--seed", "1"),
        *(
            "--model",
            "resnet8",
            "--model.norm",
            "group",
            "--epochs",
            "2",
            "--batch-size",
            "8",
            "--ema",
            "0.9",
        ),
        *(
            "--output-dir",
            str(folder),
            "--cache-dir",
            str(photos.parent / "cache"),
            "--runtime.num-threads",
            "1",
        ),
        *("--checkpoint.every-n-steps", "1", *extra),
    ]


def run(photos: Path, folder: Path, *extra: str) -> None:
    with pytest.raises(SystemExit) as error:
        main(images.train, images.Config, description="", argv=flags(photos, folder, *extra))
    assert error.value.code == 0


def test_it_is_short() -> None:
    assert count_tokens(Path(images.__file__).read_text()) <= 400


def test_it_trains_evaluates_and_exports(photos: Path, tmp_path: Path) -> None:
    run(photos, tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert 0 < result["num_eval_samples"] < 30
    assert "eval/top5_accuracy" not in result["metrics"], "of 3 classes it is always 1"
    exported = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert exported["class_names"] == ["ant", "bee", "cow"]
    assert exported["image_size"] == [16, 16]
    assert exported["eval_transform"] == {
        "size": 16,
        "crop_ratio": 0.875,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "interpolation": "bilinear",
    }


def test_a_run_stopped_anywhere_in_an_epoch_continues_bit_for_bit(
    photos: Path, tmp_path: Path
) -> None:
    processes.run(stop_everywhere, photos, tmp_path, folder=tmp_path / "logs")


def stop_everywhere(photos: Path, folder: Path) -> None:
    run(photos, folder / "whole", *EVERYTHING)
    for workers, end in ((0, 1), (2, 3), (0, 7), (2, 100)):
        flags = [*EVERYTHING, "--batch.num-workers", str(workers), "--max-steps", str(end)]
        run(photos, folder / "stopped", *flags)
    assert final_files(folder / "stopped") == final_files(folder / "whole")


def test_two_processes_train_the_same_model_as_one(photos: Path, tmp_path: Path) -> None:
    split = ["--global-batch-size", "8", "--lr", "0.001", "--batch.num-workers", "2"]
    for number in (1, 2):
        arguments = (photos, tmp_path / str(number), *split)
        processes.run(
            run_in_float64, *arguments, num_processes=number, folder=tmp_path / f"logs-{number}"
        )
    # The pixels are the same bit for bit (test_photo_reader.py); sums over them are rounded in
    # another order.
    assert largest_difference(tmp_path / "1", tmp_path / "2") <= 1e-9
    for mine, theirs in zip(history(tmp_path / "1"), history(tmp_path / "2"), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-9)


def run_in_float64(photos: Path, folder: Path, *extra: str) -> None:
    """With a model whose rounding stays small over the steps."""
    build = images.build_model

    def build_in_float64(*arguments: Any, **options: Any) -> nn.Module:
        model = build(*arguments, **options).double()
        model.register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
        return model

    images.build_model = build_in_float64
    run(photos, folder, *extra)


@pytest.mark.slow
def test_lost_frozen_weights_are_those_of_timm_again(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume downloads nothing, unless nothing else has the weights."""
    config = ModelConfig(name="resnet18", stem="imagenet")
    net = build_model(config, in_channels=3, num_classes=1000)
    net.pretrained_cfg = {"classifier": "fc", "hf_hub_id": "a hub"}  # type: ignore[assignment]
    created: list[str] = []

    def create_model(name: str, **options: object) -> nn.Module:
        created.append(name)
        return net

    hub = SimpleNamespace(create_model=create_model)
    monkeypatch.setattr("accel_trainer.vision.models.timm_nets._import_timm", lambda *what: hub)
    frozen = ["--model", "resnet18", "--pretrained", "--freeze", "^(conv|bn|layer)"]
    options = [*frozen, "--model.norm", "batch", "--max-steps"]
    run(photos, tmp_path / "run", *options, "1")
    run(photos, tmp_path / "run", *options, "2")
    assert len(created) == 1
    for checkpoint in list_checkpoints(tmp_path / "run" / "checkpoints"):
        (checkpoint / FROZEN_FILE).unlink()
    run(photos, tmp_path / "run", *options, "3")
    assert len(created) == 2


@pytest.mark.slow
def test_it_trains_on_an_accelerator_as_on_the_cpu(photos: Path, tmp_path: Path) -> None:
    """One that can only pretend: batches are pinned, copied on a stream of their own, and
    normalised there."""
    flags = [*EVERYTHING, "--model.norm", "batch"]  # a norm whose bits there are those of the CPU
    run_there = (photos, tmp_path / "there", *flags, "--batch.num-workers", "2")
    processes.run_on("pretend", run, *run_there, folder=tmp_path / "logs")
    run(photos, tmp_path / "here", *flags)
    assert final_files(tmp_path / "here") == final_files(tmp_path / "there")


@pytest.mark.parametrize(
    ("extra", "code", "message"),
    [
        (["--dataset", "nowhere"], ExitCode.DATA, "no folder nowhere: give the folder of your"),
        (["--val-fraction", "0"], ExitCode.DATA, "has no validation split: set one aside with"),
        (["--val-fraction", "2"], ExitCode.USAGE, "--val-fraction is 2.0: set it to at least 0"),
        (["--image-size", "0"], ExitCode.USAGE, "--image-size is 0: set it to 1 to 16384 pixels"),
        (["--image-column", "picture"], ExitCode.USAGE, "--image-column picture: "),
        (["--label-column", "kind"], ExitCode.USAGE, "--label-column kind: "),
        (["--augment.crop", "any"], ExitCode.USAGE, "--augment.crop"),
        (
            ["--augment.crop", "padded", "--augment.crop-padding", "16"],
            ExitCode.USAGE,
            "set it below 16",
        ),
        (["--batch-size", "100"], ExitCode.USAGE, "larger than the"),
    ],
)
def test_a_mistake_is_one_line_before_any_training(
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    extra: list[str],
    code: ExitCode,
    message: str,
) -> None:
    with pytest.raises(SystemExit) as error:
        main(
            images.train,
            images.Config,
            description="",
            argv=flags(photos, tmp_path / "run", *extra),
        )
    captured = capsys.readouterr()
    assert error.value.code == code
    lines = [line for line in captured.err.splitlines() if line.startswith("accel_trainer: error[")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "step" not in captured.out
    assert not (tmp_path / "run").exists()


def test_a_photo_found_broken_while_training_ends_the_run_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault (Data, config and users' code): a photo is truncated, missing, not an image, or a
    decompression bomb, in `recipes/images.py` -> all processes end with an error that names it
    as soon as they reach it. It cannot be left out in the middle of a run, because the order
    depends on the number of samples: remove it and start a new run
    """
    photos = write_classes(tmp_path / "photos", ["ant", "bee"], per_class=12)
    broken = photos / "bee" / "4.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(SystemExit) as error:
        main(images.train, images.Config, description="", argv=flags(photos, tmp_path / "run"))
    assert error.value.code == ExitCode.DATA
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert f"{broken} (row 18 of {photos}) cannot be decoded" in errors
