"""The groups of metrics that a run logs: of each evaluation set with each weights, and of the test.

An evaluation's is `eval`, for a named set `eval_hard`, and with averaged weights `eval_ema` and
`eval_ema_hard`. The numbers of the test set are in `test`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Weights = Literal["model", "ema"]

TEST_GROUP = "test"


def weights_of_metric(metric: str) -> Weights:
    """Return the weights that a metric such as `eval_ema/loss` was measured with."""
    return "ema" if metric.startswith("eval_ema") else "model"


def evaluation_groups(metrics: Iterable[str]) -> list[str]:
    """Return the groups of the evaluations among `metrics`, in their order."""
    groups = dict.fromkeys(metric.partition("/")[0] for metric in metrics if "/" in metric)
    return [group for group in groups if group.startswith("eval")]


def preferred_groups(metrics: Iterable[str]) -> list[str]:
    """Return the groups of the evaluations among `metrics`, those of averaged weights first."""
    return sorted(evaluation_groups(metrics), key=lambda group: weights_of_metric(group) != "ema")


def group_of_weights(weights: str, metrics: Iterable[str]) -> str | None:
    """Return the first group of `weights`, which are `model` or `ema`, or text that begins so.

    That is the group of the first evaluation set; None if there is no such group in `metrics`.
    """
    kind = "ema" if weights.startswith("ema") else "model"
    groups = evaluation_groups(metrics)
    return next((group for group in groups if weights_of_metric(group) == kind), None)


def group_in_words(group: str) -> str:
    """Return what was evaluated: empty for `eval`, `averaged hard` for `eval_ema_hard`."""
    name = group.replace("eval_ema", "averaged", 1).removeprefix("eval")
    return name.replace("_", " ").strip()


def metric_in_words(metric: str) -> str:
    """Return a metric as people say it: `accuracy`, `averaged hard accuracy` or `test accuracy`."""
    group, _, name = metric.partition("/")
    return f"{group_in_words(group)} {name}".strip()
