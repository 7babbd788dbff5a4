"""Groups the trained parameters by their settings, and freezes parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from os.path import commonprefix
from typing import Any

from torch import nn

from ..core.errors import ConfigError
from ..core.learning_rate import RATIO
from .config import OptimizerConfig, pattern_values

_BLOCK = re.compile(r"(?:[^.]+\.)*?\d+(?=\.)")  # up to the first part of the name that is a number
_IN_STAGE = re.compile(r"\.(?:(?:blocks?|layers?)\.)?(?P<number>\d+)(?=\.)")
_HEAD = re.compile(r"(?:^|\.)(?:heads?|fc|classifier|score|lm_head)\.")


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Split the trainable parameters into groups of equal settings.

    The settings follow from the number of dimensions, the name and the depth of a parameter.
    """
    groups: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}
    depths = layer_depths(model) if config.layer_decay else {}
    if depths and len({*depths.values()}) < 3:
        raise ConfigError(
            "CONFIG",
            "--optimizer.layer-decay goes by numbered blocks such as blocks.0, and the names "
            f"({', '.join(depths)[:80]}) have fewer than two beside a stem or a head: leave it "
            "out, or set --optimizer.learning-rate-scales",
        )
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    scales = _values_by_name(trained, "learning_rate_scales", config)
    decays = _values_by_name(trained, "weight_decays", config)
    for name, parameter in trained.items():
        settings = _settings(parameter.ndim, config)
        if config.layer_decay is not None:
            height = max(depths.values()) - depths[name]
            scales[name] = scales.get(name, 1.0) * config.layer_decay**height
        if name in scales:
            settings[RATIO] = scales[name]
        settings["weight_decay"] = decays.get(name, settings["weight_decay"])
        group = groups.setdefault(
            tuple(settings.items()), {"params": [], "param_names": [], **settings}
        )
        group["params"].append(parameter)
        group["param_names"].append(name)
    return list(groups.values())


def _values_by_name(
    names: Iterable[str], setting: str, config: OptimizerConfig
) -> dict[str, float]:
    """Return the value of each name that a pattern finds; of several patterns, the last counts.

    Raises ConfigError if a pattern finds no name.
    """
    values: dict[str, float] = {}
    for pattern, value in pattern_values(config, setting).items():
        found = [name for name in names if re.search(pattern, name)]
        if not found:
            raise ConfigError(
                "CONFIG",
                f"optimizer.{setting} has {pattern!r}, which matches no trained parameter "
                f"({', '.join(names)[:80]}): correct it",
            )
        values |= dict.fromkeys(found, value)
    return values


def _settings(num_dimensions: int, config: OptimizerConfig) -> dict[str, Any]:
    """Return the settings of a parameter's group that differ from those of the optimizer."""
    if config.name == "muon" and num_dimensions > 2:
        return {
            "weight_decay": 0.0,
            "momentum": 0.0,
            "nesterov": False,
            "filter_momentum": config.filter_momentum,
        }
    decays = num_dimensions > 1 or config.decay_norms_and_biases
    return {"weight_decay": config.weight_decay if decays else 0.0, RATIO: 1.0}


def layer_depths(model: nn.Module) -> dict[str, int]:
    """Return the depth of each parameter by name, from 0 at the input, by the numbered blocks.

    `layer1.0.conv1.weight` is in the block `layer1.0`, `blocks.3.attn.qkv.bias` in `blocks.3`. A
    number in a stage counts, too, if its blocks are of one class: `stages.0.blocks.2`. What stands
    before all names, as of a wrapper, is left out. Names without a number are in the head if they
    are called so, or come after the first block, else in the stem. This is usual in fine-tuning
    vision transformers since BEiT (arXiv 2106.08254).
    """
    names = [name for name, _ in model.named_parameters()]
    start = commonprefix(names).rfind(".") + 1
    blocks: dict[str, int] = {}
    depths: dict[str, int | None] = {}
    for name in names:
        if block := _BLOCK.match(name, start):
            if inner := _IN_STAGE.match(name, block.end()):
                stage = model.get_submodule(name[: inner.start("number") - 1])
                if len({*map(type, stage.children())}) == 1:
                    block = inner
            key = name[: block.end()]
            if any(each.startswith(f"{key}.") for each in blocks):
                key += " behind its blocks"
            depths[name] = blocks.setdefault(key, len(blocks) + 1)
        else:
            depths[name] = None if blocks or _HEAD.search(name) else 0
    return {name: len(blocks) + 1 if depth is None else depth for name, depth in depths.items()}


def freeze(model: nn.Module, pattern: str) -> None:
    """Stop the training of the parameters whose name the regular expression `pattern` finds.

    Raises:
        ConfigError: it finds none of them, or all.
    """
    parameters = dict(model.named_parameters())
    found = [name for name in parameters if re.search(pattern, name)]
    if not found or len(found) == len(parameters):
        raise ConfigError(
            "FREEZE",
            f"--freeze {pattern!r} matches {'all' if found else 'none'} of the {len(parameters)} "
            f"parameters ({', '.join([*parameters][:3])}): it must match some, not all",
        )
    for name in found:
        parameters[name].requires_grad_(False)


def describe_parameters(model: nn.Module) -> str:
    """Return the number of parameters, and how many of them are frozen."""
    total = sum(p.numel() for p in model.parameters())
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    return f"{total:,} parameters" + f", {frozen:,} of them frozen" * (frozen > 0)
