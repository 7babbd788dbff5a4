"""Images: datasets, augmentation, loaders, models and tasks.

The engine never imports this package.
"""

from typing import Any

from ..public_names import refuse_unknown
from .augment.batch import AugmentConfig
from .augment.photo import PhotoAugmentConfig
from .data.bad_images import BadImageConfig
from .data.cache import load_images
from .data.eval_transform import EvalTransform
from .data.image_reader import AugmentedImageReader, ImageReader
from .data.images import ImageDataset, ImageSplit, Normalization
from .data.loaders import build_image_loaders, build_photo_loaders
from .data.photo_reader import AugmentedPhotoReader, PhotoDataset, PhotoReader
from .metrics import classification_metrics
from .mistakes import WorstMistakes
from .models.whitening import whiten
from .models.zoo import MODEL_NAMES, ModelConfig, build_model
from .png import to_png
from .pretrained import from_pretrained
from .rules import BY_RULE, PhotoRecipeConfig, settings_for
from .sources.find import DATASET_NAMES
from .sources.photos import PhotoConfig, Photos, load_photos
from .sources.raw import PhotoSplit
from .tasks import ImageClassificationConfig, ImageClassificationTask, SegmentationTask

__all__ = [
    "BY_RULE",
    "DATASET_NAMES",
    "MODEL_NAMES",
    "AugmentConfig",
    "AugmentedImageReader",
    "AugmentedPhotoReader",
    "BadImageConfig",
    "EvalTransform",
    "ImageClassificationConfig",
    "ImageClassificationTask",
    "ImageDataset",
    "ImageReader",
    "ImageSplit",
    "ModelConfig",
    "Normalization",
    "PhotoAugmentConfig",
    "PhotoConfig",
    "PhotoDataset",
    "PhotoReader",
    "PhotoRecipeConfig",
    "PhotoSplit",
    "Photos",
    "SegmentationTask",
    "WorstMistakes",
    "build_image_loaders",
    "build_model",
    "build_photo_loaders",
    "classification_metrics",
    "from_pretrained",
    "load_images",
    "load_photos",
    "settings_for",
    "to_png",
    "whiten",
]


def __getattr__(name: str) -> Any:
    refuse_unknown(__name__, name, __all__)
