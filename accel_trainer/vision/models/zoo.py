"""The models: their names, their settings, and how to build them.

Shapes: B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Any, Literal, TypedDict

from torch import nn

from ...core.config import Config, short_flag
from ...core.errors import ConfigError
from .airbench import Airbench
from .blocks import Norm
from .resnet import BasicBlock, BottleneckBlock, ResNet, Stem
from .resnet9 import ResNet9
from .timm_nets import PREFIX, RESNETS, build_timm_net, load_timm_weights, read_keywords

_CIFAR_BLOCKS = {f"resnet{depth}": (depth - 2) // 6 for depth in (8, 20, 32, 44, 56, 110)}
_IMAGENET_STAGES: dict[str, tuple[tuple[int, ...], type[BasicBlock] | type[BottleneckBlock]]] = {
    "resnet18": ((2, 2, 2, 2), BasicBlock),
    "resnet34": ((3, 4, 6, 3), BasicBlock),
    "resnet50": ((3, 4, 6, 3), BottleneckBlock),
    "resnet101": ((3, 4, 23, 3), BottleneckBlock),
}
_LARGE_IMAGES = 64  # pixels of the shorter side from which the stem is the one for large images
# Channels of the groups as multiples of the width, default width, whether the groups are residual,
# and momentum of the norms.
_AIRBENCH: dict[str, tuple[tuple[int, ...], int, bool, float]] = {
    "airbench94": ((1, 4, 4), 64, False, 0.4),
    "airbench96": ((1, 3, 4), 128, True, 0.1),
}

MODEL_NAMES: tuple[str, ...] = (*_CIFAR_BLOCKS, "resnet9", *_AIRBENCH, *_IMAGENET_STAGES)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """Which model to train."""

    name: Annotated[str, short_flag("--model")] = "resnet20"
    """`resnet8`/20/32/44/56/110, `airbench94`/96, `resnet9`, `resnet18`/34/50/101, or `timm/NAME`.
    A timm model is pretrained with `--pretrained`, or if NAME has a tag, as in
    `timm/resnet50.a1_in1k`."""
    pretrained: Annotated[bool, short_flag("--pretrained")] = False
    """Start from timm's weights: a `timm/NAME`, or `resnet18`/34/50/101."""
    width: int | None = None
    """Channels of the first trained layer; every other layer scales with it. None: as in the
    paper."""
    stem: Literal["auto", "cifar", "imagenet"] = "auto"
    """First layers of `resnet18` to `resnet101`: `cifar` keeps the size of the images, `imagenet`
    divides it by 4 (a fifteenth of the work). `auto`: `imagenet` for images of 64 pixels or more on
    their shorter side."""
    norm: Norm = "batch"
    """`batch`, or `group` (over groups of channels), which does not depend on the micro-batch."""
    dropout: float = 0.0
    """Fraction of features dropped before the head."""
    keywords: tuple[str, ...] = ()
    """`NAME=VALUE`: keywords of a timm model, such as `drop_path_rate=0.1`."""
    activation_checkpointing: bool = False
    """Recompute activations in backward instead of storing them: less memory, more time."""

    def __post_init__(self) -> None:
        if self.name.startswith(PREFIX):
            self._check_timm()
        elif self.name not in MODEL_NAMES:
            near = get_close_matches(self.name, MODEL_NAMES, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                "MODEL_NAME",
                f"no model {self.name!r}: {hint}choose one of {', '.join(MODEL_NAMES)}, "
                "or timm/NAME with a NAME of timm.list_models()",
            )
        elif self.keywords:
            fact = f"--model.keywords has no effect on {self.name}, which is not a timm model"
            raise ConfigError("MODEL_KEYWORDS", f"{fact}: leave it out")
        if self.width is not None and self.width < 1:
            raise ConfigError("MODEL_WIDTH", f"--model.width is {self.width}: set it to 1 or more")
        if self.stem not in ("auto", "cifar", "imagenet"):
            raise ConfigError(
                "MODEL_STEM", f"--model.stem is {self.stem!r}: set it to auto, cifar or imagenet"
            )
        if self.stem == "imagenet" and self.name not in _IMAGENET_STAGES:
            nets = ", ".join(_IMAGENET_STAGES)
            raise ConfigError(
                "MODEL_STEM",
                f"{self.name} has no --model.stem imagenet: set --model to one of {nets}",
            )
        if self.pretrained and not self.name.startswith(PREFIX):
            self._check_pretrained()
        if self.norm not in ("batch", "group"):
            raise ConfigError(
                "MODEL_NORM", f"--model.norm is {self.norm!r}: set it to batch or group"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(
                "MODEL_DROPOUT",
                f"--model.dropout is {self.dropout}: set it to 0 or more and below 1",
            )

    @property
    def is_pretrained(self) -> bool:
        """Whether a new run starts from the weights of timm."""
        return self.pretrained or (self.name.startswith(PREFIX) and "." in self.name)

    def _check_pretrained(self) -> None:
        if self.name not in RESNETS:
            nets = ", ".join(RESNETS)
            raise ConfigError(
                "MODEL_PRETRAINED",
                f"{self.name} has no pretrained weights: set --model to {nets} or timm/NAME",
            )
        if self.width is not None or self.stem == "cifar" or self.norm != "batch":
            raise ConfigError(
                "MODEL_PRETRAINED",
                "pretrained weights do not fit a different width, stem or norm: "
                "leave out --model.width, --model.stem and --model.norm",
            )

    def _check_timm(self) -> None:
        read_keywords(self.keywords)
        for name in ("width", "stem", "norm"):
            if getattr(self, name) != getattr(ModelConfig, name):
                fact = f"--model.{name} has no effect on {self.name}"
                raise ConfigError("MODEL_NAME", f"{fact}: leave it out")


class _Shared(TypedDict):
    """The arguments that every architecture takes."""

    norm: Norm
    dropout: float
    recompute: bool
    in_channels: int
    num_classes: int


def build_model(
    config: ModelConfig,
    *,
    in_channels: int,
    num_classes: int,
    image_size: Sequence[int] | None = None,
    pretrained: bool = True,
) -> nn.Module:
    """Build a model of images [B, C, H, W] that returns logits [B, K].

    C is `in_channels`, and K is `num_classes`. The `auto` stem depends on `image_size`, H and W;
    None: the stem for small images. With `pretrained`, the model gets timm's weights if `config`
    asks for them; a run that is resumed needs none.

    Raises:
        ConfigError: a model of timm cannot be built, or its weights cannot be downloaded.
    """
    if config.name.startswith(PREFIX):
        return build_timm_net(
            config.name,
            in_channels=in_channels,
            num_classes=num_classes,
            dropout=config.dropout,
            keywords=config.keywords,
            recompute=config.activation_checkpointing,
            pretrained=pretrained and config.is_pretrained,
        )
    build = model_call(
        config,
        in_channels=in_channels,
        num_classes=num_classes,
        image_size=image_size,
    )
    model: nn.Module = build()
    if pretrained and config.pretrained:
        load_timm_weights(model, config.name, in_channels=in_channels)
    return model


def model_call(
    config: ModelConfig, *, in_channels: int, num_classes: int, image_size: Sequence[int] | None
) -> partial[Any]:
    """Return a call that builds a model of this package: its class and all arguments."""
    shared: _Shared = {
        "norm": config.norm,
        "dropout": config.dropout,
        "recompute": config.activation_checkpointing,
        "in_channels": in_channels,
        "num_classes": num_classes,
    }
    if config.name == "resnet9":
        return partial(ResNet9, width=config.width or 64, **shared)
    if config.name in _AIRBENCH:
        factors, width, is_residual, norm_momentum = _AIRBENCH[config.name]
        widths = tuple(factor * (config.width or width) for factor in factors)
        return partial(
            Airbench,
            widths=widths,
            is_residual=is_residual,
            norm_momentum=norm_momentum,
            **shared,
        )
    if config.name in _IMAGENET_STAGES:
        blocks_per_stage, block = _IMAGENET_STAGES[config.name]
        return partial(
            ResNet,
            blocks_per_stage,
            block=block,
            width=config.width or 64,
            stem=_choose_stem(config, image_size),
            shortcut="projection",
            **shared,
        )
    return partial(
        ResNet,
        (_CIFAR_BLOCKS[config.name],) * 3,
        block=BasicBlock,
        width=config.width or 16,
        stem="cifar",
        shortcut="pad",
        **shared,
    )


def _choose_stem(config: ModelConfig, image_size: Sequence[int] | None) -> Stem:
    if config.stem != "auto":
        return config.stem
    if config.pretrained:
        return "imagenet"
    return "imagenet" if image_size is not None and min(image_size) >= _LARGE_IMAGES else "cifar"
