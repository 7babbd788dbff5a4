"""Describes in one line what a run trains on: the classes and the augmentation."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.wording import counted
from ..augment.batch import AugmentConfig
from ..augment.photo import PhotoAugmentConfig

_NUM_NAMED = 4


def describe(
    class_names: Sequence[str], augment: AugmentConfig | PhotoAugmentConfig, *, source: object
) -> str:
    """Return a line, such as `2 classes (cat, dog) from photos, augmentation: random flips`.

    `source` is the data as the config names it; None: it names none.
    """
    named = [*map(_printable, class_names[:_NUM_NAMED])]
    named += ["..."] * (len(class_names) > _NUM_NAMED)
    changes = ", ".join(_changes(augment)) or "none"
    classes = counted(len(class_names), "class")
    where = "" if source is None else f" from {_printable(str(source))}"
    return f"{classes} ({', '.join(named)}){where}, augmentation: {changes}"


def _printable(name: str) -> str:
    """Return a name from a folder, a file or a user without a character that steers a terminal."""
    return name if name.isprintable() else ascii(name)


def _changes(augment: AugmentConfig | PhotoAugmentConfig) -> list[str]:
    """Return what is changed at random, a few words each."""
    own: dict[str, object]
    moved = f"crop moved by up to {counted(augment.crop_padding, 'pixel')}"
    if isinstance(augment, AugmentConfig):
        own = {
            moved: augment.crop_padding,
            f"cutout of {counted(augment.cutout, 'pixel')}": augment.cutout,
        }
    else:
        own = {
            "random-resized crop": augment.crop == "random-resized",
            moved: augment.crop == "padded" and augment.crop_padding,
            "colour jitter": any(augment.color_jitter),
            augment.policy: augment.policy != "none",
            f"erasing with probability {augment.erase:g}": augment.erase,
        }
    shared = {
        f"{augment.flip} flips": augment.flip != "none",
        f"mixup {augment.mixup:g}": augment.mixup,
        f"cutmix {augment.cutmix:g}": augment.cutmix,
    }
    return [words for words, is_used in (own | shared).items() if is_used]
