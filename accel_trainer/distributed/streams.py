"""Copies between the host and a device that run in the background, on any accelerator that has streams."""

from __future__ import annotations

from collections.abc import Callable

import torch


def has_streams(device: torch.device) -> bool:
    """Return whether copies to `device` can run in the background: an accelerator with streams, which MPS lacks."""
    if device.type in ("cpu", "mps"):
        # without a question that torch 2.6 answers with an error where there is no accelerator
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type


def arrival(*devices: torch.device) -> Callable[[], None]:
    """Return a function that waits for what is queued on `devices` now, and not for later work."""
    events = [
        torch.accelerator.current_stream(device).record_event()
        for device in devices
        if has_streams(device)
    ]

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait
