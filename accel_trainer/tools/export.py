"""`accel-trainer export RUN --to DIR | --hub ORG/NAME`: the trained model with its source and a card of its facts."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from .. import storage
from ..errors import OutputError
from ..hub import ExportConfig, find_export, read_export_config
from ..run_folder import prepare_directory
from .plain_model import write_source
from .run_reader import RunReader, read_run
from .tables import format_number

_MAX_WEIGHTS_BYTES = 2**36
_EXAMPLE = "example: accel-trainer export runs/first --to model"
# How a step is named in what a run says of its exported weights.
_STEP = re.compile(r"step[- ](\d+)")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the export, or push it, and print where it is."""
    parser = argparse.ArgumentParser(prog="accel-trainer export", description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("run", type=Path, help="a finished run")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--to", type=Path, help="the folder to write")
    target.add_argument(
        "--hub", metavar="ORG/NAME", help="the hub repository to push to; made private if it is new"
    )
    options = parser.parse_args(argv)
    run = read_run(options.run)
    if options.to is not None:
        export(run, options.to)
        print(options.to)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        export(run, Path(folder))
        print(_push(Path(folder), options.hub))
    return 0


def export(run: RunReader, folder: Path) -> None:
    """Write weights, config, source and card of a run's model to `folder`.

    Raises:
        CheckpointError: the run left no model, or not one of ours.
        OutputError: the folder cannot be written, or the run's records contradict each other.
    """
    source = find_export(run.folder)
    described = read_export_config(source)
    metrics = reported_metrics(run)
    config = json.loads((source / "config.json").read_bytes()) | {"evaluation": _evaluation(run)}
    weights = storage.read_file(source / "model.safetensors", max_bytes=_MAX_WEIGHTS_BYTES)
    config.setdefault("sha256", hashlib.sha256(weights).hexdigest())  # runs of older versions left none
    files = {
        "model.safetensors": weights,
        "config.json": json.dumps(config, indent=1).encode(),
        "model.py": write_source(described).encode(),
        "README.md": _card(run, described, config, metrics).encode(),
    }
    prepare_directory(folder)
    try:
        for name, data in files.items():
            storage.write_file_atomic(folder / name, data)
    except OSError as error:
        raise OutputError(
            "EXPORT", f"{folder} cannot be written ({error.strerror}): choose another"
        ) from error


def reported_metrics(run: RunReader) -> dict[str, float]:
    """Return what the run measured of the weights that it exported, by names without their group.

    Raises:
        OutputError: `result.json` and `metrics.jsonl` do not say the same.
    """
    weights = str(json.loads((find_export(run.folder) / "config.json").read_bytes())["weights"])
    group = "eval_ema/" if weights.startswith("ema") else "eval/"
    match = _STEP.search(weights)
    step = int(match[1]) if match else None
    rows = [row for row in run.evaluations() if row["optimizer_step"] == step]
    final = run.result.get("metrics", {}) if run.result.get("optimizer_step") == step else {}
    claims = [*rows, final]
    best = run.result.get("best")
    if best is not None and best["name"] in weights:
        claims.append({best["metric"]: best["value"]})
    metrics: dict[str, float] = {}
    for name, value in (item for claim in claims for item in claim.items()):
        if name.startswith(group) and isinstance(value, float):
            known = metrics.setdefault(name.removeprefix(group), value)
            if known != value:
                raise OutputError(
                    "RUN_CHANGED",
                    f"{run.folder}: metrics.jsonl says {name} {known} at step {step}, result.json {value}",
                )
    return metrics


def _evaluation(run: RunReader) -> dict[str, Any]:
    """Return how the run evaluated, as far as it changes a number."""
    precision = run.environment.get("mixed_precision") or run.config.get("runtime", {}).get("mixed_precision")
    return {"mixed_precision": precision or "no", "tta": run.config.get("task", {}).get("tta", "none")}


def _card(
    run: RunReader, described: ExportConfig, config: Mapping[str, Any], metrics: Mapping[str, float]
) -> str:
    try:
        import jinja2
        from huggingface_hub import EvalResult, ModelCard, ModelCardData
    except ImportError as error:
        raise OutputError(
            "EXPORT", f"a model card needs {error.name}: pip install 'accel-trainer[report]'"
        ) from error
    dataset = str(run.config.get("dataset", "")).rstrip("/").rpartition("/")[2] or "unknown"
    data = ModelCardData(
        library_name="pytorch",
        pipeline_tag="image-classification",
        tags=["accel_trainer", described.model.name],
        model_name=f"{described.model.name} on {dataset}",
        eval_results=[
            EvalResult(
                task_type="image-classification",
                dataset_type=dataset,
                dataset_name=dataset,
                dataset_split="test",
                dataset_revision=run.data_fingerprint,
                metric_type=name,
                metric_value=value,
            )
            for name, value in metrics.items()
        ],
    )
    template = resources.files(__package__).joinpath("card.md.jinja").read_text()
    page = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    text = page.render(
        title=data.model_name,
        config=config,
        metrics={name: format_number(name, value) for name, value in metrics.items()},
        result=run.result,
        environment=run.environment,
        training=run.config,
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}"))


def _push(folder: Path, repository: str) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    hub = HfApi()
    try:
        hub.create_repo(repository, private=True, exist_ok=True)
        return str(hub.upload_folder(repo_id=repository, folder_path=folder))
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise OutputError("HUB", f"--hub {repository}: {reason}: log in with `hf auth login`") from error
