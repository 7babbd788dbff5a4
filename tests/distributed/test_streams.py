"""What a copy in the background does on an accelerator is in `tests/test_pretend.py`."""

from __future__ import annotations

import pytest
import torch

from accel_trainer.distributed.streams import has_streams, record_events


@pytest.mark.parametrize("kind", ["cpu", "mps", "meta"])
def test_a_device_without_streams_has_no_copies_in_the_background(kind: str) -> None:
    assert not has_streams(torch.device(kind))


def test_without_streams_there_is_nothing_to_wait_for() -> None:
    record_events(torch.device("cpu"))()
