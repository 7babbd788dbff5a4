"""timm models by name, with their pretrained weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import safetensors.torch
from torch import nn

from ...core.errors import ConfigError, reason_of
from ...core.yaml_files import parse_yaml

Keywords = dict[str, Any]
"""Keyword arguments of a timm model."""
PREFIX = "timm/"
_SIZE_OF_RESNETS = 224
_KEYWORD = re.compile(
    r"(?!pretrained|checkpoint_path|cache_dir|num_classes|in_chans|drop_rate|features_only)[a-z]\w*"
)
RESNETS = {
    "resnet18": "resnet18.a1_in1k",
    "resnet34": "resnet34.a1_in1k",
    "resnet50": "resnet50.a1_in1k",
    "resnet101": "resnet101.a1h_in1k",
}
"""Our nets whose parameters have the names and shapes of timm's, and their weights there."""


def build_timm_net(
    name: str,
    *,
    in_channels: int,
    num_classes: int,
    dropout: float,
    keywords: Sequence[str],
    recompute: bool,
    pretrained: bool,
) -> nn.Module:
    """Build `timm/NAME` with a new head, and with its own `keywords`, each NAME=VALUE.

    If `pretrained`, it has the weights of the tag in NAME, such as resnet50.a1_in1k, or else of
    timm's default tag. They come from the hub, or from its cache if they were downloaded before.

    Raises:
        ConfigError: timm cannot be imported or does not know the name, or the weights cannot be
            downloaded.
    """
    timm = _import_timm(f"--model {name}", "")
    wanted = name.removeprefix(PREFIX)
    if not timm.is_model(wanted):
        known = timm.list_models(pretrained="." in wanted) + timm.list_models()
        near = get_close_matches(wanted, known, n=1)
        hint = f"did you mean {PREFIX}{near[0]}? " if near else ""
        raise ConfigError(
            "MODEL_NAME", f"timm has no {wanted!r}: {hint}timm.list_models() lists all"
        )
    options = {"num_classes": num_classes, "in_chans": in_channels, "drop_rate": dropout}
    options |= read_keywords(keywords)
    fix = f"--model {name.partition('.')[0]}"
    model = _create(timm, wanted, options, pretrained=pretrained, fix=fix)
    if pretrained:
        model.weights_origin = describe_origin(name, model)
    if recompute:
        model.set_grad_checkpointing(True)
    net: nn.Module = model
    return net


def read_keywords(texts: Sequence[str]) -> Keywords:
    """Return keywords of a timm model, whose values are YAML, from NAME=VALUE.

    Raises ConfigError for another text, and for keywords of ours, or with which timm reads files.
    """
    found: Keywords = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not _KEYWORD.fullmatch(name) or not value:
            raise ConfigError(
                "MODEL_KEYWORDS",
                f"--model.keywords {text}: give NAME=VALUE with a keyword of the model, such as "
                "drop_path_rate=0.1; what the recipe sets itself, and files, cannot be given",
            )
        found |= parse_yaml(f"{name}: {value}")
    return found


def load_timm_weights(net: nn.Module, name: str, *, in_channels: int) -> None:
    """Load timm's weights into one of `RESNETS`, except for its head.

    Raises:
        ConfigError: timm cannot be imported, or the weights cannot be downloaded.
    """
    wanted = RESNETS[name]
    fix = f"--model {name}"
    timm = _import_timm("--pretrained", f"; or {_bring(f'{PREFIX}{wanted}', fix)}")
    model = _create(timm, wanted, {"in_chans": in_channels}, pretrained=True, fix=fix)
    weights = model.state_dict()
    net.load_state_dict({key: weights[key] for key in weights if key[:3] != "fc."}, strict=False)
    net.weights_origin = describe_origin(f"{PREFIX}{wanted}", model)  # type: ignore[assignment]  # no tensor


def expected_size(name: str, *, pretrained: bool) -> int | None:
    """Return the size in pixels of the photos that a net expects; None: it takes any size.

    A net with pretrained weights expects theirs. One that timm does not know has no size here.

    Raises ConfigError if timm cannot be imported.
    """
    if not name.startswith(PREFIX):
        return _SIZE_OF_RESNETS if pretrained else None
    timm = _import_timm(f"--model {name}", "")
    try:
        settings = timm.get_pretrained_cfg(name.removeprefix(PREFIX))
    except RuntimeError:  # a tag that does not exist
        settings = None
    if settings is None or not (pretrained or settings.fixed_input_size):
        return None
    return int(settings.input_size[-1])


def _import_timm(what: str, otherwise: str) -> Any:
    try:
        import timm
    except (ImportError, RuntimeError) as error:
        # A torchvision for another version of torch raises RuntimeError.
        fact = f"{what} needs timm, which cannot be imported ({reason_of(error)})"
        raise ConfigError(
            "TIMM", f"{fact}: pip install timm, with the torchvision for this torch{otherwise}"
        ) from error
    return timm


def _create(timm: Any, wanted: str, options: Keywords, *, pretrained: bool, fix: str) -> Any:
    try:
        return timm.create_model(wanted, pretrained=pretrained, **options)
    except OSError as error:
        place = timm.get_pretrained_cfg(wanted).hf_hub_id
        fact = f"the weights of {place} cannot be downloaded ({reason_of(error)})"
        raise ConfigError("TIMM", f"{fact}: {_bring(place, fix)}") from error
    except (RuntimeError, TypeError) as error:
        fact = f"timm cannot build {wanted} ({reason_of(error)})"
        raise ConfigError("TIMM", f"{fact}: choose a different model") from error


def _bring(place: str, fix: str) -> str:
    """Return how to bring weights to a machine without network, or without timm."""
    url = f"https://huggingface.co/{place}/resolve/main/model.safetensors"
    return f"download {url} elsewhere, and start with {fix} --init-from model.safetensors"


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
