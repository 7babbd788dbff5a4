"""`accel-trainer lr-find RECIPE.py [its flags]`: run a range test and suggest a learning rate.

example: accel-trainer lr-find recipes/cifar.py --config recipes/configs/digits.yaml
"""

from __future__ import annotations

import importlib
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import ConfigError, ExitCode, OutputError
from ..run.config import RecipeConfig
from .common.output import tell
from .common.own_files import refuse_other_file, write_own_file
from .common.parser import CommandParser
from .common.processes import train_recipe
from .common.recipes import find_config_class
from .flags.fields import fields_by_flag
from .flags.parser import parse_config
from .recipe.start import Start
from .report.figures import LIGHT, draw_chart
from .runs.run_reader import read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RULES = (
    "The range test of L. N. Smith, Cyclical Learning Rates for Training Neural Networks "
    "(arXiv 1506.01186, 2015): the learning rate grows by the same factor each step. The "
    "suggestion is where the loss, averaged over about ten steps, falls most steeply before its "
    "minimum, but at most one tenth of the learning rate at which it diverges: where it exceeds "
    "its first value after the minimum, or is NaN."
)
_MEMORY = 0.9  # decay of the running mean of the loss
_MAX_STEPS = 100_000


@dataclass(frozen=True)
class RangeTest:
    """The loss at each step of a growing learning rate, and what follows from it.

    `smooth` is the running mean of `losses`. `steepest` is the learning rate where it falls most
    steeply (None: it never fell), `divergence` the one where it diverges (None: it did not).
    """

    learning_rates: Sequence[float]
    losses: Sequence[float]
    smooth: Sequence[float]
    steepest: float | None
    divergence: float | None

    @property
    def suggestion(self) -> float | None:
        """The learning rate to try; None if the loss never fell."""
        if self.steepest is None:
            return None
        return min(self.steepest, math.inf if self.divergence is None else self.divergence / 10)


def main(argv: Sequence[str]) -> int:
    """Run the test in a temporary folder, draw the curve and print a suggestion.

    Returns 1 if the loss never fell, else 0.
    """
    parser = CommandParser(__doc__)
    parser.description = f"{parser.description} {_RULES}"
    parser.add_argument(
        "--from",
        type=float,
        default=1e-5,
        dest="lowest",
        help="lowest learning rate; default: 1e-5",
    )
    parser.add_argument(
        "--to", type=float, default=10.0, dest="highest", help="highest learning rate; default: 10"
    )
    steps_help = "number of values to try; default: 100"
    parser.add_number("--steps", steps_help, default=100, lowest=10, highest=_MAX_STEPS)
    parser.add_argument(
        "--png",
        type=Path,
        default=Path("lr-find.png"),
        help="the chart to write; default: lr-find.png",
    )
    parser.add_number("--num-processes", "default: 1", default=1, lowest=1)
    options, recipe, flags = parser.require_recipe(argv)
    if not 0 < options.lowest < options.highest < math.inf:
        raise ConfigError(
            "LR_FIND",
            f"--from {options.lowest} --to {options.highest}: set --from above 0 and below --to",
        )
    refuse_other_file(options.png, "--png")
    growth = (options.highest / options.lowest) ** (1 / (options.steps - 1))
    ramp = _ramp(options.lowest, growth, options.steps)
    config_class = find_config_class(recipe)
    _refuse_own_flags(config_class, flags, [*ramp, "--output-dir"])
    parse_config(config_class, [*flags, *ramp], description="")
    importlib.import_module("matplotlib.figure")  # if it is missing, nothing is trained in vain
    losses = _measure(str(recipe), [*flags, *ramp], options.num_processes)
    test = analyze([options.lowest * growth**step for step in range(len(losses))], losses)
    draw(test, options.png)
    tell("\n".join([*_verdict(test), f"the curve is in {options.png}"]))
    return ExitCode.DONE if test.suggestion is not None else 1


def _refuse_own_flags(
    config_class: type[RecipeConfig], flags: Sequence[str], ramp: Sequence[str]
) -> None:
    """Raise ConfigError for a flag of the user that the test sets itself."""
    by_flag = fields_by_flag(config_class)
    taken = [by_flag[word] for word in ramp if word in by_flag]
    for flag in (word.partition("=")[0].replace("_", "-") for word in flags):
        if by_flag.get(flag) in taken:
            raise ConfigError("LR_FIND", f"the range test sets {flag} itself: leave it out")


