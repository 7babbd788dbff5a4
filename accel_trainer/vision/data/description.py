"""Describes in one line what a run trains on: the classes and the augmentation."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.wording import counted
from ..augment.batch import AugmentConfig
from ..augment.photo import PhotoAugmentConfig

_NUM_NAMED = 4


def describe(class_names: Sequence[str], augment: AugmentConfig | PhotoAugmentConfig) -> str:
    """Return a line, such as `2 classes (cat, dog), augmentation: random flips`."""
    # Names come from folders and files: no control character may reach a terminal.
    named = [name if name.isprintable() else ascii(name) for name in class_names[:_NUM_NAMED]]
    named += ["..."] * (len(class_names) > _NUM_NAMED)
    changes = ", ".join(_changes(augment)) or "none"
    classes = counted(len(class_names), "class")
    return f"{classes} ({', '.join(named)}), augmentation: {changes}"


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
