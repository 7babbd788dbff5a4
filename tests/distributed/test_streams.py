"""What a copy in the background does on an accelerator is in `tests/test_pretend.py`."""

from __future__ import annotations

import pytest
import torch

from accel_trainer.distributed.streams import arrival, has_streams, start_copy


@pytest.mark.parametrize("kind", ["cpu", "mps", "meta"])
def test_a_device_without_streams_has_no_copies_in_the_background(kind: str) -> None:
    assert not has_streams(torch.device(kind))


def test_without_streams_a_copy_has_arrived_at_once_and_is_a_copy() -> None:
    number = torch.tensor(2.5, requires_grad=True)
    read = start_copy(number)
    with torch.no_grad():
        number.add_(1)
    assert read() == 2.5
    arrival(torch.device("cpu"))()
