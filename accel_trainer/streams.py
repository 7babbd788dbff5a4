"""Copies between the host and a device that run in the background, on any accelerator that has streams."""

from __future__ import annotations

from collections.abc import Callable

import torch


def has_streams(device: torch.device) -> bool:
    """Return whether `device` is an accelerator with streams, by which copies run in the background. MPS has none."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type != "mps"


def arrival(*devices: torch.device) -> Callable[[], None]:
    """Return a function that waits for the copies queued on `devices` so far, and not for what comes after them."""
    events = [torch.accelerator.current_stream(device).record_event() for device in devices if has_streams(device)]

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait
