from __future__ import annotations

import pytest
import torch

from accel_trainer.core.types import Batch, LazyBatches, StepOutput, StepSums


def make_batch(index: int, size: int = 2) -> Batch:
    inputs = {"ids": torch.full((size,), index), "more": [torch.zeros(size, 3)]}
    return Batch(inputs, torch.zeros(size), torch.arange(size))


def test_a_batch_has_the_length_of_its_sample_ids() -> None:
    assert [len(make_batch(0, size)) for size in (0, 1, 3)] == [0, 1, 3]


def test_a_batch_is_changed_in_every_tensor_at_any_depth() -> None:
    batch = make_batch(0, 4).map(lambda tensor: tensor[:1])
    assert (
        len(batch),
        len(batch.inputs["ids"]),
        len(batch.inputs["more"][0]),
        len(batch.targets),
    ) == (1, 1, 1, 1)


def test_a_batch_is_moved_to_a_device_with_all_its_tensors() -> None:
    batch = make_batch(0).to(torch.device("meta"))
    tensors = (batch.inputs["ids"], batch.inputs["more"][0], batch.targets, batch.sample_ids)
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_lazy_batches_are_made_when_they_are_indexed() -> None:
    made: list[int] = []

    def make(index: int) -> Batch:
        made.append(index)
        return make_batch(index)

    batches = LazyBatches(make, 4)
    assert (len(batches), made) == (4, [])
    assert int(batches[-1].inputs["ids"][0]) == 3
    assert [int(batch.inputs["ids"][0]) for batch in batches[1:3]] == [1, 2]
    assert made == [3, 1, 2]
    assert [int(batch.inputs["ids"][0]) for batch in batches] == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_and_items_in_half_precision_are_summed_in_float32(dtype: torch.dtype) -> None:
    losses = torch.full((257,), 512, dtype=dtype)
    ones = torch.ones(257, dtype=dtype)
    sums = StepSums.of(StepOutput(losses, None, ones, {"hits": ones}))
    found = [sums.loss, sums.num_items, sums.numbers["hits"]]
    # As numbers: a comparison with a tensor would round its other side, too.
    assert [float(each) for each in found] == [257 * 512, 257, 257]


def test_counts_that_are_integers_stay_exact() -> None:
    items = torch.tensor([2**24, 1])
    sums = StepSums.of(StepOutput(torch.zeros(2), None, items))
    assert int(sums.num_items) == 2**24 + 1


def test_an_output_without_its_graph_has_the_same_fields() -> None:
    numbers = torch.ones(2, requires_grad=True)
    output = StepOutput(
        numbers * 2, {"logits": numbers * 3}, None, {"hits": numbers * 4}, reduction="sum"
    )
    found = output.detached()
    assert found[4:] == output[4:] == (True, "sum")
    parts = (found.losses, found.outputs["logits"], found.numbers["hits"])
    for factor, part in enumerate(parts, start=2):
        assert torch.equal(part, numbers * factor)
        assert not part.requires_grad
