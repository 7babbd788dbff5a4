"""The version of this package."""

from __future__ import annotations

from importlib import metadata


def package_version() -> str:
    """Return the version that is installed, or `not installed` for sources on PYTHONPATH."""
    try:
        return metadata.version("accel-trainer")
    except metadata.PackageNotFoundError:
        return "not installed"
