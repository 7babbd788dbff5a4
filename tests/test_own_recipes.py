"""Recipes for other things than pictures with one label: text, characters, pixels."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from accel_trainer import (
    BatchConfig,
    CheckpointConfig,
    ConfigError,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
    RuntimeConfig,
    TrainerConfig,
    load_config,
    read_history,
)
from accel_trainer.vision import ModelConfig, PhotoConfig, build_model, from_pretrained

from . import processes
from .test_architecture import count_tokens
from .variants import slow_but

ROOT = Path(__file__).parents[1]
NAMES = (
    "byol",
    "characters",
    "diffusion",
    "distill",
    "gan",
    "lora",
    "segmentation",
    "stream",
    "text",
    "vit",
)
IN_FLOAT64 = ("characters", "segmentation", "text")  # parts of the others compute in float32
NUM_STEPS = 4
ADAMW: dict[str, Any] = {"name": "adamw", "learning_rate": 0.002}


def recipe(name: str) -> ModuleType:
    needed = {
        "byol": ("sklearn",),
        "diffusion": ("sklearn", "PIL"),
        "distill": ("sklearn",),
        "gan": ("sklearn", "PIL"),
        "lora": ("transformers", "peft"),
        "segmentation": ("sklearn", "torchmetrics"),
        "stream": ("sklearn",),
        "text": ("transformers", "sklearn"),
        "vit": ("transformers", "datasets"),
    }
    for package in needed.get(name, ()):
        pytest.importorskip(package)
    return importlib.import_module(f"recipes.{name}")


def train(name: str, folder: Path, *stops: int, micro: int = 16, dtype: str = "float32") -> None:
    """Train four steps of 16 samples, with a stop after each of `stops`."""
    torch.set_default_dtype(getattr(torch, dtype))
    module = recipe(name)
    own = {}
    if name == "vit":
        own = {"dataset": str(make_photos(folder.parent / "photos"))}
    if name == "distill":
        own = {"teacher": str(make_teacher(folder.parent / "teacher.safetensors"))}
    length = {"num_steps": 2 * NUM_STEPS} if name == "stream" else {"num_epochs": 1}
    for max_steps in (*stops, NUM_STEPS):
        config = getattr(module, "Config", RecipeConfig)(
            **own,
            batch=BatchConfig(
                global_batch_size=16, per_device_batch_size=micro, eval_batch_size=100
            ),
            trainer=TrainerConfig(**length, max_steps=max_steps, log_every_n_steps=2),
            optimizer=OptimizerConfig(**({} if name == "gan" else ADAMW)),
            checkpoint=CheckpointConfig(every_n_steps=2),
            runtime=RuntimeConfig(num_threads=1, timeout_s=300),
            run=RunConfig(output_dir=folder),
        )
        module.train(config)


def make_photos(folder: Path) -> Path:
    """Make a folder of two classes of noise, for training and for validation, if there is none."""
    for number in range(0 if folder.exists() else 80):
        part, label = "train" if number < 70 else "val", f"class-{number % 2}"
        noise = np.random.default_rng(number).integers(0, 256, (40, 32, 3), dtype=np.uint8)
        path = folder / part / label / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise).save(path)
    return folder


def make_teacher(path: Path) -> Path:
    """Write random weights of a teacher, the same each time."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(name="resnet20"), in_channels=1, num_classes=10)
    save_file(model.state_dict(), path)
    return path


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "export" / "model.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_short(name: str) -> None:
    assert count_tokens((ROOT / "recipes" / f"{name}.py").read_text()) <= 770


@pytest.mark.parametrize("name", NAMES)
def test_the_flags_of_a_recipe_can_be_read(name: str) -> None:
    config_class = getattr(recipe(name), "Config", RecipeConfig)
    assert load_config(config_class, "seed: 3").seed == 3


def test_a_teacher_that_is_missing_is_named_before_the_run() -> None:
    distill = recipe("distill")
    with pytest.raises(ConfigError, match="--teacher nowhere"):
        distill.train(distill.Config(teacher="nowhere"))


@pytest.mark.usefixtures("python_is_forked")
def test_a_recipe_without_its_library_says_what_to_install() -> None:
    pytest.importorskip("sklearn")
    code = "import sys; sys.modules['transformers'] = None; import recipes.text"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "recipes/text.py needs transformers: pip install 'accel-trainer[hf]'\n"


@pytest.mark.parametrize("name", slow_but(["text", "byol"], NAMES))
def test_a_resumed_recipe_ends_with_the_same_bytes(tmp_path: Path, name: str) -> None:
    recipe(name)
    processes.run(train_whole_and_in_parts, name, tmp_path, folder=tmp_path / "logs")
    whole, parts = (weights(tmp_path / which) for which in ("whole", "parts"))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


def train_whole_and_in_parts(name: str, folder: Path) -> None:
    train(name, folder / "whole")
    train(name, folder / "parts", 3)


