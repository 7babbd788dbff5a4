"""Public names that are gone, and what to use instead; docs/releases.md has the same table."""

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
