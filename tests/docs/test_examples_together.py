"""The documented trainers, tasks and callbacks also work together, in one program."""

from __future__ import annotations

import ast
import itertools
import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from accel_trainer import (
    BatchConfig,
    Callback,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
    RuntimeConfig,
    Trainer,
    TrainerConfig,
    build_trainer,
    start_run,
)
from accel_trainer.core.digest import digest_of

from .. import processes
from .pages import ROOT, blocks_of

PAGES = ("step.md", "callbacks.md", "batches.md", "replay.md")
TASKS = ("MyRegressionTask", "AnnealedTask", "CentredTask")
# It needs classes.
ALONE = {"StopAtAccuracy"}


def documented_classes() -> dict[str, type]:
    """Return the classes on the pages by name; those that are shown twice by page, too."""
    found: dict[str, type] = {}
    for page in PAGES:
        module = types.ModuleType(f"__docs_{page.removesuffix('.md')}__")
        sys.modules[module.__name__] = module
        exec("import time, torch\nfrom torch import nn\nfrom accel_trainer import *", vars(module))
        for block in blocks_of(ROOT / "docs" / page):
            if block.language != "python":
                continue
            body = [
                each
                for each in ast.parse(block.text).body
                if isinstance(each, ast.ClassDef | ast.Import | ast.ImportFrom)
            ]
            exec(compile(ast.Module(body, []), str(block), "exec"), vars(module))
        for name, each in vars(module).items():
            if isinstance(each, type) and each.__module__ == module.__name__:
                found[name if name not in found else f"{name} of {page}"] = each
    return found


CLASSES = documented_classes()
TRAINERS = {"Trainer": Trainer} | {
    name: each for name, each in CLASSES.items() if issubclass(each, Trainer)
}


def callbacks_of(model: nn.Module, teacher: nn.Module, centre: object) -> list[Callback]:
    """Return one of each documented callback."""
    arguments: Mapping[str, tuple[Any, ...]] = {
        "Watch": (model,),
        "MoveCentre": (centre,),
        "MoveTeacher": (teacher,),
        "SaveEvery": (1,),
    }
    return [
        each(*arguments.get(name, ()))
        for name, each in CLASSES.items()
        if issubclass(each, Callback) and name not in ALONE
    ]


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(3, 1))


def train_all(folder: Path) -> None:
    """Train each documented trainer with each task and all callbacks, and write digests."""
    inputs = torch.randn(64, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sum((1, 2, 3)))
    train_set, eval_set = Subset(data, range(44)), Subset(data, range(44, 64))
    digests = {}
    for trainer, task in itertools.product(TRAINERS, TASKS):
        model, teacher, centre = make_net(), make_net(), CLASSES["Centre"]()
        config = RecipeConfig(
            batch=BatchConfig(global_batch_size=16, per_device_batch_size=4, reduce="exact"),
            trainer=TrainerConfig(num_epochs=2),
            optimizer=OptimizerConfig(name="sgd", learning_rate=0.01),
            runtime=RuntimeConfig(num_threads=1),
            run=RunConfig(output_dir=folder / f"{trainer}-{task}", quiet=True),
        )
        with start_run(config, recipe="together") as run:
            result = build_trainer(
                run,
                model=model,
                task=CLASSES[task](*[centre] * (task == "CentredTask")),
                train_set=train_set,
                eval_sets=eval_set,
                callbacks=callbacks_of(model, teacher, centre),
                states={"centre": centre, "teacher": teacher},
                trainer_class=TRAINERS[trainer],
            ).fit()
        held = [model.state_dict(), teacher.state_dict(), centre.value]
        logged = [
            {name: each for name, each in row.items() if name.startswith(("train/", "log/"))}
            for row in result.history
        ]
        digests[f"{trainer} {task}"] = [digest_of(held), float(centre.value), logged]
    if run.accelerator.is_main_process:
        (folder / "digests.json").write_text(json.dumps(digests, default=str))


def test_documented_parts_together_train_the_same_on_1_and_2_processes(
    tmp_path: Path,
) -> None:
    pytest.importorskip("PIL")
    found = []
    for num_processes in (1, 2):
        folder = tmp_path / str(num_processes)
        processes.run(train_all, folder, num_processes=num_processes, folder=folder)
        found.append(json.loads((folder / "digests.json").read_text()))
    one, two = found
    assert len(one) == len(TRAINERS) * len(TASKS) >= 9
    assert {name: each for name, each in one.items() if two[name] != each} == {}
    # An observer's sum over a step is that of one forward, whichever trainer steps.
    for task in TASKS:
        assert one[f"SamTrainer {task}"][1] == pytest.approx(one[f"Trainer {task}"][1], rel=0.3)
