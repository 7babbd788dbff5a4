"""The smallest and the largest of a batch's targets, known on the host before they are sent."""

from __future__ import annotations

from contextlib import suppress

from torch import Tensor

Ends = tuple[float, float]

_MAX_SIZE = 1 << 18  # for more, the host takes longer than a check on the device


def extremes(values: object) -> Ends | None:
    """Return the smallest and the largest of a tensor [*]; None if the host does not know them.

    On a device, it knows what was noted and has not been changed since. No host sync.
    """
    version, ends = getattr(values, "noted_extremes", (None, None))
    if not isinstance(values, Tensor) or (ends and version == values._version):
        return ends
    if values.is_cpu and values.numel() <= _MAX_SIZE:
        with suppress(RuntimeError):  # of none, and of complex, sparse and nested ones
            lowest, highest = values.detach().aminmax()
            return float(lowest), float(highest)
    return None


def note_extremes(values: object, ends: Ends | None) -> None:
    """Note that all `values` lie between `ends`, None if that is not known."""
    if ends is not None and isinstance(values, Tensor) and not values.is_inference():
        values.noted_extremes = values._version, ends  # type: ignore[attr-defined]
