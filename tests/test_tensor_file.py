from __future__ import annotations

import pytest
import safetensors.torch
import torch

from accel_trainer.strict_json import MAX_BYTES, dump_json, parse_json
from accel_trainer.tensor_file import check_size, first_nonfinite, pack_tensors, unpack_tensors
from tests.faults.mutations import JSON_BOMBS, TENSOR_BOMBS

TENSORS = {
    "z": torch.tensor([True]),
    "a": torch.randn(3, 5, dtype=torch.float64),
    "m": torch.randn(7).half(),
    "empty": torch.zeros(0, 2),
    "scalar": torch.tensor(3),
}


def test_the_file_is_one_that_safetensors_reads() -> None:
    loaded = safetensors.torch.load(b"".join(pack_tensors(TENSORS)))
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


def test_a_file_that_safetensors_wrote_is_read() -> None:
    loaded = unpack_tensors(safetensors.torch.save(TENSORS, metadata={"format": "pt"}))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


def test_packing_does_not_copy_the_tensors() -> None:
    weights = torch.zeros(1000)
    header, data = pack_tensors({"w": weights})
    weights[0] = 1.0
    assert len(header) % 8 == 0
    assert bytes(data[:4]) == weights[:1].numpy().tobytes()


@pytest.mark.parametrize(("label", "data"), TENSOR_BOMBS, ids=[label for label, _ in TENSOR_BOMBS])
def test_an_unsound_file_of_tensors_is_refused(label: str, data: bytes) -> None:
    if label in ("huge shape without bytes", "a key twice"):  # odd, and neither bytes nor memory
        assert unpack_tensors(data)["a"].numel() == 0
        return
    with pytest.raises(ValueError, match=r"\w"):
        unpack_tensors(data)


def test_the_start_of_a_file_says_how_long_it_is() -> None:
    data = b"".join(pack_tensors(TENSORS))
    check_size(data[:1000], len(data))
    with pytest.raises(ValueError, match=f"describes {len(data)} bytes, not {len(data) + 2**40}"):
        check_size(data[:1000], len(data) + 2**40)
    for start in (b"", bytes(1000), *(bomb[:1000] for label, bomb in TENSOR_BOMBS if "without" not in label)):
        with pytest.raises(ValueError, match=r"\w"):
            check_size(start, 2**40)


@pytest.mark.parametrize(("label", "data"), JSON_BOMBS, ids=[label for label, _ in JSON_BOMBS])
def test_json_beyond_the_limits_is_refused_or_small(label: str, data: bytes) -> None:
    if label in (
        "deep closed list",
        "long tagged integer",
        "too many values",
        "many values",
        "long string",
        "a key twice",
    ):
        parse_json(data)
        return
    with pytest.raises(ValueError, match=r"\w"):
        parse_json(data)


def test_what_is_dumped_within_the_limits_is_parsed() -> None:
    text = "x" * (MAX_BYTES - 2)
    assert parse_json(dump_json(text)) == text
    with pytest.raises(ValueError, match="more than"):
        dump_json(text + "x")


def test_only_nan_and_inf_are_not_finite() -> None:
    assert first_nonfinite({"a": torch.full((9,), 3e38), "b": torch.tensor([1])}) is None
    assert first_nonfinite({"a": torch.zeros(2), "b": torch.tensor([0.0, float("nan")])}) == "b"
    assert first_nonfinite({"a": torch.tensor([float("inf"), -float("inf")], dtype=torch.bfloat16)}) == "a"
