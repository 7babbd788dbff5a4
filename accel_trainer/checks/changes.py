"""Tells what has changed around a run since its checkpoint was saved."""

from __future__ import annotations

from ..checkpoint.format import Manifest
from ..core.logger import logger


def warn_of_changes(checkpoint: str, stored: Manifest, now: Manifest) -> None:
    """Warn if libraries, threads or processes have changed: the last bits may differ."""
    names = [*now["versions"], "num_processes", "num_threads"]
    if now.get("reduce") == "exact":
        names.remove("num_processes")
    after = {**now, **now["versions"]}
    before = {**after, **stored, **stored["versions"]}
    if changed := [
        f"{name} {before[name]} -> {after[name]}" for name in names if before[name] != after[name]
    ]:
        logger.warning(
            "changed since %s was saved: %s; the results may differ in the last bits",
            checkpoint,
            ", ".join(changed),
        )
