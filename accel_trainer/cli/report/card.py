"""Writes the model card of an export: training, results, and how to use it without this package."""

from __future__ import annotations

from typing import Any

from ...core.errors import OutputError
from ..common.output import JsonObject, Numbers, format_number
from ..runs.metric_groups import metric_in_words
from ..runs.run_reader import RunReader
from ..runs.settings import changed_settings


def write_card(run: RunReader, config: JsonObject, metrics: Numbers) -> dict[str, bytes]:
    """Return `README.md` with the hub's metadata, and its images, by file name."""
    try:
        from huggingface_hub import ModelCard

        from .charts import draw_curves
        from .templates import fill_in

        curves = draw_curves([run], quantities=("loss", "accuracy"))
        data = _metadata(run, config, metrics)
    except ImportError as error:
        raise OutputError(
            "EXPORT", f"a model card needs {error.name}: pip install 'accel-trainer[report]'"
        ) from error
    text = fill_in(
        "card.md.jinja",
        title=data.model_name,
        config=config,
        split=_split(config),
        metrics={name: format_number(name, value) for name, value in metrics.items()},
        test={
            metric_in_words(name): format_number(name, value)
            for name, value in run.test_numbers().items()
        },
        result=run.result,
        environment=run.environment,
        origin=run.origin,
        training=run.config,
        settings=[(name, value) for name, _, value in changed_settings(run)],
        curves=[curve.name for curve in curves],
    )
    card = str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}"))
    # JSON and YAML may hold half a character, which no file can.
    encoded = card.encode(errors="backslashreplace")
    return {"README.md": encoded} | {f"{curve.name}.png": curve.png for curve in curves}


def _split(config: JsonObject) -> str:
    """Return the name of the evaluated split.

    For a run on photos it is `validation`: these photos also chose the best weights.
    """
    if config["evaluation"].get("photos") is not None:
        return "validation"
    return "test" if "model" in config else "evaluation"


def _metadata(run: RunReader, config: JsonObject, metrics: Numbers) -> Any:
    from huggingface_hub import EvalResult, ModelCardData

    dataset = run.dataset or "unknown"
    name = config.get("model", {}).get("name")  # None: a user's own model
    task = "other" if name is None else "image-classification"
    return ModelCardData(
        library_name="pytorch",
        pipeline_tag=None if name is None else task,
        tags=["accel_trainer", *([] if name is None else [name])],
        model_name=run.name if name is None else f"{name} on {dataset}",
        eval_results=[
            EvalResult(
                task_type=task,
                dataset_type=dataset,
                dataset_name=dataset,
                dataset_split=_split(config),
                dataset_revision=run.data_fingerprint,
                metric_type=name,
                metric_value=value,
            )
            for name, value in metrics.items()
        ],
    )
