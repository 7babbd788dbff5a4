"""Builds the callbacks that a run's config asks for: they stop, log, show and export the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..callbacks.early_stopping import EarlyStopping, TimeLimit
from ..callbacks.export import Exporter
from ..callbacks.metric_logger import MetricLogger
from ..callbacks.metrics_file import MetricsFile
from ..callbacks.onnx import OnnxExport
from ..callbacks.pretrained import PretrainedExport
from ..callbacks.progress_bar import ProgressBar
from ..callbacks.result import ResultWriter
from ..callbacks.trackers import Trackers
from ..core.config import config_to_dict
from ..training.callback import Callback
from .session import Run


def build_callbacks(
    run: Run,
    *,
    banner: str,
    history: MetricsFile | None,
    num_eval_samples: int,
    export_config: Mapping[str, Any],
    onnx: OnnxExport | None,
    savers: Sequence[Any],
    callbacks: Sequence[Callback],
) -> list[Callback]:
    """Return the callbacks, with the user's `callbacks`, in the order in which they are called.

    The rows are written after the user's hooks, so that a row has what was logged at its step.
    """
    config = run.config.trainer
    is_main = run.accelerator.is_main_process
    progress = ProgressBar(
        config,
        banner=banner,
        is_quiet=run.config.run.quiet or not is_main,
    )
    trackers = []
    if is_main and run.config.run.track:
        trackers.append(
            Trackers(run.config.run.track, run=run.folder, config=config_to_dict(run.config))
        )
    log = MetricLogger(
        run.accelerator,
        history=history,
        every_n_steps=config.log_every_n_steps,
        digest_every_n_steps=config.digest_every_n_steps,
        activity=run.activity,
        sinks=[progress.show, *(each.show for each in trackers)],
    )
    ours: list[Callback] = []
    if config.patience is not None:
        ours.append(EarlyStopping(patience=config.patience))
    if config.max_time_s is not None:
        ours.append(TimeLimit(run.stop_flag, max_seconds=config.max_time_s))
    ours.append(progress)
    if is_main:
        exporter = Exporter(
            run.folder,
            weights=config.last_weights,
            config=export_config,
            onnx=onnx,
        )
        result = ResultWriter(
            run.folder,
            log=log,
            num_eval_samples=num_eval_samples,
            activity=run.activity,
            nondeterministic=run.nondeterministic,
        )
        ours += [exporter, result]
    if savers:
        ours.append(PretrainedExport(run.folder, savers=savers))
    return [*ours, *callbacks, log, *trackers]
