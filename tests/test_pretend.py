"""The rules of the accelerator that pretends (`pretend.py`), each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from . import processes


def refuses_a_cpu_tensor_among_its_own() -> None:
    ours, theirs = torch.ones(2).to("pretend"), torch.ones(2)
    assert (ours * 2 + torch.tensor(1.0)).tolist() == [3, 3], "but for a number"
    for mix in (
        lambda: ours + theirs,
        lambda: torch.stack([theirs, ours]),
        lambda: nn.Linear(2, 1)(ours),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            mix()


def notes_what_the_host_waits_for() -> None:
    from .pretend import device

    ours = torch.arange(3.0, device="pretend") + 1
    assert device.syncs == []
    waits = (
        ours.sum().item,
        ours.tolist,
        ours.cpu,
        lambda: bool(ours[0] > 0),
        lambda: ours[ours > 1],
        ours.nonzero,
    )
    for number, wait in enumerate([*waits, lambda: torch.ones(2).to("pretend")], start=1):
        wait()
        assert len(device.syncs) == number
    assert device.syncs[0].startswith("test_pretend.py:")


def gets_a_pinned_copy_when_it_is_waited_for() -> None:
    from .pretend import device

    pinned = torch.ones(2).pin_memory()
    stream = torch.Stream("pretend")
    training = torch.accelerator.current_stream()
    with stream:
        sent = pinned.to("pretend", non_blocking=True)
    sent.record_stream(training)
    early = sent * 1
    training.wait_stream(stream)
    late = (sent * 1).to("cpu", non_blocking=True)
    assert late.isnan().all()
    training.record_event().synchronize()
    assert device.syncs == []
    assert late.tolist() == [1, 1]
    assert early.isnan().tolist() == [True, True]


def sends_what_the_host_writes_too_early() -> None:
    pinned = torch.ones(2).pin_memory()
    sent = pinned.to("pretend", non_blocking=True)
    pinned.zero_()
    assert sent.tolist() == [0, 0]


def waits_for_a_copy_that_is_not_pinned() -> None:
    from .pretend import device

    torch.ones(2).to("pretend", non_blocking=True)
    assert len(device.syncs) == 1


def refuses_memory_of_another_stream() -> None:
    with torch.Stream("pretend"):
        made = torch.zeros(2, device="pretend")
    with pytest.raises(RuntimeError, match="record_stream"):
        made.add(1)


def refuses_float64_if_asked_to() -> None:
    from .pretend import device

    ours = torch.ones(2, device="pretend")
    ours.double()
    device.refuses_float64 = True
    theirs = torch.ones(2, dtype=torch.float64)
    for wide in (ours.double, lambda: theirs.to("pretend"), lambda: ours.sum(dtype=torch.float64)):
        with pytest.raises(TypeError, match="float64"):
            wide()


def draws_random_numbers_of_its_own() -> None:
    torch.manual_seed(1)
    first = torch.rand(3)
    ours = torch.rand(3, device="pretend")
    second = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.cat([first, second]), torch.rand(6))
    assert torch.equal(ours.cpu(), torch.rand(3, device="pretend").cpu())


@pytest.mark.parametrize(
    "rule",
    [
        refuses_a_cpu_tensor_among_its_own,
        notes_what_the_host_waits_for,
        gets_a_pinned_copy_when_it_is_waited_for,
        sends_what_the_host_writes_too_early,
        waits_for_a_copy_that_is_not_pinned,
        refuses_memory_of_another_stream,
        refuses_float64_if_asked_to,
        draws_random_numbers_of_its_own,
    ],
    ids=lambda rule: rule.__name__,
)
def test_the_device_that_pretends(tmp_path: Path, rule: Callable[[], None]) -> None:
    processes.run_on("pretend", rule, folder=tmp_path)
