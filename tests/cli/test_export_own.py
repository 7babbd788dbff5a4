"""`--onnx`, and `export`, `verify` and `predict` of models whose class is only in their recipe."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file

from tests.cli.conftest import run_command

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

RECIPE = """
import sys
import torch
from torch import nn
from accel_trainer import (
    ClassificationTask, DatasetOptions, MeanLoss, RecipeConfig, StepOutput, TopKAccuracy,
    build_trainer, main, start_run,
)


class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
        self.head = nn.Linear(16, 3)

    def forward(self, images):
        return self.head(self.body(images))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 4), nn.Linear(4, 3)

    def forward(self, tokens, mask):
        if FORKS and tokens.float().mean() > 100:  # what it computes depends on the data
            tokens = tokens[:, :2]
        embedded = self.embedding(tokens)[:, : mask.shape[1]] * mask[..., None]
        return {"logits": self.head(embedded.sum(1)), "embedded": embedded}


class DictTask:
    def step(self, model, batch):
        logits = model(tokens=batch.inputs["tokens"], mask=batch.inputs["mask"])["logits"]
        losses = nn.functional.cross_entropy(logits, batch.targets, reduction="none")
        return StepOutput(losses, logits)


class Texts:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        length = 3 + index % 2
        tokens = torch.arange(length) + index % 9
        return {"tokens": tokens, "mask": torch.ones(length), "labels": index % 3}


class Images(Texts):
    def __getitem__(self, index):
        return torch.full((1, 4, 4), index / 40), index % 3


def collate(samples):
    parts = {name: [sample[name] for sample in samples] for name in ("tokens", "mask")}
    pad = nn.utils.rnn.pad_sequence
    padded = {name: pad(values, batch_first=True) for name, values in parts.items()}
    return padded, torch.tensor([sample["labels"] for sample in samples])


def train(config):
    with start_run(config, recipe="own") as run:
        options = DatasetOptions() if KIND == "pixels" else DatasetOptions(collate=collate)
        data = Images() if KIND == "pixels" else Texts()
        described = {
            "class_names": ["ant", "bee", "cow"], "in_channels": 1, "image_size": [4, 4],
            "normalization": {"mean": [0.0], "std": [1.0]},
        }
        return build_trainer(
            run, model=Pixels() if KIND == "pixels" else Words(),
            task=ClassificationTask() if KIND == "pixels" else DictTask(),
            train_set=data, eval_sets=torch.utils.data.Subset(data, range(30)), options=options,
            metrics=[MeanLoss(), TopKAccuracy()],
            export_config=described if KIND == "pixels" else None,
        ).fit()


if __name__ == "__main__":
    KIND = sys.argv.pop(1)
    FORKS = KIND == "forking words"
    try:
        main(train, RecipeConfig, description="")
    finally:
        print("loaded:", sorted({"onnx", "onnxscript", "onnxruntime"} & sys.modules.keys()))
