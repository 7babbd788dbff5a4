"""Two real runs on digits that differ in one flag, shared by the tests of the commands."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import datasets
import pytest
import torch

from accel_trainer import main
from recipes import cifar, images
from tests.digits import ON_DIGITS
from tests.vision.make_photos import write_photos


def train(runs: Path, name: str, *extra: str) -> Path:
    """Train a small group-norm net on digits for two epochs and return the run folder."""
    flags = [*ON_DIGITS, "--model.norm", "group", "--model.width", "8"]
    flags += ["--epochs", "2", "--ema", "0.8", "--batch-size", "64"]
    flags += [
        "--trainer.log-every-n-steps",
        "10",
        "--trainer.max-grad-norm",
        "5",
        "--runtime.num-threads",
        "1",
    ]
    places = ["--cache-dir", str(runs.parent / "cache"), "--output-dir", str(runs / name)]
    with pytest.raises(SystemExit) as ended:
        main(cifar.train, cifar.Config, description="", argv=[*flags, *places, *extra])
    assert ended.value.code == 0
    return runs / name


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs `fast` and `slow`, which has a lower learning rate."""
    pytest.importorskip("sklearn")
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tools") / "runs"
    folder.mkdir()
    train(folder, "fast", "--lr", "0.1")
    train(folder, "slow", "--lr", "0.01")
    return folder


@pytest.fixture(scope="session")
def exported(runs: Path) -> Path:
    """An export of the run `fast`."""
    from accel_trainer.cli.main import main as door

    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    assert door(["export", str(runs / "fast"), "--to", str(runs.parent / "exported")]) == 0
    return runs.parent / "exported"


@pytest.fixture
def model(exported: Path, tmp_path: Path) -> Path:
    """A copy of it, to change."""
    return shutil.copytree(exported, tmp_path / "model")


@pytest.fixture
def quiet_datasets() -> Iterator[None]:
    """No progress bars of `datasets`."""
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture(scope="session")
def photo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on 45 photos of 3 classes, of which it sets some aside; the photos are in
    `../photos`."""
    folder = tmp_path_factory.mktemp("photos")
    for number, name in enumerate(("ant", "bee", "cow")):
        size = (60 + 9 * number, 50)
        write_photos(
            folder / "photos" / name, [f"{index:02}.jpg" for index in range(15)], size=size
        )
    flags = [
        "--dataset",
        str(folder / "photos"),
        "--val-fraction",
        "0.4",
        "--image-size",
        "24",
        "--model",
        "resnet8",
    ]
    flags += [
        "--model.width",
        "4",
        "--epochs",
        "2",
        "--batch-size",
        "8",
        "--ema",
        "0.8",
        "--runtime.num-threads",
        "1",
    ]
    flags += ["--cache-dir", str(folder / "cache"), "--output-dir", str(folder / "run"), "--quiet"]
    with pytest.raises(SystemExit) as ended:
        main(images.train, images.Config, description="", argv=flags)
    assert ended.value.code == 0
    return folder / "run"


def run_command(capsys: pytest.CaptureFixture[str], argv: Sequence[object]) -> tuple[int, str, str]:
    """Return the exit code of `accel-trainer` and what it printed."""
    from accel_trainer.cli.main import main as door

    capsys.readouterr()
    code = door([str(word) for word in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err
