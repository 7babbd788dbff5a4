"""`export --trained`: what a run has trained on a frozen base, without the base."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests import workload
from tests.cli.conftest import run_command


class WithBase(nn.Module):
    """A small net whose head is trained, and whose frozen base has the statistics of its norms."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = workload.SmallNet(norm="batch")
        self.net.requires_grad_(False)
        self.net.layers[-1].requires_grad_(True)

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frozen")
    workload.train(workload.make_config(folder), net=WithBase)
    return folder


def test_it_is_the_whole_model_on_the_same_base(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_command(capsys, ["export", run, "--to", tmp_path / "to", "--trained"])
    assert code == 0, err
    stored = load_file(tmp_path / "to" / "trained.safetensors")
    assert f"{len(stored)} of {len(WithBase().state_dict())} tensors" in out
    frozen = {name for name, each in WithBase().named_parameters() if not each.requires_grad}
    assert stored.keys() == WithBase().state_dict().keys() - frozen
    model = WithBase()
    model.load_state_dict(stored, strict=False)
    whole = load_file(run / "export" / "model.safetensors")
    assert all(torch.equal(each, whole[name]) for name, each in model.state_dict().items())
    assert run_command(capsys, ["export", run, "--to", tmp_path / "to", "--trained"])[0] == 0


def test_what_it_cannot_do_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing_frozen = tmp_path / "run"
    workload.train(workload.make_config(nothing_frozen))
    without_checkpoints = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(without_checkpoints / "checkpoints")
    for arguments, fact in {
        (nothing_frozen, "--to", tmp_path / "to"): "no frozen parameters",
        (without_checkpoints, "--to", tmp_path / "to"): "no frozen parameters",
        (run, "--to", tmp_path / "to", "--onnx"): "--onnx",
    }.items():
        code, _, err = run_command(capsys, ["export", *arguments, "--trained"])
        assert code != 0
        assert fact in err
        assert not (tmp_path / "to").exists()
