"""`accel-trainer replay RUN --step N`: repeat a step and find samples with a NaN or inf loss.

example: accel-trainer replay runs/diverged --step 1234
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from accel_trainer import ConfigError, ExitCode
from accel_trainer.commands import (
    CommandParser,
    JsonObject,
    checkpoints_in,
    prepare_directory,
    read_json_object,
    read_run,
    say,
    tell,
)

from .replay import Replay
from .samples import samples_of, tell_samples


def main(argv: Sequence[str]) -> int:
    """Replay from the newest checkpoint before the step, in a temporary folder.

    The same checkpoint, data and number of processes give the same bits, and `--on-nonfinite skip`
    does not change the weights, so exactly the same step is repeated.

    Raises:
        ConfigError: the run has no such step.
        OutputError: the recipe failed.
    """
    parser = CommandParser(__doc__)
    parser.add_run()
    parser.add_step_option()
    parser.add_recipe_option()
    options = parser.parse_args(argv)
    run = read_run(options.run)
    missing = f"{options.run} has no step {options.step}"
    if options.step <= run.begin:
        raise ConfigError("STEP", f"{missing}: it begins after step {run.begin}")
    replay = Replay.of(run, options.recipe)
    say(f"repeating step {options.step} with {replay.recipe}")
    with tempfile.TemporaryDirectory(prefix="replay-") as temporary:
        folder = prepare_directory(Path(temporary) / "run")
        replay = replay.with_flags(["--on-nonfinite", "skip"])
        samples, _ = samples_of(replay, options.step, folder, until=options.step)
        record = folder / f"nonfinite-step-{options.step:010d}.json"
        last = max((each.step for each in checkpoints_in(folder)), default=0)
        if not samples:
            raise ConfigError("STEP", f"{missing}: it ends after step {last}")
        if record.exists():
            _show(read_json_object(record))
        else:
            bad_state = ", but the state after it is NaN or inf" * (last < options.step)
            tell(f"step {options.step} has a finite gradient{bad_state}")
        tell(tell_samples(samples))
    return ExitCode.DONE


def _show(record: JsonObject) -> None:
    position = record["position"]
    tell(
        f"step {record['optimizer_step']} (epoch {position['epoch'] + 1}, its step "
        f"{position['step_in_epoch'] + 1}): loss sum {record['loss_sum']}"
    )
    sample_ids = record["nonfinite_sample_ids"] or "no single one"
    tell(f"sample ids with a loss that is NaN or inf: {sample_ids}")
