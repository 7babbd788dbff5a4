"""Runs with another order of their samples: exact on any hardware, and after any interruption."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from accel_trainer import (
    BatchConfig,
    CheckpointError,
    ConfigError,
    DatasetOptions,
    RecipeConfig,
    Trainer,
    UserError,
)
from accel_trainer.data.loader import build_train_loader
from accel_trainer.data.order import SampleOrder
from accel_trainer.distributed.accelerator import RuntimeConfig, start_accelerator
from tests import processes
from tests.evaluated import (
    Interruption,
    Points,
    differing,
    make_config,
    run_interrupted,
    run_whole,
    steps_of,
    train,
    train_set,
)

SIZE = 38
LEFT_OUT = (3, 17, 30)
KINDS = ("balanced", "weighted", "stored", "left out")


def weights(scale: float = 1.0) -> Tensor:
    return 1 + scale * torch.arange(SIZE) % 5


def unbalanced() -> Points:
    """Half of the points are of the first class."""
    points = train_set(SIZE)
    points.labels[: SIZE // 2] = 0
    return points


def parts_of(kind: str) -> dict[str, Any]:
    """Return the arguments of `build_trainer`; in processes, it is called in each."""
    options = DatasetOptions(weights=weights() if kind == "weighted" else None)
    return {"train_set": unbalanced(), "options": options}


def config_of(folder: Path, kind: str, **batch: Any) -> RecipeConfig:
    changes: dict[str, Any] = {"reduce": "exact"}
    if kind in ("balanced", "stored"):
        changes["order"] = kind
    if kind == "left out":
        folder.parent.mkdir(parents=True, exist_ok=True)
        listed = folder.with_name("left-out.txt")
        listed.write_text("\n".join(map(str, LEFT_OUT)))
        changes["leave_out"] = listed
    return make_config(folder, batch={**changes, **batch}, num_epochs=2)


def weights_left(run: Path) -> dict[str, Tensor]:
    return load_file(max((run / "checkpoints").glob("step-*")) / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    mine, theirs = weights_left(one), weights_left(other)
    return all(mine[name].equal(theirs[name]) for name in {*mine, *theirs})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a run of each kind on one process."""

    @cache
    def folder_of(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("whole") / "run"
        train(config_of(folder, kind), **parts_of(kind))
        return folder

    return folder_of


def test_each_order_trains_other_weights(whole: Any) -> None:
    folders = [whole(kind) for kind in KINDS]
    assert not any(same(one, other) for one in folders for other in folders if one != other)


@pytest.mark.parametrize("kind", KINDS)
def test_an_order_has_the_same_bits_on_one_and_two_processes(
    tmp_path: Path, whole: Any, kind: str
) -> None:
    run_whole(config_of(tmp_path / "two", kind), partial(parts_of, kind), num_processes=2)
    assert same(tmp_path / "two", whole(kind))


def train_with_workers(folder: Path, kind: str) -> None:
    train(config_of(folder, kind, num_workers=2), **parts_of(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_data_workers_read_an_order_to_the_same_bits(tmp_path: Path, whole: Any, kind: str) -> None:
    run = tmp_path / "run"
    processes.run(train_with_workers, run, kind, folder=tmp_path / "logs", has_workers=True)
    assert same(run, whole(kind))


# --- what a resume refuses ---


def relabelled() -> Points:
    points = unbalanced()
    points.labels[-1] = 1 - points.labels[-1]
    return points


def leave_at_7(trainer: Trainer) -> Any:
    """Train the first epoch, and 2 steps of the second."""
    with trainer.running() as reports:
        for report in reports:
            if report.optimizer_step == 7:
                break
    return trainer.result


@pytest.mark.parametrize("change", ["list", "weights", "labels"])
def test_a_changed_order_is_refused_in_a_resume_and_allowed_on_purpose(
    tmp_path: Path, change: str
) -> None:
    kind = {"list": "left out", "weights": "weighted", "labels": "balanced"}[change]
    folder = tmp_path / "run"
    config = config_of(folder, kind)
    parts = parts_of(kind)

    train(config, fit=leave_at_7, **parts)
    if change == "list":
        folder.with_name("left-out.txt").write_text("3\n17")
    elif change == "weights":
        parts["options"] = DatasetOptions(weights=weights(2.0))
    else:
        parts["options"] = DatasetOptions(labels=relabelled().labels)
    said = r"DATA_CHANGED.*\((other samples are left out|\(35, 13\) -> \(36, 13\) samples)"
    with pytest.raises(CheckpointError, match=said):
        train(config, **parts)
    allowed = make_config(folder, allow=("data",))
    config = RecipeConfig(**{**vars(config), "run": allowed.run})
    # The second epoch begins again, with its 5 steps.
    assert train(config, **parts).position.optimizer_step == 12
    assert steps_of(folder)[-1] == 12


def test_the_order_may_change_on_purpose_by_its_name_alone(tmp_path: Path) -> None:
    train(config_of(tmp_path, "uniform"), fit=leave_at_7, **parts_of("uniform"))
    config = config_of(tmp_path, "balanced")
    with pytest.raises(
        ConfigError, match="order: uniform -> balanced.*allow_change=.'batch.order'"
    ):
        train(config, **parts_of("balanced"))
    allowed = replace(config, run=make_config(tmp_path, allow=("batch.order",)).run)
    # The second epoch begins again, with its 5 steps.
    assert train(allowed, **parts_of("balanced")).position.optimizer_step == 12


def test_a_changed_order_is_followed_after_a_kill_before_its_first_save(tmp_path: Path) -> None:
    begun, run, other = (tmp_path / name / "run" for name in ("begun", "killed", "whole"))
    train(config_of(begun, "uniform"), fit=leave_at_7, **parts_of("uniform"))

    def changed(folder: Path) -> RecipeConfig:
        shutil.copytree(begun, folder)
        config = config_of(folder, "balanced")
        return replace(config, run=make_config(folder, allow=("batch.order",)).run)

    parts = partial(parts_of, "balanced")
    left = run_interrupted(changed(run), Interruption("KILL", "step", 1), parts)
    assert differing(left, run_whole(changed(other), parts)) == []
    assert steps_of(run)[-1] == 12


def test_another_list_of_as_many_samples_is_refused_too(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", "left out")
    train(config, **parts_of("left out"))
    (tmp_path / "left-out.txt").write_text("3\n17\n31")
    with pytest.raises(CheckpointError, match="DATA_CHANGED.*other samples are left out"):
        train(config, **parts_of("left out"))


def test_a_list_may_move_and_get_comments(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", "left out")
    train(config, **parts_of("left out"))
    moved = tmp_path / "moved.txt"
    moved.write_text("".join(f"{number}  # blurred\n" for number in reversed(LEFT_OUT)))
    batch = BatchConfig(**{**vars(config.batch), "leave_out": moved})
    train(RecipeConfig(**{**vars(config), "batch": batch}), **parts_of("left out"))


# --- what has no order, and what knows its labels ---


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"labels": ["cat", "dog"] * 19}, r"labels= are <U3: give the labels"),
        ({"labels": [0, 1]}, r"labels= has the shape \[2\] for 38 samples"),
        ({"labels": torch.zeros(SIZE, 3)}, r"labels= has the shape \[38, 3\] for 38 samples"),
    ],
)
def test_labels_that_cannot_be_balanced_are_one_line(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    config = make_config(tmp_path, batch={"order": "balanced"})
    with pytest.raises(ConfigError, match=said) as caught:
        train(config, options=DatasetOptions(**options))
    assert "\n" not in str(caught.value)


def order_of(dataset: Any, batch: BatchConfig, **options: Any) -> SampleOrder:
    accelerator = start_accelerator(RuntimeConfig(num_threads=1))
    loader = build_train_loader(
        dataset, batch, seed=0, accelerator=accelerator, options=DatasetOptions(**options)
    )
    return loader.order


def test_a_table_is_balanced_by_its_column_of_labels() -> None:
    table = datasets.Dataset.from_dict({"x": [[0.0]] * 20, "stars": [0] * 15 + [1] * 5})
    batch = BatchConfig(order="balanced", per_device_batch_size=4)
    order = order_of(table, batch, columns=("x", "stars"))
    drawn = order.draw(seed=0, epoch=0) % 20
    assert sorted((drawn >= 15).tolist()) == [False] * 10 + [True] * 10
    texts = datasets.Dataset.from_dict({"x": [[0.0]] * 4, "stars": list("abab")})
    with pytest.raises(UserError, match="give the labels of the samples as labels="):
        order_of(texts, batch, columns=("x", "stars"))