def test_drawing_what_a_gan_makes_leaves_its_running_means_alone() -> None:
    module = recipe("gan")
    model, drawn = module.Gan(), {}
    before = {name: each.clone() for name, each in model.named_buffers()}
    seen = SimpleNamespace(
        model=model,
        average_model=None,
        accelerator=SimpleNamespace(device=torch.device("cpu")),
        log=SimpleNamespace(picture=drawn.__setitem__),
    )
    module.Watch().on_epoch_end(seen)
    assert [*drawn] == ["made"]
    assert model.generator.training
    assert all(torch.equal(each, before[name]) for name, each in model.named_buffers())


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_FLOAT64)
def test_two_processes_train_the_same_model(tmp_path: Path, name: str) -> None:
    recipe(name)
    for num_processes in (1, 2):
        folder = tmp_path / str(num_processes)
        logs = tmp_path / f"logs-{num_processes}"
        processes.run(
            in_float64, name, folder, 16 // num_processes, num_processes=num_processes, folder=logs
        )
    one, two = (weights(tmp_path / str(num)) for num in (1, 2))
    assert max(float((one[key] - two[key]).abs().max()) for key in one) <= 1e-10
    results = [
        json.loads((tmp_path / str(num) / "result.json").read_text())["metrics"] for num in (1, 2)
    ]
    assert results[0]["eval/loss"] == pytest.approx(results[1]["eval/loss"], abs=1e-10)


def in_float64(name: str, folder: Path, micro: int) -> None:
    train(name, folder, micro=micro, dtype="float64")


def test_a_search_that_was_killed_continues_its_trial(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    pytest.importorskip("sklearn")
    module = importlib.import_module("recipes.search")
    killed = module.search(tmp_path, num_trials=0).ask()
    killed.suggest_float("rate", 1e-3, 1.0, log=True)
    killed.suggest_float("decay", 1e-6, 1e-2, log=True)
    study = module.search(tmp_path, num_trials=1)
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE"]
    assert study.trials[1].params == killed.params
    assert module.search(tmp_path, num_trials=1).trials == study.trials, "nothing is left"


def make_trunk(path: Path, *, without: str = "") -> Path:
    """Write the weights of a small net for other classes, perhaps without one of them."""
    model = build_model(ModelConfig(name="resnet8"), in_channels=3, num_classes=7)
    save_file({key: each for key, each in model.state_dict().items() if key != without}, path)
    return path


def train_on_features(folder: Path, *stops: int, trunk: Path | None) -> None:
    """Train the head of a small net, with a stop after each of `stops`."""
    module = importlib.import_module("recipes.features")
    for max_steps in (*stops, None):
        config = module.Config(
            dataset=str(make_photos(folder.parent / "photos")),
            photos=PhotoConfig(image_size=32),
            model=ModelConfig(name="resnet8"),
            trunk=trunk,
            batch=BatchConfig(per_device_batch_size=35),
            trainer=TrainerConfig(num_epochs=2, max_steps=max_steps),
            checkpoint=CheckpointConfig(every_n_steps=1),
            runtime=RuntimeConfig(num_threads=1),
            run=RunConfig(output_dir=folder, cache_dir=folder.parent / "cache", quiet=True),
        )
        module.train(config)


def test_a_head_is_not_trained_on_a_trunk_of_random_weights(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(ConfigError, match=r"random weights: add --pretrained or --trunk"):
        train_on_features(tmp_path / "none", trunk=None)
    trunk = make_trunk(tmp_path / "trunk.safetensors", without="layer3.0.bn2.bias")
    with pytest.raises(ConfigError, match=r"--trunk .* has no layer3"):
        train_on_features(tmp_path / "some", trunk=trunk)
    save_file({**load_file(trunk), "layer3.0.bn2.bias": torch.zeros(3)}, trunk)
    with pytest.raises(ConfigError, match="--trunk .* does not fit resnet8 .*layer3.0.bn2.bias"):
        train_on_features(tmp_path / "other", trunk=trunk)


def test_features_are_computed_once_and_the_whole_net_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    trunk = make_trunk(tmp_path / "trunk.safetensors")
    train_on_features(tmp_path / "whole", trunk=trunk)
    stored = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "features").iterdir()}
    assert len(stored) == 2
    train_on_features(tmp_path / "parts", 1, 3, trunk=trunk)
    assert {path: path.stat().st_mtime_ns for path in stored} == stored, "read by each start"
    whole, parts = (weights(tmp_path / which) for which in ("whole", "parts"))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    result = json.loads((tmp_path / "whole" / "result.json").read_text())
    step = int(result["best"]["name"].split("-")[1])
    (row,) = (
        row
        for row in read_history(tmp_path / "whole")
        if (row["event"], row["optimizer_step"]) == ("eval", step)
    )
    assert result["metrics"]["test/loss"] == pytest.approx(row["eval/loss"], rel=1e-5)
    net = from_pretrained(tmp_path / "whole")
    assert all(torch.equal(each, whole[key]) for key, each in net.state_dict().items())