def _ramp(lowest: float, growth: float, num_steps: int) -> list[str]:
    """Return the flags of a run whose learning rate grows each step and which evaluates once."""
    flags = {
        "--lr": lowest,
        "--schedule.shape": "exponential",
        "--schedule.gamma": growth,
        "--schedule.warmup-epochs": 0.0,
        "--schedule.warmup-steps": 0,
        "--schedule.min-fraction": 0.0,
        "--max-steps": None,
        "--epochs": None,
        "--trainer.num-steps": num_steps,
        "--resume": "never",
        "--trainer.log-every-n-steps": 1,
        "--evaluate-every": f"{num_steps}steps",
    }
    return [str(word) for flag in flags.items() for word in flag]


def _measure(recipe: str, flags: Sequence[str], num_processes: int) -> list[float]:
    """Return the loss of each step of a run in a temporary folder, then NaN if the run diverged."""
    with tempfile.TemporaryDirectory(prefix="lr-find-") as temporary:
        folder = Path(temporary) / "run"
        flags = [*flags, "--output-dir", str(folder)]
        code = train_recipe(Start(recipe=recipe, flags=flags, num_processes=num_processes))
        if code not in (ExitCode.DONE, ExitCode.DIVERGED):
            raise OutputError("LR_FIND", f"the run ended with exit code {code}, see above")
        if not (folder / "config.yaml").exists():
            raise OutputError(
                "LR_FIND", "the recipe trained nothing: start it by itself to see why"
            )
        losses = [float(row["train/loss"]) for row in read_run(folder).rows if "train/loss" in row]
    return [*losses, math.nan] if code == ExitCode.DIVERGED else losses


def analyze(learning_rates: Sequence[float], losses: Sequence[float]) -> RangeTest:
    """Find the steepest fall of the averaged loss and the point where it diverges, by `_RULES`."""
    smooth = []
    mean = 0.0
    for step, loss in enumerate(losses, 1):
        mean = _MEMORY * mean + (1 - _MEMORY) * loss
        smooth.append(mean / (1 - _MEMORY**step))
    finite = [value if math.isfinite(value) else math.inf for value in smooth]
    lowest = finite.index(min(finite))
    slopes = [after - before for before, after in pairwise(finite[: lowest + 1])]
    steepest = learning_rates[slopes.index(min(slopes)) + 1] if slopes else None
    diverged = [step for step in range(lowest, len(finite)) if finite[step] > finite[0]]
    divergence = learning_rates[diverged[0]] if diverged else None
    return RangeTest(learning_rates, losses, smooth, steepest, divergence)


def _verdict(test: RangeTest) -> list[str]:
    if test.suggestion is None:
        return ["the loss never fell: check the data, the labels and the model"]
    lines = [f"steepest fall of the loss at --lr {test.steepest:.2g}"]
    if test.divergence is not None:
        tenth = test.divergence / 10
        lines.append(f"diverges at --lr {test.divergence:.2g}; one tenth of that is {tenth:.2g}")
    return [*lines, f"suggestion: --lr {test.suggestion:.2g}"]


def draw(test: RangeTest, path: Path) -> None:
    """Draw the loss over the learning rate, with the suggestion, as a PNG at `path`."""

    def curves(axes: Axes) -> None:
        blue, _, green, _, red, *_ = LIGHT.series
        rates = test.learning_rates
        axes.plot(rates, test.losses, ".", color=LIGHT.muted, alpha=0.5, label="each step")
        axes.plot(rates, test.smooth, color=blue, label="averaged")
        if test.divergence is not None:
            label = f"diverges, {test.divergence:.2g}"
            axes.axvline(test.divergence, color=red, linestyle=":", label=label)
        if test.suggestion is not None:
            label = f"suggestion, {test.suggestion:.2g}"
            axes.axvline(test.suggestion, color=green, label=label)
        finite = [value for value in test.losses if math.isfinite(value)]
        axes.set(xscale="log", xlabel="--lr", ylabel="training loss")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        if finite:
            axes.set_ylim(min(finite) - 0.05 * finite[0], finite[0] * 1.5)
        axes.legend(loc="best")

    chart = draw_chart("lr-find", title="Learning-rate range test", size=(7, 4), draw=curves)
    write_own_file(path, chart.png, "--png")
