"""The key numbers of a run on its page: how good, how far, how fast, how long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from ...core.timing import is_long_wait
from ..common.output import format_duration, format_number
from ..runs.metric_groups import metric_in_words
from ..runs.run_reader import RunReader

Fact = Mapping[str, str]


def facts_of(run: RunReader) -> list[Fact]:
    """Return the name, value and note of each number, the metric that chose the best first.

    Those of a run that has not ended are of its last rows.
    """
    has_ended = run.ending.get("optimizer_step") is not None
    return [*_quality(run), *(_end(run) if has_ended else _progress(run))]


def _fact(name: str, value: str, note: str = "") -> Fact:
    return {"name": name, "value": value, "note": note}


def _quality(run: RunReader) -> Iterator[Fact]:
    metric = run.headline()
    best = run.best_evaluation()
    if metric is not None:
        note = f"best, epoch {best['epoch']}"
        yield _fact(metric_in_words(metric), format_number(metric, best[metric]), note)
        loss = metric.partition("/")[0] + "/loss"
        if loss in best and loss != metric:
            yield _fact("loss", format_number(loss, best[loss]), "at the same step")
    for name, number in run.test_numbers().items():
        yield _fact(metric_in_words(name), format_number(name, number), "of the best weights")


def _end(run: RunReader) -> Iterator[Fact]:
    result = run.ending
    num_steps = run.settings.get("trainer.num_steps")
    num_epochs = run.settings.get("trainer.num_epochs")
    note = f"{result.get('epoch')}{'' if num_epochs is None else f' of {num_epochs}'} epochs"
    if isinstance(num_steps, int):
        note = f"of {num_steps:,}"
    yield _fact("steps", f"{result['optimizer_step']:,}", note)
    if samples_per_s := result.get("samples_per_s"):
        note = f"{result.get('samples_seen') or 0:,} in all"
        yield _fact("samples per second", f"{samples_per_s:,.0f}", note)
    yield from _wait(run)
    if run.wall_s is not None:
        yield _fact("time", format_duration(run.wall_s), "in all attempts")
    if peak_bytes := result.get("peak_memory_bytes"):
        yield _fact("memory", f"{peak_bytes / 2**30:.1f} GiB", "at the peak")


def _progress(run: RunReader) -> Iterator[Fact]:
    if not run.rows:
        return
    step = run.rows[-1]["optimizer_step"]
    num_steps = _num_steps(run)
    note = f"{'' if num_steps is None else f'of {num_steps:,}, '}epoch {run.rows[-1]['epoch']}"
    yield _fact("steps", f"{step:,}", note)
    for loss in run.series("train/loss")[1][-1:]:
        yield _fact("training loss", format_number("loss", loss))
    for samples_per_s in run.series("perf/samples_per_s")[1][-1:]:
        yield _fact("samples per second", f"{samples_per_s:,.0f}")
    yield from _wait(run)
    if memory_gib := run.series("perf/peak_memory_gib")[1]:
        yield _fact("memory", f"{max(memory_gib):.1f} GiB", "at the peak")
    clock = run.training_clock
    if clock is not None and num_steps is not None and run.state == "running":
        left_s = clock[1][-1] / clock[0][-1] * max(0, num_steps - step)
        yield _fact("time left", format_duration(left_s), "without evaluations")


def _wait(run: RunReader) -> Iterator[Fact]:
    """Tell of a long wait for samples."""
    steps, seconds = run.training_clock or ([0], [0.0])
    waits = dict(zip(*run.series("perf/data_wait_fraction"), strict=True))
    pairs = zip(steps[1:], pairwise(seconds), strict=True)
    wait_s = sum(waits.get(step, 0.0) * (end - begin) for step, (begin, end) in pairs)
    if is_long_wait(wait_s, seconds[-1], steps[-1]):
        note = f"of training; --num-workers is {run.settings.get('batch.num_workers')}"
        yield _fact("waiting for samples", f"{wait_s / seconds[-1]:.0%}", note)


def _num_steps(run: RunReader) -> int | None:
    """Return how many steps the run trains at most; None if that is not known yet."""
    num_epochs = run.settings.get("trainer.num_epochs")
    given = [run.settings.get(name) for name in ("trainer.num_steps", "trainer.max_steps")]
    limits = [limit for limit in given if isinstance(limit, int)]
    if isinstance(num_epochs, int) and run.steps_per_epoch is not None:
        limits.append(num_epochs * run.steps_per_epoch)
    return min(limits, default=None)
