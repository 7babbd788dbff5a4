from __future__ import annotations

import pytest
import torch
from torch import Tensor

from accel_trainer.checkpoint.serialization import Encoded, encode
from accel_trainer.checkpoint.staging import Snapshot


def pieces_of(weight: Tensor) -> dict[str, Encoded]:
    return {
        "model": encode({"weight": weight}, name="model"),
        "trainer": encode({"step": 3}, name="trainer"),
    }


def test_a_snapshot_does_not_follow_what_training_does_to_the_weights() -> None:
    weight = torch.ones(3)
    copied, wait = Snapshot().take(pieces_of(weight))
    weight.zero_()
    wait()
    assert copied["model"].tensors["weight"].tolist() == [1, 1, 1]
    assert copied["trainer"].skeleton == pieces_of(weight)["trainer"].skeleton


def test_a_snapshot_reuses_its_host_memory() -> None:
    snapshot = Snapshot()
    first, _ = snapshot.take(pieces_of(torch.ones(3)))
    second, _ = snapshot.take(pieces_of(torch.zeros(3)))
    assert second["model"].tensors["weight"] is first["model"].tensors["weight"]
    assert second["model"].tensors["weight"].tolist() == [0, 0, 0]


def test_a_snapshot_of_another_shape_or_dtype_has_new_host_memory() -> None:
    snapshot = Snapshot()
    for weight in (torch.ones(3), torch.ones(2, 2), torch.ones(2, 2, dtype=torch.float64)):
        copied, _ = snapshot.take(pieces_of(weight))
        found = copied["model"].tensors["weight"]
        assert (found.shape, found.dtype, found.device.type) == (weight.shape, weight.dtype, "cpu")


def _views() -> dict[str, Tensor]:
    """Return tensors that share memory, of which many have the same shape."""
    rows = torch.randn(4, 2, 2)
    waves = torch.randn(3, dtype=torch.complex64)
    halves = torch.randn(2, 3).unbind()
    return {
        **{f"row{number}": row for number, row in enumerate(rows)},
        "again": rows[1],
        "turned": rows[1].T,
        "repeated": rows[2, 0, :1].expand(2, 2),
        "flat": rows.view(-1)[1:5],
        "next flat": rows.view(-1)[2:6],
        "mean": halves[0],
        "variance": halves[1],
        "waves": waves,
        "conjugated": waves.conj(),
        "real": waves.real,
        "imaginary": waves.imag,
        "negative": waves.conj().imag,
        "as integers": rows[1].view(torch.int32),
    }


def test_a_snapshot_has_each_view_of_shared_memory() -> None:
    views = _views()
    copies, wait = Snapshot().take({"model": Encoded(None, views)})
    wait()
    copied = copies["model"].tensors
    assert {name: each.tolist() for name, each in copied.items()} == {
        name: each.tolist() for name, each in views.items()
    }
    assert copied["again"] is copied["row1"]


def test_tensors_without_an_address_are_copied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a device are that is written in Python."""
    monkeypatch.setattr("accel_trainer.checkpoint.staging.address_of", lambda tensor: 0)
    tensors = {"weight": torch.ones(3), "bias": torch.zeros(3)}
    copies, wait = Snapshot().take({"model": Encoded(None, tensors)})
    wait()
    assert {name: each.tolist() for name, each in copies["model"].tensors.items()} == {
        "weight": [1, 1, 1],
        "bias": [0, 0, 0],
    }
