from __future__ import annotations

import collections
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from accel_trainer.cli.main import main

Shown = pytest.CaptureFixture[str]


def weights() -> dict[str, Tensor]:
    return {"layer.weight": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor(7)}


def is_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def convert(source: Path, *options: str) -> tuple[int, Path]:
    target = source.parent / "weights.safetensors"
    return main(["convert", str(source), "--to", str(target), *options]), target


def prefixed(prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in weights().items()}


@pytest.mark.parametrize(
    "saved",
    [
        weights(),
        collections.OrderedDict(weights()),
        prefixed("module."),
        prefixed("_orig_mod."),
        prefixed("module._orig_mod."),
        {"epoch": 3, "state_dict": weights()},
        {"model": prefixed("module."), "optimizer": {"state": {}}},
    ],
)
def test_what_torch_saved_becomes_a_file_of_the_same_weights(tmp_path: Path, saved: Any) -> None:
    torch.save(saved, tmp_path / "saved.pt")
    code, target = convert(tmp_path / "saved.pt")
    assert code == 0
    assert is_equal(load_file(target), weights())


def test_weights_under_another_name_are_found_by_key(tmp_path: Path, capsys: Shown) -> None:
    torch.save({"epoch": 3, "teacher": weights()}, tmp_path / "saved.pt")
    assert convert(tmp_path / "saved.pt")[0] == 74
    assert "no weights are in it, but epoch, teacher: say where with --key" in capsys.readouterr().err
    assert convert(tmp_path / "saved.pt", "--key", "epoch")[0] == 64
    code, target = convert(tmp_path / "saved.pt", "--key", "teacher")
    assert code == 0
    assert is_equal(load_file(target), weights())


@pytest.mark.parametrize("is_safe", [True, False])
def test_a_folder_of_accelerate_is_converted(tmp_path: Path, is_safe: bool) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(3, 2))
    accelerator.save_state(str(tmp_path / "state"), safe_serialization=is_safe)
    code, target = convert(tmp_path / "state")
    assert code == 0
    assert is_equal(load_file(target), dict(model.state_dict()))


def test_a_shared_or_strided_tensor_is_written_out(tmp_path: Path) -> None:
    table = torch.arange(6.0).reshape(2, 3)
    torch.save({"a": table, "b": table, "c": table.t()}, tmp_path / "saved.pt")
    assert is_equal(load_file(convert(tmp_path / "saved.pt")[1]), {"a": table, "b": table, "c": table.t()})


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_a_pickle_that_needs_more_than_tensors_is_refused_and_runs_nothing(tmp_path: Path, capsys: Shown) -> None:
    torch.save({"state_dict": weights(), "x": Payload(str(tmp_path / "pwned"))}, tmp_path / "evil.pt")
    torch.save(nn.Linear(3, 2), tmp_path / "module.pt")
    for name in ("evil.pt", "module.pt"):
        code, target = convert(tmp_path / name)
        error = capsys.readouterr().err
        assert (code, error.count("\n")) == (74, 1)
        assert f"{name}: it needs " in error
        assert not target.exists()
    assert not (tmp_path / "pwned").exists()


def test_a_damaged_file_is_one_line(tmp_path: Path, capsys: Shown) -> None:
    (tmp_path / "noise.pt").write_bytes(b"\x80\x02noise")
    torch.save(weights(), tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:200])
    save_file(weights(), tmp_path / "cut.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "cut.safetensors").read_bytes()[:-1])
    (tmp_path / "empty").mkdir()
    for name in ("noise.pt", "cut.pt", "cut.safetensors", "empty"):
        assert convert(tmp_path / name)[0] == 74
        error = capsys.readouterr().err
        assert name in error
        assert error.count("\n") == 1


def test_an_older_torch_whose_reader_could_run_code_is_refused(
    tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(weights(), tmp_path / "saved.pt")
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    assert convert(tmp_path / "saved.pt")[0] == 74
    assert "use torch 2.10 or newer" in capsys.readouterr().err


def test_nothing_is_overwritten(tmp_path: Path, capsys: Shown) -> None:
    torch.save(weights(), tmp_path / "saved.pt")
    assert convert(tmp_path / "saved.pt")[0] == 0
    assert convert(tmp_path / "saved.pt")[0] == 73
    assert "exists already" in capsys.readouterr().err


def test_names_that_fall_together_without_their_prefix_are_refused(tmp_path: Path, capsys: Shown) -> None:
    torch.save({"a": torch.zeros(1), "module.a": torch.zeros(1)}, tmp_path / "saved.pt")
    assert convert(tmp_path / "saved.pt")[0] == 74
    assert "names are the same" in capsys.readouterr().err