"""


def train(
    folder: Path, kind: str, *flags: str, python: str | Path
) -> subprocess.CompletedProcess[str]:
    """Run the recipe, which nobody else can import, in a process of `python`; the run is
    `folder`/run."""
    folder.mkdir(exist_ok=True)
    recipe = folder / "only_here.py"
    recipe.write_text(RECIPE)
    command = [
        str(python),
        str(recipe),
        kind,
        "--output-dir",
        str(folder / "run"),
        "--epochs",
        "1",
        *flags,
    ]
    command += ["--runtime.num-threads", "1", "--batch-size", "8"]
    place = str(Path(__file__).parents[2])
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": place}
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def pixels(tmp_path_factory: pytest.TempPathFactory, one_that_forks: Path) -> Path:
    folder = tmp_path_factory.mktemp("pixels")
    done = train(folder, "pixels", "--onnx", python=one_that_forks)
    assert done.returncode == 0, done.stderr
    assert not re.search("WARNING|W[0-9]{4}", done.stderr), done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory, one_that_forks: Path) -> Path:
    folder = tmp_path_factory.mktemp("words")
    done = train(folder, "words", "--onnx", python=one_that_forks)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def session_of(run: Path) -> Any:
    return onnxruntime.InferenceSession(run / "export" / "model.onnx")


@pytest.mark.usefixtures("python_is_forked")
def test_a_users_own_model_is_verified_without_its_class(
    pixels: Path, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    for run in (pixels, words):
        assert (
            run_command(capsys, ["export", run, "--to", tmp_path / run.parent.name, "--onnx"])[0]
            == 0
        )
        for place in (run, tmp_path / run.parent.name):
            code, text, _ = run_command(capsys, ["verify", place])
            assert code == 0, text
            assert all(line.endswith("  ok") for line in text.splitlines())
            names = [line.split()[0] for line in text.splitlines()]
            assert names[:3] == ["model.safetensors", "model.onnx", "example.safetensors"]
            assert len(names) == (4 if run is pixels else 5), "and each output"


def test_the_onnx_has_the_exported_weights_and_takes_batches_of_any_size(pixels: Path) -> None:
    weights = {
        name: torch.from_numpy(value)
        for name, value in load_file(pixels / "export/model.safetensors").items()
    }
    images = torch.rand(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    body = torch.nn.functional.conv2d(images, weights["body.0.weight"], weights["body.0.bias"])
    norm = [weights[f"body.1.{name}"] for name in ("running_mean", "running_var", "weight", "bias")]
    body = torch.nn.functional.batch_norm(body, *norm)
    expected = torch.nn.functional.linear(
        body.flatten(1), weights["head.weight"], weights["head.bias"]
    )
    for size in (1, 5):
        inputs = {"normalized_images": images[:size].numpy()}
        (logits,) = session_of(pixels).run(None, inputs)
        torch.testing.assert_close(torch.from_numpy(logits), expected[:size], rtol=1e-5, atol=1e-5)


def test_dict_inputs_keep_their_names_and_may_be_longer_than_the_example(words: Path) -> None:
    session = session_of(words)
    assert [value.name for value in session.get_inputs()] == ["tokens", "mask"]
    inputs = {"tokens": np.ones((3, 11), np.int64), "mask": np.ones((3, 11), np.float32)}
    logits, embedded = session.run(None, inputs)
    assert (logits.shape, embedded.shape) == ((3, 3), (3, 11, 4))


def test_predict_runs_images_through_the_onnx(
    pixels: Path, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.fromarray(np.full((9, 9), 255, np.uint8)).save(tmp_path / "white.png")
    code, picture, _ = run_command(capsys, ["predict", pixels, tmp_path / "white.png", "--jsonl"])
    white = {"normalized_images": np.ones((1, 1, 4, 4), np.float32)}
    logits = session_of(pixels).run(None, white)[0]
    expected = json.loads(picture)["predictions"]
    assert (code, expected[0]["label"]) == (0, ("ant", "bee", "cow")[int(logits.argmax())])
    code, out, err = run_command(capsys, ["predict", words, tmp_path / "white.png"])
    assert (code, out, err.count("\n")) == (64, "", 1), err
    assert "into its input" in err


def test_a_changed_onnx_is_neither_verified_nor_run(
    pixels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(pixels, tmp_path / "run")
    with (run / "export" / "model.onnx").open("ab") as file:
        file.write(b"!")
    for command in (["verify", run], ["predict", run, tmp_path / "a.png"]):
        code, _, err = run_command(capsys, command)
        assert code == 74
        assert "model.onnx was changed" in err


@pytest.mark.usefixtures("python_is_forked")
def test_an_onnx_of_other_weights_differs(
    pixels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(pixels, tmp_path / "run")
    example = load_file(run / "export" / "example.safetensors")
    save_file(
        {name: value + 0.01 * (name == "logits") for name, value in example.items()},
        run / "export" / "example.safetensors",
    )
    code, out, _ = run_command(capsys, ["verify", run])
    assert code == 1
    assert re.search(r"^example.safetensors .* CHANGED$", out, re.MULTILINE)
    assert re.search(r"^logits .* DIFFERS$", out, re.MULTILINE)
    config = json.loads((run / "export" / "config.json").read_text())
    config["example_sha256"] = hashlib.sha256(
        (run / "export" / "example.safetensors").read_bytes()
    ).hexdigest()
    (run / "export" / "config.json").write_text(json.dumps(config))
    code, out, _ = run_command(capsys, ["verify", run])
    assert (code, "CHANGED" in out) == (1, False), "also with their own hash"


def test_a_model_that_cannot_be_converted_is_one_line_and_the_run_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one_that_forks: Path
) -> None:
    done = train(tmp_path, "forking words", "--onnx", python=one_that_forks)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("WARNING"))
    assert "model.onnx: torch cannot convert the model (" in line
    run = tmp_path / "run"
    assert json.loads((run / "result.json").read_text())["state"] == "done"
    assert sorted(path.name for path in (run / "export").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    for command in (
        ["predict", run, "a.png"],
        ["verify", run],
        ["export", run, "--to", tmp_path / "to", "--onnx"],
    ):
        code, _, err = run_command(capsys, command)
        assert code == 74
        assert "again with --onnx" in err


@pytest.mark.slow
def test_a_finished_run_exports_later_and_loads_onnx_only_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = train(tmp_path, "pixels", python=sys.executable)
    assert done.returncode == 0, done.stderr
    assert "loaded: []" in done.stdout
    weights = (tmp_path / "run" / "export" / "model.safetensors").read_bytes()
    assert run_command(capsys, ["export", tmp_path / "run", "--to", tmp_path / "to"])[0] == 0
    assert "import onnxruntime" not in (tmp_path / "to" / "README.md").read_text()
    again = train(tmp_path, "pixels", "--onnx", python=sys.executable)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "run" / "export" / "model.safetensors").read_bytes() == weights
    assert run_command(capsys, ["verify", tmp_path / "run"])[0] == 0


def test_the_code_in_the_card_of_a_users_own_model_runs(
    words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    run_command(capsys, ["export", words, "--to", tmp_path / "to"])
    card = (tmp_path / "to" / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert code is not None
    script = "import sys; sys.modules['accel_trainer'] = None\n" + code[1]
    done = subprocess.run(
        [sys.executable, "-I", "-c", script],
        cwd=tmp_path / "to",
        capture_output=True,
        text=True,
        check=True,
    )
    differences = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(differences) == 2
    assert max(differences) < 1e-5
