"""Handles images that cannot be used: stops at the first, or leaves a few out and lists them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from ...core.config import BELOW_ONE, Config, short_flag
from ...core.errors import DataError
from ..sources.raw import RawSplit
from .photo_decode import Pixels


class BadImage(NamedTuple):
    """An image that cannot be used: error code and message."""

    code: str
    message: str


@dataclass(frozen=True, kw_only=True)
class BadImageConfig(Config):
    """What to do about images that cannot be decoded, are missing, or differ in size or mode."""

    policy: Annotated[Literal["error", "skip"], short_flag("--on-bad-image")] = "error"
    """`error` stops at the first unusable image; `skip` leaves them out, on all processes."""
    max_fraction: float = 0.001
    """The largest fraction (0..1) of the images of a split that `skip` may leave out; more are an
    error."""

    def __post_init__(self) -> None:
        BELOW_ONE.check(self, "bad_images", "max_fraction")

    def check(self, left_out: Sequence[BadImage], *, num_images: int) -> None:
        """Raise DataError if too many of a split's `num_images` are in `left_out`."""
        if left_out and self.policy == "error":
            first = left_out[0]
            raise DataError(
                first.code, f"{first.message}, or leave such images out with --on-bad-image skip"
            )
        if len(left_out) > self.max_fraction * num_images:
            fact = (
                f"{len(left_out)} of {num_images} images cannot be used, the last because "
                f"{left_out[-1].message}; at most {self.max_fraction:.4g} of them may be left out"
            )
            raise DataError(
                "DATA_BAD_IMAGES", f"{fact}: fix the data, or raise --bad-images.max-fraction"
            )

    def usable(
        self, split: RawSplit, left_out: list[BadImage], *, start: int = 0
    ) -> Iterator[tuple[int, Pixels]]:
        """Yield index and pixels [H, W, C] of the usable images from `start` on.

        The other images are appended to `left_out`.

        Raises:
            DataError: too many images are left out.
        """
        for index in range(start, len(split.labels)):
            try:
                image = split.image_at(index)
            except DataError as error:
                left_out.append(BadImage(error.code, error.message))
                self.check(left_out, num_images=len(split.labels))
            else:
                yield index, image


WHATEVER_WAS_KEPT = BadImageConfig(policy="skip", max_fraction=0.999)
"""For commands that read the data of a run, which may have left images out."""
