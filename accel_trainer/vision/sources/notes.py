"""Describes what a run uses of a source of photos, and what it leaves out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .class_names import names_in_two_cases
from .listing import describe_left_out, no_data
from .photo_columns import Columns
from .raw import Opened, Split


def facts_about(data: Opened, columns: Columns, *, used: Sequence[Split]) -> tuple[str, ...]:
    """Return lines about the columns, the splits and the files that a run uses."""
    unused = [
        name for name, split in data.splits.items() if not any(split is each for each in used)
    ]
    lines = ["images from column {}, classes from column {}".format(*columns.names)]
    if not data.has_columns:
        lines = ["classes from the names of folders"]
    if unused:
        lines.append(f"not used: split {', '.join(unused)}")
    return (
        *lines,
        *data.facts,
        *describe_left_out(no_data(data.left_out)),
        *names_in_two_cases(columns.class_names),
    )


def warnings_about(data: Opened, columns: Columns) -> list[str]:
    """Return a line for each reason to leave out data, and one for labels that may be numbers."""
    notes = describe_left_out([each for each in data.left_out if each.is_loss])
    labels = [split.labels for split in columns.splits]
    if labels[0].ndim == 1:
        found = np.concatenate(labels)
        num_classes = len(np.unique(found))
        if 10 * num_classes > 9 * len(found):
            fact = f"{len(found):,} photos have {num_classes:,} classes"
            notes.append(f"{fact}: check that --label-column holds classes, not numbers or names")
    return notes
