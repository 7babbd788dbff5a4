"""Public names, commands and flags that are gone, and what to use: docs/releases.md lists them."""

from __future__ import annotations

from collections.abc import Iterable

from .core.errors import ConfigError

REMOVED = {
    "accel_trainer.DatasetLoader": "accel_trainer.TrainLoader",
    "accel_trainer.DatasetEvalLoader": "accel_trainer.EvalLoader",
    "accel_trainer.StreamLoader": "accel_trainer.StreamReader",
    "accel_trainer.StreamEvalLoader": "accel_trainer.StreamReader",
    "accel_trainer.build_stream_loaders": "accel_trainer.StreamReader",
    "accel_trainer.DistillationTask": "recipes/distill.py",
    "accel_trainer.EvaluateMetric": "accel_trainer.WholeSetMetric",
    "accel_trainer.vision.ImageLoader": "accel_trainer.vision.AugmentedImageReader",
    "accel_trainer.vision.ImageEvalLoader": "accel_trainer.vision.ImageReader",
    "accel_trainer.vision.PhotoLoader": "accel_trainer.vision.AugmentedPhotoReader",
    "accel_trainer.vision.PhotoEvalLoader": "accel_trainer.vision.PhotoReader",
    "accel_trainer.commands.LiveCell": "accel-trainer watch in an IFrame of IPython",
    "accel_trainer.commands.write_html": "an HTML template of your own",
    "accel_trainer.commands.write_table": "accel_trainer.commands.format_table",
    "accel_trainer.commands.write_own_file": "accel_trainer.commands.filesystem",
    "accel_trainer.commands.refuse_other_file": "pathlib.Path.exists",
    "accel-trainer audit": "accel-trainer rerun",
    "accel-trainer diff": "accel-trainer report RUN RUN, or why",
    "accel-trainer bisect --page": "--json",
    "accel-trainer compare --page": "--json",
    "accel-trainer compare --null": "accel-trainer sweep --seed 0 1 2",
    "accel-trainer report --dataset": "accel-trainer data --html",
    "accel-trainer sweep --values": "flags with several values; a shell loop for lists",
    "accel-trainer export --trained": "export/pretrained of peft; or pick the names you trained",
    "accel-trainer export --hub": "--to DIR; then hf upload ORG/NAME DIR",
    "accel-trainer why --page": "--json; accel-trainer report draws the curves",
    "accel-trainer plan --hours": "--hours with --schedule.shape trunk",
    "accel-trainer plan --within": "the whole run's time; --hours with --schedule.shape trunk",
    "accel-trainer plan --start": "--hours of the recipe, with --schedule.shape trunk",
}


def refuse_removed(name: str) -> None:
    """Raise ImportError if `name` was public once: an AttributeError says less."""
    if name in REMOVED:
        raise ImportError(_instead_of(name))


def refuse_removed_command(command: str, flags: Iterable[str] = ()) -> None:
    """Raise ConfigError if there was once such a command, or a command with one of these flags."""
    for words in ((command,), *((command, flag.partition("=")[0]) for flag in flags)):
        if (old := " ".join(("accel-trainer", *words))) in REMOVED:
            raise ConfigError("USAGE", _instead_of(old))


def _instead_of(old: str) -> str:
    return f"{old} is gone: use {REMOVED[old]}, see docs/releases.md"
