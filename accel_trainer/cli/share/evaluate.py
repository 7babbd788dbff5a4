"""`accel-trainer evaluate MODEL`: measure a stored model's loss and accuracy on labelled images.

MODEL is a run, one of its checkpoints, an export, or ORG/NAME on the hub. Images are prepared with
the transform that is stored with the model. With the data and the batch size of the run, you get
exactly the numbers that the run measured.

example: accel-trainer evaluate runs/first --dataset photos
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...core.errors import CheckpointError, ConfigError
from ...core.types import Results
from ...distributed.accelerator import RuntimeConfig, start_accelerator
from ...distributed.machine import available_cpus
from ...distributed.placement import place_model
from ...training.evaluation.evaluation import run_evaluation
from ...training.evaluation.evaluator import Evaluator
from ...vision.metrics import classification_metrics
from ...vision.pretrained import (
    ExportConfig,
    from_pretrained,
    read_export_config,
    read_export_content,
)
from ...vision.tasks import ImageClassificationConfig, ImageClassificationTask
from ..common.output import JsonObject, both_ends, format_number, format_table, tell, tell_json
from ..common.parser import CommandParser
from ..runs.confusion import read_confusion
from ..runs.metric_groups import Weights
from ..runs.run_reader import RunReader
from .best_so_far import opened_export
from .evaluation_data import DataChoice, load_eval_data
from .export import evaluation_of, run_of
from .onnx_model import is_own_model

_BATCH_SIZE = 500
_SHOWN_METRICS = ("loss", "accuracy", "top5_accuracy")
# The settings of `runtime` that change the numbers.
_RUNTIME_SETTINGS = ("num_threads", "channels_last", "deterministic", "tf32")


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model on the CPU, and what is known of it."""

    model: nn.Module
    config: ExportConfig
    """What the model expects as its input."""
    weights: str
    """Which weights these are, as text."""
    run: RunReader | None
    """The run that trained the model; None if its folder is not there."""
    evaluation: Mapping[str, Any]
    """The settings that change the numbers, as an export records them."""


def main(argv: Sequence[str]) -> int:
    """Print the metrics, and the best and worst classes."""
    parser = CommandParser(__doc__)
    parser.add_model()
    parser.add_argument(
        "--dataset", metavar="DATA", help="name or folder; default: the data of the run"
    )
    parser.add_argument(
        "--split",
        metavar="NAME",
        help="default: the split that a run evaluates on, or the only one",
    )
    parser.add_argument(
        "--weights",
        choices=("model", "ema"),
        help="which weights of a checkpoint; default: ema if it has them",
    )
    parser.add_number("--batch-size", "default: the run's batch size", lowest=1)
    parser.add_data_options()
    parser.add_json_option("print one JSON object, with the confusion matrix")
    options = parser.parse_args(argv)
    stored = load_model(options.model, weights=options.weights)
    settings = stored.run.config if stored.run is not None else {}
    dataset = options.dataset or settings.get("dataset")
    if dataset is None:
        raise ConfigError(
            "USAGE", f"{options.model} does not record what it was evaluated on: set --dataset"
        )
    choice = DataChoice(
        dataset=dataset,
        split=options.split,
        image_column=options.image_column,
        label_column=options.label_column,
        of_run=(settings.get("photos") or {}) if _is_data_of(stored.run, dataset) else None,
        cache_dir=options.cache_dir,
    )
    stored_batch_size = (settings.get("batch") or {}).get("eval_batch_size")
    batch_size = options.batch_size or stored_batch_size or _BATCH_SIZE
    num_workers = available_cpus() if options.num_workers is None else options.num_workers
    metrics, described = evaluate(stored, choice, batch_size=batch_size, num_workers=num_workers)
    described = {"model": str(options.model), "weights": stored.weights, **described}
    class_names = stored.config.class_names
    if options.json:
        plain = {
            name: value.tolist() if isinstance(value, Tensor) else value
            for name, value in metrics.items()
        }
        tell_json({**described, "class_names": class_names, "metrics": plain})
        return 0
    tell("{model}, {weights}, on {dataset} ({split}, {num_samples:,} images)".format(**described))
    shown = [name for name in _SHOWN_METRICS if name in metrics]
    rows = [[name, format_number(name, metrics[name])] for name in shown]
    tell(format_table(["metric", "value"], rows))
    tell(format_table(["class", "images", "accuracy"], _class_rows(metrics, class_names)))
    return 0


