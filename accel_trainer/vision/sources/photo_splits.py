"""All splits of a dataset of photos, as they are stored: for commands that do not train.

Shapes: N samples, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...core.errors import DataError
from ...core.logger import logger
from .class_names import Names
from .held_out import train_and_val
from .links import refuse_two_classes
from .notes import facts_about, warnings_about
from .photo_columns import ImageColumn, read_columns
from .photo_files import open_dataset
from .photos import fingerprint_photos
from .raw import PhotoSplit


@dataclass(frozen=True, kw_only=True)
class PhotoSplits:
    """The photos of each split, by the split's name; the split to train on is the first.

    `notes` are the warnings and `facts` the other lines of a run on these photos.
    """

    splits: Mapping[str, PhotoSplit]
    images: Mapping[str, ImageColumn]
    class_names: Names
    fingerprint: str
    notes: tuple[str, ...]
    facts: tuple[str, ...]

    def stored_name(self, split: str, index: int) -> str | None:
        """Return a photo's path relative to its folder, or in its archive; None: it has no path."""
        return self.images[split].stored_name(index)


def load_splits(
    source: str,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    cache_dir: Path | None = None,
) -> PhotoSplits:
    """Return every split of a folder or a hub name; the arguments are as in `load_photos`.

    A split whose labels cannot be used, such as a test split without labels, is left out with a
    warning, unless a run would use it.

    Raises:
        ConfigError: a column does not exist.
        DataError: there are no photos, or no labels.
    """
    data = open_dataset(source, cache_dir=cache_dir, label_column=label_column)
    try:
        of_run = [split for split in train_and_val(data, source) if split is not None]
    except DataError:
        of_run = []  # it may be there to be evaluated on alone
    needed = {
        name: split for name, split in data.splits.items() if any(split is each for each in of_run)
    }
    chosen = needed | dict(data.splits)
    read = partial(read_columns, data, image_column=image_column, label_column=label_column)
    try:
        columns = read(list(chosen.values()))
    except DataError as error:
        if len(needed) in (0, len(chosen)):
            raise
        columns = read(list(needed.values()))
        left_out = ", ".join(name for name in chosen if name not in needed)
        logger.warning("left out: %s (%s)", left_out, error.message)
        chosen = needed
    refuse_two_classes(columns)
    splits = dict(zip(chosen, columns.splits, strict=True))
    # Named as in the notes of a run.
    named = {"training" if name == "train" else name: split for name, split in splits.items()}
    used = {name: split for name, split in named.items() if len(split)}
    fingerprint, notes = fingerprint_photos(used, columns.names, columns.class_names)
    return PhotoSplits(
        splits=splits,
        images=dict(zip(chosen, columns.images, strict=True)),
        class_names=columns.class_names,
        fingerprint=fingerprint,
        notes=(*warnings_about(data, columns), *notes),
        facts=facts_about(data, columns, used=of_run),
    )
