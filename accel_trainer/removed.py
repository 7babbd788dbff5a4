"""Public names and flags that are gone, and what to use instead, as docs/releases.md lists them."""

from __future__ import annotations

from collections.abc import Iterable

from .core.errors import ConfigError

REMOVED = {
    "DatasetLoader": "TrainLoader",
    "DatasetEvalLoader": "EvalLoader",
    "StreamLoader": "StreamReader",
    "StreamEvalLoader": "StreamReader",
    "build_stream_loaders": "StreamReader",
    "vision.ImageLoader": "vision.AugmentedImageReader",
    "vision.ImageEvalLoader": "vision.ImageReader",
    "vision.PhotoLoader": "vision.AugmentedPhotoReader",
    "vision.PhotoEvalLoader": "vision.PhotoReader",
}


def refuse_removed(name: str) -> None:
    """Raise ImportError if `accel_trainer.<name>` was public once: an AttributeError says less."""
    if name in REMOVED:
        raise ImportError(
            f"accel_trainer.{name} is gone: use accel_trainer.{REMOVED[name]}, see docs/releases.md"
        )


REMOVED_FLAGS = {
    "plan --hours": "--within; or --hours with --schedule.shape trunk",
    "plan --start": "--hours of the recipe, with --schedule.shape trunk",
}


def refuse_removed_flags(command: str, flags: Iterable[str]) -> None:
    """Raise ConfigError if a command had one of these flags once."""
    for flag in flags:
        if (old := f"{command} {flag}") in REMOVED_FLAGS:
            fact = f"{old} is gone: use {REMOVED_FLAGS[old]}"
            raise ConfigError("CONFIG", f"{fact}, see docs/releases.md")
