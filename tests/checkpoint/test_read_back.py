"""Whatever is stored can be loaded, and the first checkpoint shows it before it counts as one."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accel_trainer.checkpoint.config import CheckpointConfig
from accel_trainer.checkpoint.format import decode_files, read_files, write_checkpoint
from accel_trainer.checkpoint.frozen import digests_of
from accel_trainer.checkpoint.manager import Checkpointer
from accel_trainer.checkpoint.read_back import check_readable
from accel_trainer.checkpoint.serialization import Encoded, encode
from accel_trainer.core.errors import CheckpointError
from tests.faults.tiny_run import METADATA, name_at, position_at

NAMES = ("base.weight", "base.bias", "weight", "a/b", "größe.重み", "base", "$tensor", "n")
STATES = ("base", "kept", "teacher", "weight", "n")


def draw_tensor(draw: random.Random) -> Tensor:
    shape = draw.choice([(), (0,), (3,), (2, 0, 3), (2, 3)])
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape).to(dtype)


def draw_pieces(draw: random.Random) -> tuple[dict[str, Any], list[str]]:
    """Return pieces that share tensors by all kinds of names, and the names that stand still."""
    model = {name: draw_tensor(draw) for name in draw.sample(NAMES, 5)}
    still = draw.sample([*model], draw.randint(1, 4))
    tied = draw.choice([*model])
    model["tied.weight"] = model[tied]
    still += ["tied.weight"] * (tied in still)

    def some() -> dict[str, Any]:
        return {name: draw.choice([each, each.clone()]) for name, each in model.items()}

    forms: list[Callable[[], Any]] = [
        some,
        lambda: {"nested": some(), "n": 3},
        lambda: {name: some()[name] for name in still},
        lambda: {**some(), "n": 3},
        dict,
        lambda: {1: some(), "one": [*some().values()], "lowest": float("-inf")},
    ]
    pieces = {"model": model, "optimizer": {"state": some(), "param_groups": [{"lr": 0.1}]}}
    if draw.random() < 0.5:
        pieces["ema"] = some()
    for name in draw.sample(STATES, 3):
        pieces[name] = draw.choice(forms)()
    return pieces, still


def encoded(pieces: dict[str, Any]) -> dict[str, Encoded]:
    return {name: encode(value, name=name) for name, value in pieces.items()}


@pytest.mark.parametrize("seed", range(30))
def test_what_resembles_a_frozen_parameter_is_loaded_as_it_was_saved(
    directory: Path, seed: int
) -> None:
    pieces, still = draw_pieces(random.Random(seed))
    checkpointer = Checkpointer(
        directory, config=CheckpointConfig(), header=METADATA, unstepped=lambda: still
    )
    checkpointer.prepare(pieces)
    checkpointer.frozen = digests_of(pieces["model"], still)
    for step in (1, 2):
        checkpointer.save(position_at(step), pieces)
        checkpointer.wait(must_succeed=True)
        loaded = decode_files(read_files(directory / name_at(step)), directory / name_at(step))
        assert loaded.pieces.keys() == pieces.keys()
        for name, one in encoded(pieces).items():
            other = encode(loaded.pieces[name], name=name)
            assert other.skeleton == one.skeleton
            assert [*other.tensors] == [*one.tensors]
            assert all(torch.equal(other.tensors[key], one.tensors[key]) for key in one.tensors)


WRITTEN = {"model": {"a": torch.ones(2), "b": torch.zeros(0)}, "own": {"n": 1, "t": torch.ones(1)}}
OTHERS = {
    "a name more": {"model": {**WRITTEN["model"], "c": torch.ones(1)}},
    "other order": {"model": dict(reversed(WRITTEN["model"].items()))},
    "another bit": {"model": {**WRITTEN["model"], "a": torch.tensor([1.0, 1 + 2**-23])}},
    "another sign of zero": {"own": {"n": 1, "t": -torch.ones(1)}},
    "another dtype": {"model": {**WRITTEN["model"], "a": torch.ones(2).int()}},
    "another value": {"own": {"n": 1.0, "t": torch.ones(1)}},
    "a piece that is lost": {"teacher": {"a": torch.ones(2)}},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_checkpoint_that_does_not_read_as_it_was_saved_is_none(
    directory: Path, kind: str
) -> None:
    def check(folder: Path) -> None:
        check_readable(folder, encoded(WRITTEN | OTHERS[kind]), process_index=0)

    path = directory / name_at(1)
    directory.mkdir()
    with pytest.raises(CheckpointError, match=f"CKPT_UNREADABLE.* {[*OTHERS[kind]][0]} "):
        write_checkpoint(
            path,
            encoded(WRITTEN),
            header={**METADATA, **position_at(1)._asdict()},
            before_commit=lambda: None,
            check=check,
        )
    assert not [*directory.iterdir()]


@pytest.mark.parametrize("name", ["model.safetensors", "own.json", "own.safetensors"])
@pytest.mark.parametrize("place", [0, 20, -1])
def test_a_disk_that_returns_other_bytes_is_an_error_of_the_disk(
    directory: Path, name: str, place: int
) -> None:
    def check(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[place] ^= 1
        (folder / name).write_bytes(data)
        check_readable(folder, encoded(WRITTEN), process_index=0)

    directory.mkdir()
    with pytest.raises(OSError, match=f"{name}: its sha256"):
        write_checkpoint(
            directory / name_at(1),
            encoded(WRITTEN),
            header={**METADATA, **position_at(1)._asdict()},
            before_commit=lambda: None,
            check=check,
        )