def _is_data_of(run: RunReader | None, dataset: str) -> bool:
    """Whether a run is on this dataset: the same name, or the same folder in any spelling."""
    if run is None:
        return False
    named = str(run.config.get("dataset"))
    command = run.environment.get("command") or {}
    from_there = os.path.join(str(command.get("directory") or ""), named)
    given, *places = (
        os.path.realpath(os.path.expanduser(each)) for each in (dataset, named, from_there)
    )
    return given in places


def load_model(path: Path, *, weights: Weights | None) -> StoredModel:
    """Return the model at `path`; `weights` chooses the weights of a checkpoint.

    Raises:
        CheckpointError: there is no model, or it is damaged.
        ConfigError: `weights` is given and `path` is no checkpoint.
    """
    run = run_of(path)
    with opened_export(path, weights=weights) as export:
        content = read_export_content(export)
        if is_own_model(export):
            fact = f"{path} is a custom model, which only its recipe can evaluate"
            fix = "start the recipe with --init-from EXPORT/model.safetensors --epochs 0"
            raise CheckpointError("EXPORT", f"{fact}: {fix}")
        return StoredModel(
            model=from_pretrained(export),
            config=read_export_config(export),
            weights=str(content.get("weights", "exported weights")),
            run=run,
            evaluation=content.get("evaluation", {}) if run is None else evaluation_of(run),
        )


def evaluate(
    stored: StoredModel, choice: DataChoice, *, batch_size: int, num_workers: int
) -> tuple[JsonObject, JsonObject]:
    """Return the metrics, and a description of the data they were measured on."""
    settings = stored.evaluation
    seed = settings.get("seed")
    runtime = _runtime(stored)
    task = {name: settings[name] for name in ("tta", "ignore_index") if name in settings}
    accelerator = start_accelerator(runtime)
    data = load_eval_data(
        choice,
        stored.config,
        batch_size=batch_size,
        num_workers=num_workers,
        device=accelerator.device,
    )
    model = place_model(stored.model, accelerator, runtime)
    evaluator = Evaluator(
        data.loader,
        task=ImageClassificationTask(ImageClassificationConfig(**task)),
        metrics=classification_metrics(len(stored.config.class_names)),
        accelerator=accelerator,
        seed=seed if isinstance(seed, int) else 0,
    )
    results = run_evaluation(evaluator, model, accelerator)
    return results, {
        "dataset": choice.dataset,
        "split": data.split,
        "num_samples": data.loader.num_samples,
    }


def _runtime(stored: StoredModel) -> RuntimeConfig:
    """Return the precision, and the run's threads and layout if it is known."""
    settings = {} if stored.run is None else stored.run.config.get("runtime") or {}
    kept = {name: settings[name] for name in _RUNTIME_SETTINGS if name in settings}
    return RuntimeConfig(**kept, mixed_precision=stored.evaluation.get("mixed_precision"))


def _class_rows(metrics: Results, names: Sequence[str]) -> list[list[str]]:
    """Return a row per class with images, the worst first; of many only the worst and the best."""
    confusion = read_confusion(metrics)
    assert confusion is not None
    classes = zip(confusion.accuracy.tolist(), names, confusion.samples(), strict=True)
    seen = sorted(each for each in classes if each[2])
    return both_ends([[name, f"{count:,}", f"{accuracy:.1%}"] for accuracy, name, count in seen])
