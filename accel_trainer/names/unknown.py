"""What a misspelt name, or one of another toolkit, is called here: of a flag or a keyword."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from .everyday import flag_of, in_python

FAMILIAR_NAMES = Path(__file__).with_name("familiar_names.yaml")
_MIN_SIMILARITY = 0.75  # `--step-size` and `--batch-size` have 0.63


def suggest(name: str, known: Collection[str]) -> str:
    """Return a hint: advice or the name of this flag in our package, else the most similar name."""
    plain = name.lstrip("-").replace("_", "-").lower()
    table = familiar_names()
    if not name.startswith("-"):  # a key of a file, for which no flag stands in
        table = {ours: names for ours, names in table.items() if not ours.startswith("--")}
    theirs = {plain, re.sub(r"^(trainer|model|data)\.", "", plain)}  # as LightningCLI writes them
    rows = [ours for ours, names in table.items() if theirs & set(names.split())]
    usable = [row for row in rows if not row.startswith("--") or row.split()[0] in known]
    if usable:
        return f"did you mean {usable[0]}?" if usable[0].startswith("--") else usable[0]
    # Compared by the whole name or its last part. A name that is less similar would mislead.
    spelt = {each.rpartition(".")[2].lstrip("-"): each for each in known}
    spelt |= {each.lstrip("-"): each for each in known}
    cutoff = 1.0 if rows else _MIN_SIMILARITY
    nearest = difflib.get_close_matches(plain, spelt, n=1, cutoff=cutoff)
    return f"did you mean {spelt[nearest[0]]}?" if nearest else "see --help"


def attribute_here(name: str | None) -> str:
    """Return what a trainer's, run's or result's attribute elsewhere is here, empty if unknown."""
    name = f".{name}".replace("_", "-")
    rows = [ours for ours, names in familiar_names().items() if name in names.split()]
    return f" ({rows[0]})" if rows else ""


def familiar_names() -> dict[str, str]:
    """Return the names elsewhere of each of our flags, and of what we have no flag for."""
    found: dict[str, Any] = yaml.safe_load(FAMILIAR_NAMES.read_text(encoding="utf-8"))
    return found


def describe_unknown(
    owner: str, given: Iterable[str], known: Collection[str], elsewhere: Mapping[str, str]
) -> str | None:
    """Return what the first name in `given` is called that is none of the `known` keywords.

    `elsewhere` has how Python writes what other flags set, such as `start_run(epochs=)`. None: all
    names are known.
    """
    spelt = {**elsewhere, **{flag_of(name): f"{name}=" for name in known}}
    for name in given:
        if name not in known:
            hint = suggest(flag_of(name), spelt).replace("--help", f"help({owner})")
            return f"{owner} has no {name}=: {in_python(hint, spelt)}"
    return None
