"""Weights from elsewhere: files in other precisions, with fewer names, and folders without any."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_trainer import ConfigError, RunConfig
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


def test_a_folder_that_holds_no_weights_is_refused_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"neither a run nor a checkpoint\): give a safetensors file, a checkp",
    ):
        load_initial_weights(nn.Linear(2, 2), tmp_path, skip=None)


def test_options_of_the_initial_weights_that_have_no_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match="--init-skip has no effect without --init-from"):
        RunConfig(init_skip="head")
    with pytest.raises(
        ConfigError, match="--resume runs/a and --init-from runs/b both set the initial weights"
    ):
        RunConfig(init_from=Path("runs/b"), resume="runs/a")
