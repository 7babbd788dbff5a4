"""What a step launches on an accelerator and waits for, counted where an accelerator pretends."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks import loops

from .. import processes

NUM_STEPS = 24
SETTLED = range(8, NUM_STEPS - 4)


class Counted(loops.Stamped):
    """Notes at each forward what the device has done by then."""

    unsaved_attributes = (*loops.Stamped.unsaved_attributes, "places")

    def forward(self, inputs: Tensor) -> Tensor:
        from ..pretend import device

        if self.training:
            self.places = [
                *getattr(self, "places", ()),
                (len(device.operations), len(device.syncs)),
            ]
        return super().forward(inputs)


def count_of(loop: str) -> tuple[list[str], list[str]]:
    """Return what a step of `loop` launches, and what the host waits for in it."""
    from ..pretend import device

    model = Counted(loops.make_model("tiny").inner).to("pretend")
    batches = loops.Batches((32,), NUM_STEPS, "pretend")
    device.operations.clear()
    device.syncs.clear()
    loops.LOOPS[loop](model, DataLoader(batches, batch_size=None), NUM_STEPS)
    steps = [
        (device.operations[start:end], device.syncs[first:last])
        for (start, first), (end, last) in zip(model.places, model.places[1:], strict=False)
    ]
    settled = [steps[number] for number in SETTLED]
    assert all(step == settled[0] for step in settled), "each step does the same"
    return settled[0]


# Of the six, the momentum's and the update's of weight and bias: on a GPU, one kernel takes both.
FOREACH = 3
# Labels on a device are checked there, forward and backward.
LABEL_CHECK = 11


def compare_with_a_raw_loop() -> None:
    raw, _ = count_of("raw")
    ours, waits = count_of("ours, all on")
    assert len(ours) <= len(raw) - FOREACH + 1 + LABEL_CHECK, (ours, raw)
    assert waits == []


def test_a_step_launches_a_raw_loops_operations_and_one_more(tmp_path: Path) -> None:
    """Besides the check of the labels."""
    processes.run_on("pretend", compare_with_a_raw_loop, folder=tmp_path)
