"""Tells which modules are trained in a mode that their user may not expect."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..checkpoint.format import LoadedCheckpoint
from ..core.errors import CheckpointError, listed
from ..core.logger import logger

KEPT_IN_EVALUATION = "kept_in_evaluation"
"""The key of a manifest for the names of the modules that `--freeze` keeps in evaluation mode."""


def describe_switched(given: Collection[str], kept: Mapping[str, nn.Module]) -> str:
    """Return a line for the banner about modules that were built in evaluation mode."""
    if not (switched := [name for name in given if name not in kept]):
        return ""
    return (
        f"\ntrained, though built in evaluation mode: {listed(switched)}; to keep it so: "
        f"--freeze '^{re.escape(switched[0])}[.]', or a train() of the model's own"
    )


def warn_of_untrained_norms(kept: Mapping[str, nn.Module]) -> None:
    """Warn of norms in the `kept` modules that have seen no sample. **Host sync.**"""
    norms: dict[str, Any] = {
        path: each
        for name, module in kept.items()
        for path, each in module.named_modules(prefix=name)
        if isinstance(getattr(each, "running_mean", None), Tensor)
    }
    untrained = [
        name
        for name, norm in norms.items()
        if not norm.running_mean.any() and (norm.running_var == 1).all()
    ]
    if untrained:
        logger.warning(
            "[FREEZE] --freeze keeps %s in evaluation mode, with mean 0 and variance 1 throughout, "
            "as new norms have: start from trained weights (--init-from), or leave it out of the "
            "pattern",
            listed(untrained),
        )


def refuse_older_rule(
    checkpoint: LoadedCheckpoint | None, model: nn.Module, kept: Mapping[str, nn.Module]
) -> None:
    """Refuse to continue a run of an older version if other norms stayed in evaluation mode.

    `model` is in training mode. Raises CheckpointError.
    """
    if checkpoint is None or KEPT_IN_EVALUATION in checkpoint.manifest:
        return
    trained = [name for name, norm in _below_frozen(model) if norm.training and name not in kept]
    if trained:
        raise CheckpointError(
            "CKPT_STATE",
            f"the run began with a version that kept {listed(trained)} in evaluation mode, since "
            "their parameters are frozen: keep them so by overriding the model's train(), or by "
            "--freeze REGEX --allow-change optimizer.freeze",
        )


def _below_frozen(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the norms that are frozen, or have no parameters and follow a frozen module."""
    is_frozen = False
    for name, module in model.named_modules():
        if parameters := list(module.parameters(recurse=False)):
            is_frozen = not any(each.requires_grad for each in parameters)
        if is_frozen and hasattr(module, "running_mean"):
            yield name, module
