"""`accel-trainer report RUN [RUN ...]`: write one self-contained HTML page about runs, and its charts as PNG.

The page works offline. Its charts show values on hover, zoom and smooth; without scripts they are
pictures.
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

from ...checkpoint.serialization import read_json_object
from ...core import filesystem
from ...core.errors import OutputError
from ...core.run_dir import expand_home
from ...training.evaluation_file import read_details
from ...vision import ImageDataset, Photos
from ..common.output import format_duration, format_number, tell
from ..common.parser import CommandParser
from ..runs.confusion import read_confusion
from ..runs.run_reader import RunReader, read_run, reading
from ..runs.runs import find_runs
from ..runs.settings import changed_settings, differing_settings, flatten
from .figures import DARK, LIGHT, Chart, series_name
from .pictures import draw_samples, load_data, read_mistakes

_EXAMPLE = "example: accel-trainer report runs --open"
_OPEN = 3  # runs whose details a page shows from the start


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
    path, data = options.to, None
    charts = path.with_suffix("")
    with reading(*options.run):
        runs = [run for folder in options.run for run in find_runs(folder) or [read_run(folder)]]
        if options.dataset is not None:
            data = load_data(runs[0], options.dataset, cache_dir=expand_home(options.cache_dir))
        page, files = render(runs, data)
    try:
        filesystem.write_file_atomic(path, page.encode())
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

    Reads only the run folders. With `data`, that of the runs, the page shows some training images.
    """
    try:
        import jinja2

        from .charts import draw_curves, draw_time
        from .page_data import page_data, policy

        time = draw_time(runs)
        curves = draw_curves(runs)
        classes = [_class_charts(run) for run in runs]
    except ImportError as error:
        raise OutputError(
            "REPORT", f"a report needs {error.name}: pip install 'accel-trainer[report]'"
        ) from error
    template, script = (
        resources.files(__package__).joinpath(f"report.{end}").read_text()
        for end in ("html.jinja", "js")
    )
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    page = environment.from_string(template).render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        runs=[
            _describe(run, number, data) | {"classes": charts}
            for number, (run, charts) in enumerate(zip(runs, classes, strict=True))
        ],
        curves=curves,
        time=time,
        data=page_data(runs),
        script=script,
        policy=policy(script),
        differences=differing_settings(runs),
        palettes={"light": LIGHT.variables(), "dark": DARK.variables()},
        is_open=len(runs) <= _OPEN,
    )
    files: dict[str, bytes] = {}
    for chart in itertools.chain(curves, [] if time is None else [time], *classes):
        names = (
            f"{chart.name}{number}.png"
            for number in itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
        )
        # two runs may have the same name
        files[next(name for name in names if name not in files)] = chart.png
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
    metric, best, result = run.headline(), run.best_evaluation(), run.result
    shown = []
    if metric is not None:
        name = metric.replace("eval_ema/", "averaged ").replace("eval/", "")
        shown.append((name, format_number(metric, best[metric]), f"best, epoch {best['epoch']}"))
        loss = metric.partition("/")[0] + "/loss"
        if loss in best and loss != metric:
            shown.append(("loss", format_number(loss, best[loss]), "at the same step"))
    epochs = (run.config.get("trainer") or {}).get("num_epochs")
    if result.get("optimizer_step") is not None:
        shown.append(
            ("steps", f"{result['optimizer_step']:,}", f"{result.get('epoch')} of {epochs} epochs")
        )
    if samples_per_s := result.get("samples_per_s"):
        shown.append(
            (
                "samples per second",
                f"{samples_per_s:,.0f}",
                f"{result.get('samples_seen') or 0:,} seen",
            )
        )
    if result.get("wall_s") is not None:
        memory = (result.get("peak_memory_bytes") or 0) / 2**30
        seconds = sum(run.phase_s.values()) or result["wall_s"]
        shown.append(("time", format_duration(seconds), f"{memory:.1f} GiB at most"))
    return [dict(zip(("name", "value", "note"), fact, strict=True)) for fact in shown]


def _class_charts(run: RunReader) -> list[Chart]:
    """Return charts of the confusion matrix, the accuracy per class and the calibration.

    They are those of the averaged weights if there are any.
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
    groups = [group for group in ("eval_ema/", "eval/") if f"{group}per_class_accuracy" in metrics]
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
    return isinstance(value, dict) and "file" in value


def _class_names(export: Path) -> list[str]:
    try:
        return (
            []
            if export.is_symlink()
            else list(map(str, read_json_object(export / "config.json")["class_names"]))
        )
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _environment(run: RunReader) -> list[tuple[str, Any]]:
    """Return name and value of the recorded environment, with the command as typed."""
    values = flatten(
        {name: value for name, value in run.environment.items() if name != "config_origins"}
    )
    if "command.arguments" in values:
        values["command.arguments"] = shlex.join(map(str, values["command.arguments"]))
    return list(values.items())
