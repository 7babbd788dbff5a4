from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from accel_trainer.core.digest import digest_of
from accel_trainer.core.tensor_memory import (
    address_of,
    copy_model,
    is_dense,
    make_dense,
    quick_digest,
    sum_of_bits,
    tied_by_memory,
)

WHOLE = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: WHOLE[:3], True),
        (lambda: WHOLE.t(), True),
        (lambda: torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), True),
        (lambda: WHOLE[:3, 1:5], False),
        (lambda: WHOLE[:1].expand(3, 6), False),
        (lambda: WHOLE[::2], False),
    ],
)
def test_memory_is_dense_if_it_has_each_element_once(
    make: Callable[[], Tensor], expected: bool
) -> None:
    assert is_dense(make()) is expected


def test_parameters_get_dense_memory_and_keep_their_values() -> None:
    model = nn.ParameterDict(
        {"slice": nn.Parameter(WHOLE[:3, 1:5]), "dense": nn.Parameter(WHOLE.clone())}
    )
    place = model["dense"].data_ptr()
    make_dense(model)
    assert all(is_dense(parameter) for parameter in model.parameters())
    assert torch.equal(model["slice"], WHOLE[:3, 1:5])
    assert model["dense"].data_ptr() == place


def test_of_buffers_only_expanded_ones_get_dense_memory() -> None:
    model = nn.Module()
    model.register_buffer("part", WHOLE[:, 1:3])
    model.register_buffer("expanded", torch.ones(1).expand(3))
    make_dense(model)
    assert model.part.data_ptr() == WHOLE[:, 1:3].data_ptr()
    assert model.expanded.stride() == (1,)


def test_parameters_that_share_memory_are_named_as_tied() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight.data = model[0].weight.data
    assert [(a is model[2].weight, b is model[0].weight) for a, b in tied_by_memory(model)] == [
        (True, True)
    ]


def test_a_model_with_a_computed_weight_is_copied() -> None:
    model = nn.Linear(2, 2)
    model.scaled = model.weight * 2  # torch's deepcopy refuses it
    copied = copy_model(model)
    assert torch.equal(copied.scaled, model.scaled)
    copied.weight.data.zero_()
    assert model.weight.abs().sum() > 0


def test_the_sum_of_bits_does_not_depend_on_the_layout() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        strided = torch.arange(24).to(dtype)[::2]
        assert sum_of_bits(strided) == sum_of_bits(strided.clone()) != 0, dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64])
def test_a_digest_shows_each_element_and_its_place(dtype: torch.dtype) -> None:
    tensor = torch.arange(60).reshape(20, 3).to(dtype)
    found = quick_digest(tensor)
    assert quick_digest(tensor.clone()) == quick_digest(tensor[:, :]) == found
    assert quick_digest(tensor.roll(1, 0)) != found
    for place in range(20):
        changed = tensor.clone()
        changed[place, 1] = 0 if tensor[place, 1] else 1
        assert quick_digest(changed) != found
    assert quick_digest(tensor[:0]) == quick_digest(torch.zeros(0))


@pytest.mark.parametrize("digest", [quick_digest, digest_of])
def test_a_digest_leaves_memory_that_fsdp_can_free(digest: Callable[[Tensor], object]) -> None:
    gathered = torch.ones(8)
    found = digest(gathered)
    gathered.untyped_storage().resize_(0)
    gathered.untyped_storage().resize_(32)
    assert digest(gathered.fill_(1)) == found


def test_the_address_of_a_slice_is_where_it_begins() -> None:
    whole = torch.arange(6.0)
    assert address_of(whole[2:]) - address_of(whole) == 8
    assert address_of(torch.empty(3, device="meta")[1:]) == 0
