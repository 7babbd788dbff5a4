from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel_trainer import Batch, ClassificationTask
from accel_trainer.callbacks.export import Exporter
from accel_trainer.callbacks.onnx import OnnxExport, OnnxFiles
from accel_trainer.core.train_state import BestCheckpoint
from accel_trainer.training.callback import RunResult, TrainerView
from tests.faults.tiny_run import make, name_at, pieces_at, position_at, save

CONFIG = {"model": "net", "num_classes": 3}


def trainer() -> TrainerView:
    return cast(TrainerView, SimpleNamespace(model=nn.Module()))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with checkpoints of steps 1 and 2."""
    checkpointer = make(tmp_path / "checkpoints")
    save(checkpointer, 1, 2)
    checkpointer.close()
    return tmp_path


def exporter(run: Path, **options: Any) -> Exporter:
    return Exporter(run, weights="model", config=CONFIG, **options)


def ended(
    best_step: int | None,
    *,
    group: str = "eval",
    state: Literal["done", "stopped", "preempted"] = "done",
) -> RunResult:
    best = (
        None if best_step is None else BestCheckpoint(name_at(best_step), f"{group}/accuracy", 0.5)
    )
    return RunResult(state, "max_steps reached", position_at(2), {}, best, Path())


def exported(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "export" / "config.json").read_text()))


@pytest.mark.parametrize(
    ("best_step", "exported_step", "source"),
    [
        (1, 1, f"model of the best checkpoint {name_at(1)}"),
        (None, 2, "model after step 2"),
        (7, 2, "model after step 2"),  # of the run that this one is a branch of
    ],
)
def test_an_export_has_the_best_weights_that_there_are(
    run: Path,
    best_step: int | None,
    exported_step: int,
    source: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    exporter(run).on_fit_end(trainer(), ended(best_step))
    is_other = best_step not in (exported_step, None)
    warning = f"the best checkpoint {name_at(7)} is damaged or not of this run: export/ has the "
    assert caplog.messages == [f"{warning}{source}"] * is_other
    weights = load_file(run / "export" / "model.safetensors")
    expected = cast(dict[str, torch.Tensor], pieces_at(exported_step)["model"])
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    sha256 = hashlib.sha256((run / "export" / "model.safetensors").read_bytes()).hexdigest()
    assert exported(run) == {**CONFIG, "weights": source, "sha256": sha256}


def test_an_export_has_the_average_if_that_was_evaluated_as_the_best(run: Path) -> None:
    exporter(run).on_fit_end(trainer(), ended(1, group="eval_ema"))
    weights = load_file(run / "export" / "model.safetensors")
    expected = cast(dict[str, torch.Tensor], pieces_at(1)["ema"])
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_an_export_describes_the_model_from_the_start_of_a_run(run: Path) -> None:
    exporter(run).on_fit_start(trainer())
    assert exported(run) == CONFIG
    exporter(run).on_fit_end(trainer(), ended(1))
    before = exported(run)
    exporter(run).on_fit_start(trainer())
    assert exported(run) == before, "a finished run that is started again"


def test_a_run_that_continues_is_not_exported(run: Path) -> None:
    exporter(run).on_fit_end(trainer(), ended(1, state="preempted"))
    assert not (run / "export").exists()


class Unconvertible(OnnxExport):
    """A model that the exporter of torch cannot convert."""

    def files(self, weights: Any, config: Any) -> OnnxFiles:
        raise RuntimeError("no such\n operator")


class Converted(OnnxExport):
    """A model that was converted."""

    def files(self, weights: Any, config: Any) -> OnnxFiles:
        return OnnxFiles({"model.onnx": b"onnx"}, {"onnx_sha256": "of onnx"})


def test_an_export_without_onnx_is_a_warning(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        exporter(run, onnx=Unconvertible(None, None, None)).on_fit_end(trainer(), ended(1))  # type: ignore[arg-type]
    assert "torch cannot convert the model (RuntimeError: no such operator, at " in caplog.text
    assert set(exported(run)) == {*CONFIG, "weights", "sha256"}


class Tried(OnnxExport):
    """Fails to convert the model, or before that in its `eval_step`."""

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.task is not None:
            raise ValueError("it needs what training leaves")
        torch.rand(())
        return (), {}

    def files(self, weights: Any, config: Any) -> OnnxFiles:
        raise RuntimeError("no such operator")


@pytest.mark.parametrize("is_early", [True, False])
def test_what_cannot_be_converted_is_said_once_and_early(
    run: Path, caplog: pytest.LogCaptureFixture, is_early: bool
) -> None:
    task: Any = None if is_early else "fails"
    onnx = Tried(nn.Linear(1, 1), task, None)  # type: ignore[arg-type]
    export = exporter(run, onnx=onnx)
    view: Any = SimpleNamespace(
        is_finished=False, accelerator=SimpleNamespace(device=torch.device("cpu"))
    )
    before = torch.random.get_rng_state()
    with caplog.at_level(logging.WARNING):
        export.on_fit_start(view)
        assert ("torch cannot convert the model" in caplog.text) is is_early
        assert torch.equal(torch.random.get_rng_state(), before), "it draws no number of the run"
        export.on_fit_end(trainer(), ended(1))
    assert caplog.text.count("torch cannot convert the model (RuntimeError: no such operator") == 1


def test_a_single_sample_is_repeated_so_that_its_axis_is_no_constant() -> None:
    sample = Batch(torch.ones(1, 3), torch.zeros(1, dtype=torch.long), torch.zeros(1).long())
    loader: Any = SimpleNamespace(batches=lambda: iter([sample]))
    (inputs,), _ = OnnxExport(nn.Linear(3, 2), ClassificationTask(), loader).call()
    assert len(inputs) > 1
    assert torch.equal(inputs, torch.ones_like(inputs))


def test_onnx_files_stay_with_the_weights_that_they_were_made_of(run: Path) -> None:
    exporter(run, onnx=Converted(None, None, None)).on_fit_end(trainer(), ended(1))  # type: ignore[arg-type]
    assert (run / "export" / "model.onnx").read_bytes() == b"onnx"
    exporter(run).on_fit_end(trainer(), ended(1))
    assert exported(run)["onnx_sha256"] == "of onnx", "the same weights"
    exporter(run).on_fit_end(trainer(), ended(2))
    assert "onnx_sha256" not in exported(run)
