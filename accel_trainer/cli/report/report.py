"""`accel-trainer report RUN [RUN ...]`: write one self-contained HTML page about runs.

Its charts are also written as PNG. The page works offline. Its charts show values on hover, zoom
and smooth; without scripts they are pictures.
"""

from __future__ import annotations

import itertools
import os
import shlex
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

from ...core import filesystem
from ...core.errors import OutputError
from ...core.json_files import read_json_object
from ...core.run_dir import expand_home
from ...training.evaluation_file import read_details
from ...vision import ImageDataset, Photos
from ..common.output import format_duration, format_number, tell
from ..common.parser import CommandParser
from ..runs.confusion import read_confusion
from ..runs.metric_groups import metric_in_words, preferred_groups
from ..runs.run_reader import RunReader, read_run, reading
from ..runs.runs import find_runs
from ..runs.settings import changed_settings, differing_settings, flatten
from .figures import DARK, LIGHT, Chart, series_name
from .logged import draw_histograms, read_pictures
from .pictures import draw_samples, load_data, read_mistakes

_EXAMPLE = "example: accel-trainer report runs --open"
_MAX_OPEN = 3  # a page of at most this many runs shows their details from the start


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and its charts and print their paths."""
    parser = CommandParser(prog="accel-trainer report", description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("run", type=Path, nargs="+", help="a run folder, or a folder of runs")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument(
        "--to",
        type=Path,
        default=Path("report.html"),
        help="the file to write; default: report.html",
    )
    parser.add_argument("--dataset", help="dataset to show training images of; default: none")
    parser.add_cache_option()
    options = parser.parse_args(argv)
    path = options.to
    data = None
    charts = path.with_suffix("")
    with reading(*options.run):
        runs = [run for folder in options.run for run in find_runs(folder) or [read_run(folder)]]
        if options.dataset is not None:
            data = load_data(runs[0], options.dataset, cache_dir=expand_home(options.cache_dir))
        page, files = render(runs, data)
    try:
        # JSON and YAML may hold half a character, which no file can.
        filesystem.write_file_atomic(path, page.encode(errors="backslashreplace"))
        filesystem.make_directory(charts)
        for name, png in files.items():
            filesystem.write_file_atomic(charts / name, png)
    except OSError as error:
        raise OutputError(
            "REPORT", f"{path} cannot be written ({error.strerror}): choose another --to"
        ) from error
    tell(f"{path}\n{charts}{os.sep}  {len(files)} charts")
    if options.open and not webbrowser.open(path.resolve().as_uri()):
        tell("no browser was found: open the page yourself")
    return 0


def render(
    runs: Sequence[RunReader], data: ImageDataset | Photos | None = None
) -> tuple[str, dict[str, bytes]]:
    """Return the report as an HTML page, and its charts as PNG by file name.

    It reads nothing but the run folders. With `data`, the dataset of the runs, the page shows some
    training images.
    """
    try:
        import jinja2

        from .charts import draw_curves, draw_time
        from .page_data import page_data, policy

        time = draw_time(runs)
        curves = draw_curves(runs)
        classes = [_class_charts(run) for run in runs]
        histograms = [draw_histograms(run) for run in runs]
    except ImportError as error:
        raise OutputError(
            "REPORT", f"a report needs {error.name}: pip install 'accel-trainer[report]'"
        ) from error
    files_of_page = resources.files(__package__)
    template = files_of_page.joinpath("report.html.jinja").read_text()
    script = files_of_page.joinpath("report.js").read_text()
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    page = environment.from_string(template).render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        runs=[
            _describe(run, number, data) | {"classes": charts, "histograms": drawn}
            for number, (run, charts, drawn) in enumerate(
                zip(runs, classes, histograms, strict=True)
            )
        ],
        curves=curves,
        time=time,
        data=page_data(runs),
        script=script,
        policy=policy(script),
        differences=differing_settings(runs),
        palettes={"light": LIGHT.variables(), "dark": DARK.variables()},
        is_open=len(runs) <= _MAX_OPEN,
    )
    files: dict[str, bytes] = {}
    for chart in itertools.chain(curves, [] if time is None else [time], *classes, *histograms):
        name = f"{chart.name}.png"
        numbers = itertools.count(2)
        while name in files:  # two runs may have the same name
            name = f"{chart.name}-{next(numbers)}.png"
        files[name] = chart.png
    return page, files


def _describe(run: RunReader, number: int, data: ImageDataset | Photos | None) -> dict[str, Any]:
    """Return what the page shows for one run."""
    return {
        "name": run.name,
        "color": series_name(number),
        "state": run.state,
        "stop_reason": run.result.get("stop_reason"),
        "subtitle": _subtitle(run),
        "facts": _facts(run),
        "restarts": run.restarts,
        "num_killed": run.num_killed,
        "mistakes": read_mistakes(run),
        "logged": read_pictures(run),
        "samples": [] if data is None else draw_samples(run, data),
        "changed": changed_settings(run),
        "config": list(flatten(run.config).items()),
        "origins": run.environment.get("config_origins", {}),
        "environment": _environment(run),
        "origin": run.origin,
    }


def _subtitle(run: RunReader) -> str:
    model = (run.config.get("model") or {}).get("name", "")
    return " on ".join(str(part) for part in (model, run.dataset) if part)


def _facts(run: RunReader) -> list[dict[str, str]]:
    """Return the key numbers, the headline metric first."""
    metric = run.headline()
    best = run.best_evaluation()
    result = run.result
    shown = []
    if metric is not None:
        value = format_number(metric, best[metric])
        shown.append((metric_in_words(metric), value, f"best, epoch {best['epoch']}"))
        loss = metric.partition("/")[0] + "/loss"
        if loss in best and loss != metric:
            shown.append(("loss", format_number(loss, best[loss]), "at the same step"))
    for name, number in run.test_numbers().items():
        shown.append((metric_in_words(name), format_number(name, number), "of the best weights"))
    epochs = (run.config.get("trainer") or {}).get("num_epochs")
    if result.get("optimizer_step") is not None:
        note = f"{result.get('epoch')} of {epochs} epochs"
        shown.append(("steps", f"{result['optimizer_step']:,}", note))
    if samples_per_s := result.get("samples_per_s"):
        note = f"{result.get('samples_seen') or 0:,} seen"
        shown.append(("samples per second", f"{samples_per_s:,.0f}", note))
    if result.get("wall_s") is not None:
        memory = (result.get("peak_memory_bytes") or 0) / 2**30
        seconds = sum(run.phase_s.values()) or result["wall_s"]
        shown.append(("time", format_duration(seconds), f"{memory:.1f} GiB at most"))
    return [dict(zip(("name", "value", "note"), fact, strict=True)) for fact in shown]


def _class_charts(run: RunReader) -> list[Chart]:
    """Return charts of the confusion matrix, the accuracy per class and the calibration.

    They show the averaged weights if these were evaluated.
    """
    from .charts import draw_calibration, draw_class_accuracy, draw_confusion

    metrics = run.result.get("metrics") or {}
    with suppress(OSError, ValueError):
        step, details = read_details(run.folder)
        if step == run.result.get("optimizer_step"):
            metrics = {
                name: details.get(name) if _is_in_file(value) else value
                for name, value in metrics.items()
            }
    prefixes = [f"{group}/" for group in preferred_groups(metrics)]
    groups = [prefix for prefix in prefixes if f"{prefix}per_class_accuracy" in metrics]
    confusion = read_confusion(metrics, groups[0]) if groups else None
    if confusion is None:
        return []
    names = _class_names(run.folder / "export")
    if len(names) != confusion.num_classes:
        names = [str(number) for number in range(confusion.num_classes)]
    charts = [
        draw_confusion(f"{run.name}-confusion", confusion, names),
        draw_class_accuracy(f"{run.name}-classes", confusion.accuracy.tolist(), names),
    ]
    if bins := metrics.get(f"{groups[0]}calibration"):
        charts.append(draw_calibration(f"{run.name}-calibration", bins))
    return charts


def _is_in_file(value: Any) -> bool:
    """Whether a value in the result only names the file that holds it."""
    return isinstance(value, dict) and "file" in value


def _class_names(export: Path) -> list[str]:
    try:
        if export.is_symlink():
            return []
        names = read_json_object(export / "config.json")["class_names"]
        return [str(name) for name in names]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _environment(run: RunReader) -> list[tuple[str, Any]]:
    """Return name and value of the recorded environment, with the command as typed."""
    recorded = {name: run.environment[name] for name in run.environment if name != "config_origins"}
    values = flatten(recorded)
    if "command.arguments" in values:
        values["command.arguments"] = shlex.join(map(str, values["command.arguments"]))
    return list(values.items())
