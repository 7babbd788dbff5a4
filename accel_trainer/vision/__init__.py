"""Images: data sets, augmentation, loaders and models. The engine never imports this package."""

from .augment import AugmentConfig
from .bad_images import BadImageConfig
from .build import build_image_loaders
from .datasets import load_images
from .images import ImageDataset, ImageSplit, Normalization
from .loader import ImageEvalLoader, ImageLoader
from .sources import DATASET_NAMES
from .whitening import whiten
from .zoo import MODEL_NAMES, ModelConfig, build_model

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
