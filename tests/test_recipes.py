"""The recipes as people start them, and every mistake they make.

Launchers: tests/distributed/test_launchers.py.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from accel_trainer import (
    ExitCode,
    RecipeConfig,
    RunConfig,
    TrainerConfig,
    build_optimizer,
    load_config,
    main,
)
from accel_trainer.vision import build_model
from recipes import cifar

from .test_architecture import count_tokens

ROOT = Path(__file__).parents[1]


def arguments(folder: Path, *extra: str) -> list[str]:
    small = ["--dataset", "digits", "--model", "resnet8", "--model.norm", "group", "--epochs", "1"]
    small += ["--augment.crop-padding", "1"]
    pinned = [
        "--runtime.num-threads",
        "1",
        "--cache-dir",
        str(folder / "cache"),
        "--output-dir",
        str(folder / "run"),
    ]
    return [*small, *pinned, *extra]


@pytest.mark.usefixtures("python_is_forked")
def test_the_marked_lines_are_all_that_other_data_needs(
    tmp_path: Path,
) -> None:
    source = (ROOT / "recipes" / "minimal.py").read_text()
    marked = [line for line in source.splitlines() if "# yours" in line]
    assert len(marked) == 3
    for data, inputs, classes in (("iris", 4, 3), ("wine", 13, 3)):
        changed = source.replace("load_breast_cancer", f"load_{data}")
        changed = changed.replace("(30, 64)", f"({inputs}, 64)").replace(
            "(64, 2)", f"(64, {classes})"
        )
        lines = zip(source.splitlines(), changed.splitlines(), strict=True)
        assert {before for before, after in lines if before != after} <= {*marked}
        names: dict[str, Any] = {"__name__": data}
        exec(changed, names)
        run = RunConfig(output_dir=tmp_path / data, quiet=True)
        result = names["train"](RecipeConfig(trainer=TrainerConfig(num_epochs=10), run=run))
        assert result.metrics["eval/accuracy"] > 0.8, data


def test_the_minimal_recipe_is_short_and_learns(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    source = (ROOT / "recipes" / "minimal.py").read_text()
    assert count_tokens(source) <= 220
    command = [sys.executable, "recipes/minimal.py", "--epochs", "3", "--output-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert json.loads((tmp_path / "result.json").read_text())["metrics"]["eval/accuracy"] > 0.9


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes" / "configs").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_config_is_one_that_the_recipe_takes(path: Path) -> None:
    config = load_config(cifar.Config, path.read_text(), source=str(path))
    with torch.device("meta"):
        model = build_model(config.model, in_channels=3, num_classes=10)
    build_optimizer(model, config.optimizer)
    assert f"--config recipes/configs/{path.name}" in path.read_text(), (
        "the command stands at the top"
    )


def images(folder: Path, labels: list[int], *, broken: int | None = None) -> Path:
    """A folder of parquet with 4x4 noise for training; its test split is fine."""

    def column(labels: list[int]) -> pa.Table:
        encoded = []
        for index, _ in enumerate(labels):
            data = io.BytesIO()
            noise = np.random.default_rng(index).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(noise).save(data, "png")
            encoded.append(
                {"bytes": data.getvalue()[: 40 if index == broken else None], "path": None}
            )
        image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        return pa.table({"img": pa.array(encoded, image), "label": pa.array(labels, pa.int64())})

    folder.mkdir(parents=True)
    pq.write_table(column(labels), folder / "train.parquet")
    pq.write_table(column([0, 1, 2]), folder / "test.parquet")
    return folder


def test_bad_data_is_named_before_any_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out_of_range = images(tmp_path / "labels", [0, 1, 2, -1])
    expect_refusal(tmp_path, capsys, ["--dataset", str(out_of_range)], ExitCode.DATA, "row 3 of")
    corrupt = images(tmp_path / "corrupt", [0, 1, 2, 0], broken=2)
    expect_refusal(tmp_path, capsys, ["--dataset", str(corrupt)], ExitCode.DATA, "row 2 of")
    empty = images(tmp_path / "empty", [])
    expect_refusal(
        tmp_path, capsys, ["--dataset", str(empty)], ExitCode.DATA, "the train split has no images"
    )


def expect_refusal(
    folder: Path, capsys: pytest.CaptureFixture[str], flags: list[str], code: ExitCode, message: str
) -> None:
    with pytest.raises(SystemExit) as error:
        main(cifar.train, cifar.Config, description="", argv=arguments(folder, *flags))
    captured = capsys.readouterr()
    assert error.value.code == code
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("accel_trainer: error[")
    assert message in captured.err
    assert "step" not in captured.out
    assert not (folder / "run").exists(), "a run that never began leaves no folder"


def test_debug_shows_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--dataset", "nowhere", "--debug"]
    with pytest.raises(SystemExit):
        main(cifar.train, cifar.Config, description="", argv=arguments(tmp_path, *flags))
    assert "Traceback" in capsys.readouterr().err


def test_the_real_cifar_trains_if_it_is_here(tmp_path: Path) -> None:
    source = os.environ.get("ACCEL_TRAINER_CIFAR10")
    if source is None:
        pytest.skip("set ACCEL_TRAINER_CIFAR10 to a folder with CIFAR-10 as parquet")
    flags = ["--dataset", source, "--model", "resnet8", "--max-steps", "20"]
    with pytest.raises(SystemExit) as error:
        main(cifar.train, cifar.Config, description="", argv=arguments(tmp_path, *flags))
    assert error.value.code == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["num_eval_samples"] == 10_000
    shutil.rmtree(tmp_path)
