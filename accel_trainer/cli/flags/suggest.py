"""What a misspelt flag, or one of another toolkit, is called here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from pathlib import Path

from ...core.yaml_files import read_yaml

FAMILIAR_FLAGS = Path(__file__).with_name("familiar_flags.yaml")
_MIN_SIMILARITY = 0.75  # `--step-size` and `--batch-size` have 0.63


def suggest(name: str, known: Collection[str]) -> str:
    """Return a hint: advice or the name of this flag in our package, else the most similar name."""
    plain = name.lstrip("-").replace("_", "-").lower()
    table = read_yaml(FAMILIAR_FLAGS)
    if not name.startswith("-"):  # a key of a file, for which no flag stands in
        table = {ours: names for ours, names in table.items() if not ours.startswith("--")}
    theirs = {plain, re.sub(r"^(trainer|model|data)\.", "", plain)}  # as LightningCLI writes them
    rows = [ours for ours, names in table.items() if theirs & set(names.split())]
    if rows:
        usable = [row for row in rows if not row.startswith("--") or row.split()[0] in known]
        ours = [*usable, "see --help"][0]
        return f"did you mean {ours}?" if ours.startswith("--") else ours
    # Compared by the whole name or its last part. A name that is less similar would mislead.
    spelt = {each.rpartition(".")[2].lstrip("-"): each for each in known}
    spelt |= {each.lstrip("-"): each for each in known}
    nearest = difflib.get_close_matches(plain, spelt, n=1, cutoff=_MIN_SIMILARITY)
    return f"did you mean {spelt[nearest[0]]}?" if nearest else "see --help"
