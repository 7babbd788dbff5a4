"""Weights from elsewhere: files in other precisions, with fewer names, and folders without any."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_trainer import ConfigError, RunConfig
from accel_trainer.checkpoint import initial_weights
from accel_trainer.checkpoint.initial_weights import load_initial_weights
from accel_trainer.core.errors import CheckpointError

from .. import workload


def test_weights_in_half_precision_without_counts_of_batches_are_loaded(tmp_path: Path) -> None:
    model = workload.SmallNet(norm="batch")
    weights = {
        name: tensor.half()
        for name, tensor in model.state_dict().items()
        if not name.endswith("tracked")
    }
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        tmp_path / "half.safetensors",
    )
    other = workload.SmallNet(norm="batch")
    report = load_initial_weights(other, tmp_path / "half.safetensors", skip=None)
    assert all(
        torch.equal(other.state_dict()[name], tensor.float()) for name, tensor in weights.items()
    )
    new = report.partition("new: ")[2].split(", ")
    assert new[0]
    assert all(name.endswith("num_batches_tracked") for name in new)


def test_tied_weights_are_loaded_from_a_file_with_one_of_their_names(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embedding"].weight
    save_file({"embedding.weight": torch.ones(5, 3)}, tmp_path / "tied.safetensors")
    report = load_initial_weights(model, tmp_path / "tied.safetensors", skip=None)
    assert torch.equal(model["head"].weight, torch.ones(5, 3))
    assert "new: " not in report


@pytest.mark.parametrize("skip", [".", "", "weight|bias", None])
def test_initial_weights_of_which_nothing_is_left_are_refused(
    skip: str | None, tmp_path: Path
) -> None:
    save_file({"weight": torch.ones(5, 3), "bias": torch.ones(5)}, tmp_path / "given.safetensors")
    model = nn.Linear(3, 2 if skip is None else 5)  # it has a head alone, here of another size
    with pytest.raises(ConfigError, match="no tensor of .* would be loaded"):
        load_initial_weights(model, tmp_path / "given.safetensors", skip=skip)


def test_a_folder_that_holds_no_weights_is_refused_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither a run nor a checkpoint\)"):
        load_initial_weights(nn.Linear(2, 2), tmp_path, skip=None)


def test_weights_that_the_system_refuses_to_look_up_are_one_line() -> None:
    # From Python 3.14 on, such a path does not exist.
    with pytest.raises(CheckpointError, match=r"INIT_FROM.*(File name too long|does not exist)"):
        load_initial_weights(nn.Linear(2, 2), Path("x" * 300), skip=None)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_file_of_torch_save_is_refused_with_the_way_out(tmp_path: Path, is_zip: bool) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.ones(2)}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError, match=r"INIT_FROM.*torch\.save.*models\.md"):
        load_initial_weights(nn.Linear(2, 1), path, skip=None)


def test_options_of_the_initial_weights_that_have_no_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match="init_skip= has no effect without init_from="):
        RunConfig(init_skip="head")
    with pytest.raises(ConfigError, match="resume='runs/a' and init_from='runs/b' both set"):
        RunConfig(init_from=Path("runs/b"), resume="runs/a")


def test_a_head_of_other_classes_keeps_its_rows_by_name(
    tmp_path: Path,
) -> None:
    """Any order and number of classes: the row of a class is its own, or the model's new one."""
    letters = list("abcdef")
    draw = random.Random(0)
    for number in range(40):
        old, new = (draw.sample(letters, draw.randint(2, 6)) for _ in range(2))
        theirs = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, len(old)))
        export = tmp_path / str(number) / "export"
        export.mkdir(parents=True)
        save_file(theirs.state_dict(), export / "model.safetensors")
        (export / "config.json").write_text(json.dumps({"class_names": old}))
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, len(new)))
        fresh = model[1].weight.detach().clone()
        report = load_initial_weights(
            model, export / "model.safetensors", skip=None, class_names=new
        )
        assert torch.equal(model[0].weight, theirs[0].weight)
        for row, name in enumerate(new):
            expected = theirs[1].weight[old.index(name)] if name in old else fresh[row]
            assert torch.equal(model[1].weight[row], expected), (old, new)
        assert ("kept by name" in report) == (old != new)


def test_the_classes_of_a_run_are_found_from_its_checkpoints_too(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-0000000001-epoch-00001"
    checkpoint.mkdir(parents=True)
    (tmp_path / "run" / "export").mkdir()
    (tmp_path / "run" / "export" / "config.json").write_text('{"class_names": ["a", "b"]}')
    for path in (tmp_path / "run", checkpoint):
        assert initial_weights._class_names_of(path) == ["a", "b"]
    assert initial_weights._class_names_of(tmp_path) == []
    assert initial_weights._class_names_of(Path("/weights.safetensors")) == []
    (tmp_path / "run" / "export" / "config.json").write_text('{"class_names": 7}')
    assert initial_weights._class_names_of(tmp_path / "run") == []
