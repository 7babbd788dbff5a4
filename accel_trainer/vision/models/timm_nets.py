"""timm models by name, with their pretrained weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import safetensors.torch
from torch import nn

from ...core.errors import ConfigError

PREFIX = "timm/"


def build_timm_net(
    name: str,
    *,
    in_channels: int,
    num_classes: int,
    dropout: float,
    recompute: bool,
    pretrained: bool,
) -> nn.Module:
    """Build `timm/NAME` with a new head.

    It has pretrained weights if `pretrained` and NAME has a tag, as in resnet50.a1_in1k. They come
    from the hub, or from its cache if they were downloaded before.

    Raises:
        ConfigError: timm cannot be imported or does not know the name, or the weights cannot be
            downloaded.
    """
    try:
        import timm
    except (ImportError, RuntimeError) as error:
        # A torchvision for another version of torch raises RuntimeError.
        fact = f"--model {name} needs timm, which cannot be imported ({str(error).splitlines()[0]})"
        raise ConfigError(
            "TIMM", f"{fact}: pip install timm, with the torchvision for this torch"
        ) from error
    wanted = name.removeprefix(PREFIX)
    if not timm.is_model(wanted):
        known = timm.list_models(pretrained="." in wanted) + timm.list_models()
        near = get_close_matches(wanted, known, n=1)
        hint = f"did you mean {PREFIX}{near[0]}? " if near else ""
        raise ConfigError(
            "MODEL_NAME", f"timm has no {wanted!r}: {hint}timm.list_models() lists all"
        )
    options: dict[str, Any] = {
        "num_classes": num_classes,
        "in_chans": in_channels,
        "drop_rate": dropout,
    }
    try:
        model: Any = timm.create_model(wanted, pretrained=pretrained and "." in wanted, **options)
    except OSError as error:
        fact = f"the weights of {name} cannot be downloaded ({str(error).splitlines()[0]})"
        fix = f"try again online, or --model {name.partition('.')[0]} with --init-from FILE"
        raise ConfigError("TIMM", f"{fact}: {fix}") from error
    except (RuntimeError, TypeError) as error:
        fact = f"timm cannot build {wanted} ({str(error).splitlines()[0]})"
        raise ConfigError("TIMM", f"{fact}: choose another model") from error
    if pretrained and "." in wanted:
        model.weights_origin = describe_origin(name, model)
    if recompute:
        model.set_grad_checkpointing(True)
    net: nn.Module = model
    return net


def describe_origin(name: str, model: Any) -> str:
    """Return where the weights of a timm model come from, and their SHA-256 without the head."""
    settings = model.pretrained_cfg
    source = settings.get("hf_hub_id") or settings.get("url") or settings.get("file")
    heads = settings["classifier"]
    if not isinstance(heads, tuple):
        heads = (heads,)
    in_heads = tuple(f"{head}." for head in heads)
    body = {key: value for key, value in model.state_dict().items() if not key.startswith(in_heads)}
    digest = hashlib.sha256(safetensors.torch.save(body)).hexdigest()
    origin = f"{name} from {source} (sha256 {digest} without {', '.join(heads)})"
    return f"{origin}: {len(body)} tensors loaded"


def input_settings(model: nn.Module) -> Mapping[str, Any]:
    """Return mean, std, interpolation and crop ratio of a timm model's weights; else nothing."""
    settings = getattr(model, "pretrained_cfg", None)
    if not settings:
        return {}
    names = {
        "mean": "mean",
        "std": "std",
        "interpolation": "interpolation",
        "crop_pct": "crop_ratio",
    }
    return {
        ours: settings[theirs] for theirs, ours in names.items() if settings.get(theirs) is not None
    }
