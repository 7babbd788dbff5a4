"""A run records where its weights came from, and says so in its report and on its card."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accel_trainer import ClassificationTask, OptimizerConfig
from recipes.distill import DistillationTask
from tests.workload import SmallNet, make_config, train


def start(
    folder: Path, source: Path | None, *, skip: str | None = None, max_steps: int | None = None
) -> None:
    freeze = None if source is None else r"^layers\.0\."
    config = make_config(folder, optimizer=OptimizerConfig(freeze=freeze))
    where = replace(config.run, init_from=source, init_skip=skip)
    torch.manual_seed(5)
    task = ClassificationTask() if source is None else DistillationTask(SmallNet(norm="batch"))
    train(
        replace(config, run=where, trainer=replace(config.trainer, max_steps=max_steps)),
        task=task,
        norm="batch",
    )


def test_a_resumed_run_still_says_what_it_started_from(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    start(tmp_path / "first", None)
    file = tmp_path / "first" / "export" / "model.safetensors"
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    start(tmp_path / "second", file, skip=r"layers\.9", max_steps=2)
    file.unlink()  # what is recorded is not computed again
    start(tmp_path / "second", file, skip=r"layers\.9")
    from accel_trainer.cli.report.card import write_card
    from accel_trainer.cli.report.report import render
    from accel_trainer.cli.runs.run_reader import read_run

    run = read_run(tmp_path / "second")
    loaded, frozen, task = run.origin
    assert loaded.startswith(
        f"{file} (sha256 {sha256}): 12 tensors loaded; skipped: layers.9.bias, layers.9.weight; "
        "new:"
    )
    assert frozen.endswith(r"216 of them frozen: ^layers\.0\.")
    assert task.startswith("task, such as the teacher's weights: sha256 ")
    page, _ = render([run])
    config = {"evaluation": {"mixed_precision": "no", "tta": "none"}, "weights": "model"}
    card = write_card(run, config, {"accuracy": 0.5})["README.md"].decode()
    assert sha256 in page
    assert sha256 in card
    assert f"- {frozen}" in card.splitlines()
    assert read_run(tmp_path / "first").origin == []


def test_the_hash_of_a_run_is_that_of_its_weights_as_a_file(tmp_path: Path) -> None:
    start(tmp_path / "first", None)
    start(tmp_path / "second", tmp_path / "first", max_steps=1)
    from accel_trainer.cli.runs.run_reader import read_run

    weights = (tmp_path / "first" / "export" / "model.safetensors").read_bytes()
    assert (
        f"sha256 {hashlib.sha256(weights).hexdigest()}" in read_run(tmp_path / "second").origin[0]
    )
