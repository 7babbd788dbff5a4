"""A metric of the `evaluate` library: the mean F1 score of the classes.

A copy on disk needs no network. `evaluate.load("f1")` would load a similar one from the hub.
"""

import datasets
import evaluate
from sklearn.metrics import f1_score


class MacroF1(evaluate.Metric):
    """The F1 score of each class, and the mean over the classes."""

    def _info(self) -> evaluate.MetricInfo:
        number = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            features=datasets.Features({"predictions": number, "references": number}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {"macro_f1": float(f1_score(references, predictions, average="macro"))}
