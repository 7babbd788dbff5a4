from __future__ import annotations

import math
import random
from collections import OrderedDict, defaultdict
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from accel_trainer.checkpoint.serialization import (
    decode,
    encode,
    first_nonfinite,
    pack_tensors,
    unpack_tensors,
)
from accel_trainer.core.errors import CheckpointError
from accel_trainer.core.json_files import MAX_BYTES, dump_json, parse_json
from tests.faults.mutations import JSON_BOMBS, TENSOR_BOMBS


class Point(NamedTuple):
    x: int


class Colour(IntEnum):
    RED = 1


def through_bytes(value: object) -> Any:
    encoded = encode(value, name="piece")
    return decode(encoded.skeleton, unpack_tensors(b"".join(pack_tensors(encoded.tensors))))


PLAIN = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    2**63,
    -(2**200),
    0.1,
    -0.0,
    5e-324,
    math.inf,
    -math.inf,
    "",
    "ü☃\0\ud800",
    [],
    (),
    {},
    [1, [2, (3, [4])]],
    {"a": {"b": (1, None)}},
    {1: "x", "1": "y", None: 0, (1, "t"): 2.0},
    {"$tensor": 1},
    {"$": {"$dict": []}},
    random.Random(3).getstate(),
    np.float64(0.1),
    np.float32(0.1),
    np.float32(-math.inf),
    np.int64(-3),
    np.bool_(True),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: repr(value)[:30])
def test_plain_values_come_back_equal_and_of_the_same_type(value: object) -> None:
    assert repr(through_bytes(value)) == repr(value)
    assert repr(through_bytes([value, value])) == repr([value, value])


def test_nan_comes_back() -> None:
    assert math.isnan(through_bytes(math.nan))


def test_tensors_of_all_kinds_come_back_bit_for_bit() -> None:
    tensors = [
        torch.randn(3, 4),
        torch.randn(2, dtype=torch.float64),
        torch.randn(5).bfloat16(),
        torch.randn(5).half(),
        torch.tensor(7),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.get_rng_state(),
        torch.randn(2, 3, 4, 5),
        torch.tensor([-0.0]),
        torch.tensor([1, 2], dtype=torch.int8),
        torch.tensor([1, 2], dtype=torch.uint16),
    ]
    for before, after in zip(tensors, through_bytes(tensors), strict=True):
        assert before.dtype == after.dtype
        assert before.shape == after.shape
        assert torch.equal(before, after)


def test_keys_that_read_the_same_do_not_collide() -> None:
    value = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}, "x": 0}
    result = through_bytes(value)
    assert (int(result["a.b"]), int(result["a"]["b"])) == (1, 2)


def test_an_optimizer_continues_exactly() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    assert repr(through_bytes(state)) == repr(state)


def test_a_state_dict_needs_no_skeleton_and_keeps_its_order() -> None:
    state = OrderedDict(z=torch.tensor(1.0), a=torch.tensor(2), m=torch.tensor([True]))
    assert encode(state, name="model").skeleton is None
    assert list(through_bytes(state)) == ["z", "a", "m"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"state": [{"foo": {1, 2}}]}, r"optimizer\.state\[0\]\.foo is a builtins\.set"),
        ({"f": print}, r"optimizer\.f is a builtins\.builtin_function"),
        ({3: nn.Linear(1, 1)}, r"optimizer\[3\] is a torch\.nn"),
        (Point(1), "Point"),
        ([Colour.RED], "Colour"),
        (defaultdict(int), "defaultdict"),
        (torch.Size([1]), "Size"),
        (
            {"c": torch.zeros(1, dtype=torch.complex128), "x": 1},
            r"\.c is a tensor of torch\.complex128",
        ),
        ({"c": torch.zeros(1, device="meta")}, r"optimizer\.c is not a dense tensor"),
        ({"c": torch.zeros(2).to_sparse()}, "not a dense"),
        ({"o": np.array([object()])}, r"\.o is a numpy\.ndarray"),
        ({"s": np.str_("a")}, r"\.s is a numpy\.str_"),
        ({"s": b"bytes"}, r"\.s is a builtins\.bytes"),
        ([1 << 20_000], "too large"),
        (["x" * 10_000_000], "too large"),
    ],
)
def test_what_cannot_be_stored_is_refused_at_save_with_its_path(
    value: object, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as raised:
        encode(value, name="optimizer")
    assert raised.value.code == "CKPT_TYPE"
    assert "\n" not in str(raised.value)


def test_a_value_that_contains_itself_is_refused_at_save() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(CheckpointError, match="nested"):
        encode(value, name="trainer")


@pytest.mark.parametrize(
    "text",
    [
        '["V9999999999999", 1]',
        '["object", 1]',
        '["datetime64[s]", 1]',
        '["uint8", 1]',
        '["int64", 1' + "0" * 30 + "]",
        '["float64", 1' + "0" * 400 + "]",
        '["float64", [1, 2]]',
        '["int64", "1"]',
        '["int64"]',
    ],
)
def test_a_number_of_numpy_from_a_file_is_a_number_or_an_error(text: str) -> None:
    with pytest.raises((ValueError, LookupError, ArithmeticError)):
        decode(b'{"$numpy":' + text.encode() + b"}", {})


@pytest.mark.parametrize("skeleton", [b'{"$what":1}', b"["])
def test_a_skeleton_that_was_not_written_here_is_a_value_error(skeleton: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        decode(skeleton, {})


# --- files ---

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
    """Fault (Corruption): hostile safetensors header; a sparse file of a terabyte -> refused before
    it is read, without filling the memory; the next valid checkpoint is used
    """
    if label in ("huge shape without bytes", "a key twice"):  # odd, and neither bytes nor memory
        assert unpack_tensors(data)["a"].numel() == 0
        return
    with pytest.raises(ValueError, match=r"\w"):
        unpack_tensors(data)


@pytest.mark.parametrize(("label", "data"), JSON_BOMBS, ids=[label for label, _ in JSON_BOMBS])
def test_json_beyond_the_limits_is_refused_or_small(label: str, data: bytes) -> None:
    """Fault (Corruption): JSON bomb -> refused, or read as at most a few MiB of plain data: the
    size is limited
    """
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
    assert (
        first_nonfinite({"a": torch.tensor([float("inf"), -float("inf")], dtype=torch.bfloat16)})
        == "a"
    )
