"""Background copies between the host and a device, on any accelerator that has streams."""

from __future__ import annotations

from collections.abc import Callable

import torch


def has_streams(device: torch.device) -> bool:
    """Return whether `device` is an accelerator with streams, for copies in the background."""
    accelerator = torch.accelerator.current_accelerator()
    # MPS is an accelerator without streams.
    return accelerator is not None and device.type == accelerator.type != "mps"


def record_events(*devices: torch.device) -> Callable[[], None]:
    """Return a function that waits for the work queued on `devices` by now, not for later work."""
    events = [
        torch.accelerator.current_stream(device).record_event()
        for device in devices
        if has_streams(device)
    ]

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait
