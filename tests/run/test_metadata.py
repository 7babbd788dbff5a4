"""What a user notes in checkpoints: stored, restored, changed by callbacks, shown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from accel_trainer import (
    BatchConfig,
    Callback,
    ClassificationTask,
    ConfigError,
    RecipeConfig,
    RunConfig,
    RuntimeConfig,
    Trainer,
    TrainerConfig,
    build_trainer,
    start_run,
)
from accel_trainer.cli.main import main
from tests import processes
from tests.variants import NUM_THREADS


def train(
    folder: Path,
    metadata: Mapping[str, Any] | None,
    callbacks: Sequence[Callback] = (),
    *,
    num_epochs: int = 1,
) -> dict[str, Any]:
    """Train a line for some epochs; return the metadata that the trainer ends with."""
    config = RecipeConfig(
        batch=BatchConfig(global_batch_size=8),
        trainer=TrainerConfig(num_epochs=num_epochs, max_steps=num_epochs),
        runtime=RuntimeConfig(num_threads=NUM_THREADS, timeout_s=300),
        run=RunConfig(output_dir=folder, allow_change=("trainer.num_epochs",)),
    )
    data = TensorDataset(torch.arange(32.0).reshape(8, 4), torch.arange(8) % 2)
    with start_run(config, recipe="metadata") as run:
        trainer = build_trainer(
            run,
            model=nn.Linear(4, 2),
            task=ClassificationTask(),
            train_set=data,
            eval_sets=data,
            callbacks=callbacks,
            metadata=metadata,
        )
        trainer.fit()
        return trainer.metadata


def stored(folder: Path) -> dict[str, Any]:
    newest = max((folder / "checkpoints").glob("step-*"))
    return dict(json.loads((newest / "manifest.json").read_text())["metadata"])


class Notes(Callback):
    """Changes the metadata after each epoch, on each process to something else."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        trainer.metadata["epochs"] = [*trainer.metadata.get("epochs", []), trainer.state.epoch]
        trainer.metadata["by"] = trainer.accelerator.process_index


def test_metadata_is_stored_in_every_checkpoint_and_restored(tmp_path: Path) -> None:
    given = {"dataset_version": 3, "sizes": (1, 2), "nested": {"name": "ü", "none": None}}
    train(tmp_path, given)
    assert stored(tmp_path) == {**given, "sizes": [1, 2]}
    # What the checkpoint has stays; what is new is added.
    found = train(tmp_path, {"dataset_version": 4, "author": "me"}, num_epochs=2)
    assert found == {**given, "sizes": [1, 2], "author": "me"}
    assert stored(tmp_path) == found


def test_a_run_without_metadata_stores_none(tmp_path: Path) -> None:
    train(tmp_path, None)
    assert stored(tmp_path) == {}


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_callback_may_change_the_metadata_and_the_main_process_decides(
    tmp_path: Path, num_processes: int
) -> None:
    for epochs in (1, 2):
        processes.run(
            train_with_notes,
            tmp_path / "run",
            epochs,
            num_processes=num_processes,
            folder=tmp_path / f"logs-{epochs}",
        )
        noted = {"dataset_version": 3, "epochs": [1, 2][:epochs], "by": 0}
        assert stored(tmp_path / "run") == noted


def train_with_notes(folder: Path, num_epochs: int) -> None:
    train(folder, {"dataset_version": 3}, [Notes()], num_epochs=num_epochs)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"weights": torch.ones(2)}, "Object of type Tensor is not JSON serializable"),
        ({"loss": math.nan}, "not JSON compliant"),
        ({("a", "b"): 1}, "keys must be str"),
        ([1, 2], "'list' object is not a mapping"),
    ],
)
def test_metadata_that_is_not_json_is_one_line_before_any_work(
    tmp_path: Path, metadata: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"is not JSON .*{reason}.*: give a dict") as info:
        train(tmp_path / "run", metadata)
    assert info.value.code == "METADATA"
    assert "\n" not in str(info.value)
    assert not (tmp_path / "run").exists()


class NotesTensor(Callback):
    """Notes what JSON cannot hold."""

    def on_step_end(self, trainer: Trainer, report: Any) -> None:
        trainer.metadata["loss"] = report.loss_sum


def test_a_callback_that_notes_no_json_ends_the_run_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="metadata is not JSON"):
        train(tmp_path, {}, [NotesTensor()])


def test_inspect_shows_metadata_in_one_line_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, {"version": 3, "note": "a\nresumes here \x1b[31m\u202e"})
    capsys.readouterr()
    newest = max((tmp_path / "checkpoints").glob("step-*"))
    for path in (tmp_path, newest):
        assert main(["inspect", str(path)]) == 0
        shown = capsys.readouterr().out
        expected = r'metadata: {"version": 3, "note": "a\nresumes here \u001b[31m\u202e"}'
        assert expected in shown.splitlines()
        assert "\x1b" not in shown
