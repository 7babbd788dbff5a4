"""The groups of metrics that an evaluation logs, and the weights that each was measured with."""

from __future__ import annotations

from typing import Literal

Weights = Literal["model", "ema"]

_GROUP_OF: dict[Weights, str] = {"ema": "eval_ema", "model": "eval"}
EVALUATION_GROUPS = tuple(_GROUP_OF.values())
"""The groups of evaluations; the one of the averaged weights, which is preferred, is first."""


def weights_of_metric(metric: str) -> Weights:
    """Return the weights that a metric such as `eval_ema/loss` was measured with."""
    return "ema" if metric.startswith("eval_ema/") else "model"


def group_of_weights(weights: str) -> str:
    """Return the group of the metrics of `weights`: `model` or `ema`, or text that begins so."""
    return _GROUP_OF["ema" if weights.startswith("ema") else "model"]
