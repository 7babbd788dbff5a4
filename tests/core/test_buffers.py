from __future__ import annotations

import torch
from torch import Tensor, nn

from accel_trainer.core.buffers import BufferCopy, StepBuffers, buffer_places, buffers_at


class Counted(nn.Module):
    """Buffers of two dtypes, one of which may be assigned or None, in a child."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("unset", None)

    def values(self) -> list[list[float]]:
        return [buffer.flatten().tolist() for buffer in self.buffers()]


def test_buffers_are_found_by_their_full_names() -> None:
    model = Counted()
    places = buffer_places(model)
    names = [name for name, _ in model.named_buffers()]
    assert len(places) == len(names)
    assert places[names.index("norm.running_mean")] == (model.norm, "running_mean")


def test_buffers_that_a_forward_assigns_are_found_where_they_are_now() -> None:
    model = Counted()
    places = buffer_places(model)
    model.mean = torch.ones(2)
    assert any(found is model.mean for found in buffers_at(places))


def test_a_copy_of_buffers_brings_back_values_in_the_same_tensors() -> None:
    model = Counted()
    before = list(model.buffers())
    copied = BufferCopy(buffer_places(model))
    for buffer in model.buffers():
        buffer.add_(7)
    copied.put_back()
    assert all(now is then for now, then in zip(model.buffers(), before, strict=True))
    assert model.values() == Counted().values()


def test_a_copy_of_buffers_brings_back_the_value_of_an_assigned_buffer() -> None:
    model = Counted()
    copied = BufferCopy(buffer_places(model))
    model.mean = torch.ones(3)
    copied.put_back()
    assert model.mean.tolist() == [0, 0]
    model.mean.add_(1)
    copied.put_back()
    assert model.mean.tolist() == [0, 0], "the copy is not the buffer itself"


def test_a_copy_of_buffers_that_is_taken_again_has_the_new_shape() -> None:
    model = Counted()
    copied = BufferCopy(buffer_places(model))
    model.mean = torch.ones(5)
    copied.take()
    model.mean.zero_()
    copied.put_back()
    assert model.mean.tolist() == [1] * 5


def test_a_buffer_that_was_none_becomes_none_again() -> None:
    model = Counted()
    copied = BufferCopy([(model, "unset")])
    model.unset = torch.ones(2)
    copied.put_back()
    assert model.unset is None


def forward(model: Counted, value: float) -> Tensor:
    model.mean.fill_(value)
    return model.mean


def test_the_history_of_buffers_goes_back_one_step_or_two() -> None:
    model = Counted()
    history = StepBuffers(model)
    for value in (1.0, 2.0, 3.0):
        history.save()
        forward(model, value)
    assert any(torch.equal(copied, torch.full((2,), 2.0)) for copied in history.saved)
    history.restore(steps_ago=1)
    assert model.mean.tolist() == [1, 1]
    history.restore()
    assert model.mean.tolist() == [2, 2]
