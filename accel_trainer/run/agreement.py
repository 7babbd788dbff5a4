"""Checks that code, settings and data are the same on all processes of a run."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path

from accelerate import Accelerator

from ..core.errors import ConfigError
from ..distributed.accelerator import library_versions
from ..distributed.collectives import differing_lines
from .config import RecipeConfig, describe_shared


def describe_identity(config: RecipeConfig) -> dict[str, str]:
    """Return what must be the same on all processes, by name: versions, sources and config."""
    sources = [*sorted(Path(__file__).parents[1].rglob("*.py")), Path(sys.argv[0])]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources if path.is_file()))
    return {
        **library_versions(),
        "code": digest.hexdigest(),
        "config": describe_shared(config),
    }


def check_same_everywhere(values: Mapping[str, str], accelerator: Accelerator) -> None:
    """Raise on all processes if a named value differs from the main process's. **Collective.**

    The message shows the first line that differs if a value has several lines.
    """
    listed = []
    for name, value in values.items():
        found = differing_lines(value, accelerator)
        lines = {process: line for process, line in enumerate(found) if line}
        if lines:
            shown = f" ({next(iter(lines.values()))})" if "\n" in value else ""
            listed.append(f"{name} on {', '.join(map(str, lines))}{shown}")
    if listed:
        raise ConfigError(
            "PROCESSES_DIFFER",
            f"not the same as on process 0: {'; '.join(listed)}. Install the same software, copy "
            "the same code and data to every machine, start all processes in the same way, and do "
            "not let the recipe depend on the process or on the order of a set (sort its names)",
        )
