"""Finds what a start of a run would refuse or warn of."""

from __future__ import annotations

from ...checks.preflight import refuse_launch
from ...core.errors import ConfigError
from ...distributed.determinism import is_too_late_for_cublas
from ...run.session import find_warnings
from .findings import Finding, LaunchContext


def examine_start(now: LaunchContext) -> list[Finding]:
    """Return what a start of this process would refuse or warn of."""
    found: list[Finding] = []
    try:
        warned = find_warnings(now.config, is_too_late_for_cublas=is_too_late_for_cublas())
        found += [Finding(code, "warning", message, now.rank) for code, message in warned.items()]
        refuse_launch(now.config.runtime)
    except ConfigError as error:
        return [*found, Finding(error.code, "error", error.message, now.rank)]
    return found
