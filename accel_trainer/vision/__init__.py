"""Images: data sets, augmentation, loaders and models. The engine never imports this package."""

from .augment.batch import AugmentConfig
from .data.bad_images import BadImageConfig
from .data.datasets import load_images
from .data.images import ImageDataset, ImageSplit, Normalization
from .data.loader import ImageEvalLoader, ImageLoader
from .models.build import build_image_loaders
from .models.whitening import whiten
from .models.zoo import MODEL_NAMES, ModelConfig, build_model
from .sources.find import DATASET_NAMES

__all__ = [
    "DATASET_NAMES",
    "MODEL_NAMES",
    "AugmentConfig",
    "BadImageConfig",
    "ImageDataset",
    "ImageEvalLoader",
    "ImageLoader",
    "ImageSplit",
    "ModelConfig",
    "Normalization",
    "build_image_loaders",
    "build_model",
    "load_images",
    "whiten",
]
