"""What a run predicts of some pictures, and its worst mistakes.

Shapes: N samples of the evaluation, B batch, K classes, H height, W width, C channels.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..core.filesystem import writes_to
from ..core.json_files import write_json
from ..core.types import Batch, StepOutput
from ..training.callback import Callback, RunResult, TrainerView
from ..training.evaluation.metrics import check_labels

Row = dict[str, Any]
"""What is known of a sample, by name."""

MISTAKES_FILE = "mistakes.json"
_MEASURED = "/worst_mistakes"
_NUM_KEPT = 24
_NUM_EXAMPLES = 16
_MAX_SIDE = 96  # pixels of a stored picture


class PictureReader(Protocol):
    """A reader whose samples can be shown."""

    def picture_of(self, sample_id: int) -> Tensor:
        """Return what the model sees of a sample before it is normalised, uint8 [H, W, C]."""

    def name_of(self, sample_id: int) -> str:
        """Describe where the sample comes from."""


class PictureLoader(Protocol):
    """An evaluation loader of a `PictureReader`."""

    num_samples: int

    @property
    def reader(self) -> PictureReader:
        """What reads the samples."""


class WorstMistakes(Callback):
    """Finds the mistakes that a classifier is most sure of, among all samples of an evaluation.

    It is a metric and a callback: give it to a trainer as both. As a metric it returns
    `worst_mistakes`, the id, label, prediction and probability of each, and `predictions`, the same
    of evenly spaced samples, right or wrong. As a callback it writes both lists of the last
    evaluation to `mistakes.json`.
    """

    higher_is_better: ClassVar[Mapping[str, bool]] = {}

    def __init__(self, run_folder: Path, loader: PictureLoader, class_names: Sequence[str]) -> None:
        self._folder = run_folder
        self._loader = loader
        self._class_names = class_names

    def empty(self, device: torch.device) -> Tensor:
        """Return [4, N]: probability of the prediction, prediction, label, and 1 if it counts."""
        return torch.zeros(4, self._loader.num_samples, dtype=torch.float64, device=device)

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        """Place the predictions of logits [B, K], and the labels [B], at their sample ids."""
        is_counted = check_labels(batch, output)
        probabilities, predictions = output.outputs.float().softmax(1).max(1)
        for row, values in enumerate((probabilities, predictions, batch.targets, is_counted)):
            sums[row].index_add_(0, batch.sample_ids, values.double())

    def compute(self, sums: Tensor) -> dict[str, Any]:
        """Return the worst mistakes, and some predictions.

        The surest mistake comes first; of two that are equally sure, the one with the lower id.
        """
        sums = sums.nan_to_num()
        wrong = sums[0].masked_fill(sums[1] == sums[2], 0)
        worst = wrong.argsort(descending=True, stable=True)[:_NUM_KEPT]
        counted = sums[3].nonzero().flatten()
        num_examples = min(_NUM_EXAMPLES, len(counted))
        places = [number * len(counted) // num_examples for number in range(num_examples)]
        return {
            "worst_mistakes": _rows(sums, worst[wrong[worst] > 0]),
            "predictions": _rows(sums, counted[places]),
        }

    def on_fit_end(self, trainer: TrainerView, result: RunResult) -> None:
        """Write those of the last evaluation, with the averaged weights if there are any."""
        groups = [name.partition("/")[0] for name in result.metrics if name.endswith(_MEASURED)]
        if not groups or not trainer.accelerator.is_main_process:
            return
        group = min(groups, key=lambda group: not group.startswith("eval_ema"))
        content = {
            "optimizer_step": result.position.optimizer_step,
            "weights": group,
            "mistakes": self._shown(result.metrics[f"{group}{_MEASURED}"]),
            "predictions": self._shown(result.metrics[f"{group}/predictions"]),
        }
        with writes_to(self._folder):
            write_json(self._folder / MISTAKES_FILE, content)

    def _shown(self, rows: Sequence[Row]) -> list[Row]:
        """Return rows as people read them, with the pictures."""
        reader = self._loader.reader
        return [
            {
                "id": row["id"],
                "name": reader.name_of(row["id"]),
                "label": self._class_names[row["label"]],
                "prediction": self._class_names[row["prediction"]],
                "probability": row["probability"],
                "picture": encode_png(reader.picture_of(row["id"]), max_side=_MAX_SIDE),
            }
            for row in rows
        ]


def _rows(sums: Tensor, ids: Tensor) -> list[Row]:
    """Return what is known of some samples, of the sums [4, N]."""
    columns = zip(ids.tolist(), *sums[:3, ids].tolist(), strict=True)
    return [
        {
            "id": sample_id,
            "label": int(label),
            "prediction": int(prediction),
            "probability": probability,
        }
        for sample_id, probability, prediction, label in columns
    ]


def encode_png(pixels: Tensor, *, max_side: int) -> str:
    """Return uint8 [H, W, C], made smaller to fit `max_side`, as a data URL of a PNG."""
    from PIL import Image

    array = pixels.numpy()
    picture = Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)
    picture.thumbnail((max_side, max_side))
    data = io.BytesIO()
    picture.save(data, "png")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
