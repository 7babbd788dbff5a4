"""`accel-trainer verify EXPORT_OR_RUN`: check that an export reproduces its reported numbers.

For a run, each checkpoint must also reproduce the numbers in the row of its step.

It runs the export's `model.py` in a process that cannot import accel_trainer, so only verify code
that you trust. If there is a `model.onnx`, it must compute the same. For your own model, whose data
only the recipe has, it must compute the stored outputs from the stored inputs.

example: accel-trainer verify model --dataset photos
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save as save_safetensors

from ...callbacks.onnx import ONNX_FILES
from ...checkpoint.sharded import stream_tensors
from ...core import filesystem
from ...core.errors import CheckpointError, ConfigError, DataError, ExitCode
from ...distributed.machine import available_cpus
from ...vision.pretrained import find_export, read_export_config, read_export_content
from ..common.output import JsonObject, Numbers, format_number, is_fraction, tell
from ..common.parser import CommandParser, at_least
from ..common.threads import in_order
from ..runs.checkpoints import checkpoints_in
from ..runs.run_reader import RunReader, read_run
from .evaluation_data import DataChoice, load_eval_data
from .export import export, reported_metrics
from .onnx_model import OnnxModel, is_own_model

_SCRIPT = Path(__file__).with_name("plain_evaluation.py")
_FAILED = 1
_IMAGES_PER_FILE = 2_000


def main(argv: Sequence[str]) -> int:
    """Print each reported and measured number; return 1 if one differs or a file was changed."""
    parser = CommandParser(__doc__)
    parser.add_argument("folder", type=Path, help="an export, or a finished run")
    parser.add_argument(
        "--dataset", metavar="DATA", help="name or folder; default: the data of the run"
    )
    parser.add_cache_option()
    parser.add_argument(
        "--tolerance",
        type=at_least(0, float),
        default=5e-4,
        help="allowed difference; 0.0005 is 5 of 10,000 images, or 0.05%% of a loss",
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="the interpreter to evaluate with; default: this one",
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder
        dataset = options.dataset
        if is_own_model(place := find_export(folder)):
            are_files_intact = _check_hashes(place)
            OnnxModel(place)  # refuses a missing or a changed file
            differences = evaluate_apart(place, python=options.python)
            are_equal = _compare_example(differences, options.tolerance)
            return ExitCode.DONE if are_equal and are_files_intact else _FAILED
        if (folder / "config.yaml").exists():
            run = read_run(folder)
            dataset = dataset or run.config.get("dataset")
            folder = Path(scratch) / "export"
            export(run, folder)
        reported = read_reported(folder)
        place = find_export(folder)
        data = Path(scratch) / "images"
        filesystem.make_directory(data)
        _write_test_images(
            data,
            place,
            dataset or reported["dataset"],
            reported["fingerprint"],
            options.cache_dir,
        )
        measured = evaluate_apart(place, data, python=options.python)
        are_files_intact = _check_hashes(place)
        onnx = {name: measured.pop(name) for name in ONNX_FILES if name in measured}
        are_equal = compare(reported["metrics"], measured, options.tolerance)
        are_equal &= _compare_example(onnx, options.tolerance)
        if folder != options.folder:
            (place / "model.onnx").unlink(missing_ok=True)  # of other weights than the next ones
            are_equal &= _compare_checkpoints(run, place, data, options)
    return ExitCode.DONE if are_equal and are_files_intact else _FAILED


def _compare_checkpoints(run: RunReader, place: Path, data: Path, options: Namespace) -> bool:
    """Print and return whether the weights of each checkpoint have the numbers of its step.

    They are written to the export in `place`, whose model is evaluated with them.
    """
    verdicts = dict[str, bool]()
    for checkpoint in checkpoints_in(run.folder):
        try:
            pieces = checkpoint.read().pieces
        except CheckpointError as error:
            tell(error.message)
            verdicts[checkpoint.name] = False
            continue
        for weights in (each for each in ("model", "ema") if each in pieces):
            chosen = f"{weights} of {checkpoint.name}"
            if reported := reported_metrics(run, {"weights": chosen}):
                tell(f"{chosen}:")
                filesystem.replace_file(
                    place / "model.safetensors", stream_tensors(pieces[weights])
                )
                measured = evaluate_apart(place, data, python=options.python)
                verdicts[chosen] = compare(reported, measured, options.tolerance)
    num_equal = sum(verdicts.values())
    tell(f"{num_equal} of {len(verdicts)} evaluated weights in checkpoints agree with their rows")
    return num_equal == len(verdicts)


def read_reported(folder: Path) -> JsonObject:
    """Return the metrics in the model card of `folder`, and the data they were measured on."""
    from huggingface_hub import ModelCard

    try:
        results = ModelCard.load(folder / "README.md").data.eval_results or []
        metrics = {result.metric_type: float(result.metric_value) for result in results}
        first = results[0]
    except (OSError, ValueError, TypeError, IndexError) as error:
        raise CheckpointError(
            "EXPORT", f"{folder}/README.md reports no numbers ({error}): export the run again"
        ) from error
    return {
        "metrics": metrics,
        "dataset": first.dataset_type,
        "fingerprint": first.dataset_revision,
    }


def _write_test_images(
    folder: Path, export: Path, dataset: str, fingerprint: str | None, cache_dir: Path
) -> None:
    """Write the evaluated images, cropped and resized but not normalised, to files in `folder`."""
    of_run = (read_export_content(export).get("evaluation") or {}).get("photos") or {}
    choice = DataChoice(dataset=dataset, split=None, of_run=of_run, cache_dir=cache_dir)
    config = read_export_config(export)
    cpu = torch.device("cpu")
    data = load_eval_data(choice, config, batch_size=1, num_workers=0, device=cpu)
    if fingerprint not in (None, data.fingerprint):
        raise DataError(
            "DATA_CHANGED",
            f"{dataset} is not the data of the reported numbers ({str(fingerprint)[:12]}, here "
            f"{str(data.fingerprint)[:12]}): pass the right one with --dataset",
        )
    with ThreadPoolExecutor(available_cpus()) as threads:
        pictures = in_order(threads, data.loader.reader.picture_of, range(len(data.labels)))
        for number, labels in enumerate(torch.from_numpy(data.labels).split(_IMAGES_PER_FILE)):
            pixels = torch.stack(list(islice(pictures, len(labels)))).permute(0, 3, 1, 2)
            content = save_safetensors(
                {"images": pixels.contiguous(), "labels": labels.contiguous()}
            )
            filesystem.write_file_atomic(folder / f"{number:05}.safetensors", content)


def evaluate_apart(
    folder: Path, data: Path | None = None, *, python: str = sys.executable
) -> Numbers:
    """Evaluate the model in `folder` in a separate process that cannot import this package.

    Without `data`, return the difference of each output of `model.onnx` from the stored one.
    """
    command = [
        python,
        "-I",
        str(_SCRIPT),
        *(str(path.resolve()) for path in (folder, data) if path is not None),
    ]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError as error:
        fact = f"--python {python} cannot be started ({error.strerror})"
        raise ConfigError("VERIFY", f"{fact}: give the path of a Python interpreter") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        reason = (said.splitlines() or [f"exit code {done.returncode}"])[-1]
        raise CheckpointError("EXPORT", f"{folder} cannot be evaluated: {reason}")
    return dict(json.loads(done.stdout))


def _check_hashes(export: Path) -> bool:
    """Print and return whether the files have their recorded hashes; old exports recorded none."""
    config = read_export_content(export)
    recorded = {"model.safetensors": config.get("sha256")}
    recorded |= {name: config.get(key) for name, key in ONNX_FILES.items()}
    are_same = True
    for name, expected in recorded.items():
        if not (export / name).exists():
            continue
        found = filesystem.sha256_of(export / name)
        mismatch = "CHANGED" if expected else "no hash was recorded"
        if name in ONNX_FILES and not expected:
            mismatch = "IS OF OTHER WEIGHTS"  # of an earlier export, which this one has not written
        are_same &= expected == found or mismatch == "no hash was recorded"
        verdict = "ok" if expected == found else mismatch
        tell(f"{name.ljust(17)}  sha256 {found[:16]}  {verdict}")
    return are_same


def _compare_example(differences: Numbers, tolerance: float) -> bool:
    """Print and return whether each output differs by no more than `tolerance`."""
    for name, difference in differences.items():
        verdict = "ok" if difference <= tolerance else "DIFFERS"
        fact = f"differs by at most {difference:.1e} from the trained model's"
        tell(f"{name.ljust(17)}  {fact}  {verdict}")
    return all(difference <= tolerance for difference in differences.values())


def compare(reported: Numbers, measured: Numbers, tolerance: float) -> bool:
    """Print and return whether the numbers agree. The tolerance of fractions is absolute."""
    verdicts = []
    for name in sorted(reported.keys() & measured.keys()):
        scale = 1.0 if is_fraction(name) else abs(measured[name])
        is_close = abs(reported[name] - measured[name]) <= tolerance * scale
        verdicts.append(is_close)
        was, now = (format_number(name, value) for value in (reported[name], measured[name]))
        verdict = "ok" if is_close else "DIFFERS"
        tell(f"{name.ljust(17)}  reported {was}  measured {now}  {verdict}")
    return bool(verdicts) and all(verdicts)
