"""`accel-trainer at RUN --step N --to DIR`: restore the state after any step of a run.

example: accel-trainer at runs/first --step 5 --to runs/first-5
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from accel_trainer import ConfigError, ExitCode, OutputError
from accel_trainer.commands import (
    CommandParser,
    JsonObject,
    RunReader,
    StoredCheckpoint,
    complete_by_step,
    counted,
    files_with_status,
    filesystem,
    last_step,
    prepare_directory,
    read_run,
    say,
    scratch_folder,
    tell,
    tell_json,
    writes_to,
)

from .proof import Proof
from .replay import STOP, Replay, note_changes

_DIFFERENT = 1
_FILES = ("config.yaml", "environment.json", "recipe.py")


def main(argv: Sequence[str]) -> int:
    """DIR becomes a run folder with a checkpoint of that step, from which a run can continue.

    The steps since the checkpoint before it are trained again, and compared with the digests and
    rows of the run: the exit code is 1 if one differs. A checkpoint that the run still has is
    copied.
    """
    options = _options(argv)
    run = read_run(options.run)
    check_step(run, options.step)
    if _is_taken(options.to):
        raise OutputError("RUN_EXISTS", f"{options.to} is not empty: give a new folder")
    kept = None if options.again else complete_by_step(run.folder).get(options.step)
    if kept is not None:
        with made(options.to) as folder:
            copy_checkpoint(run, kept, folder)
        facts: JsonObject = {"from": str(kept.path), "copied": True}
        proof = None
    else:
        replay = Replay.of(run, options.recipe)
        _announce(replay, options.step, options.to, is_quiet=options.json)
        with made(options.to) as folder:
            step = options.step
            trained = replay.train(folder, until=step, after=step - 1, callbacks=STOP)
            proof = trained.proof()
            _rename_in_config(folder, Path(os.path.realpath(options.to)))
        facts = {"copied": False, **vars(proof)}
    rebuilt = complete_by_step(options.to).get(options.step)
    if rebuilt is None:
        raise OutputError("REPLAY", f"{options.to} has no checkpoint of step {options.step}")
    report = {"optimizer_step": options.step, "checkpoint": str(rebuilt.path), **facts}
    _tell(report, proof, as_json=options.json)
    return _DIFFERENT if proof is not None and proof.first_difference else ExitCode.DONE


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_run()
    parser.add_step_option()
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the new run folder")
    parser.add_switch(
        "--again", "retrain from the previous checkpoint, even if the run still has this one"
    )
    parser.add_recipe_option()
    parser.add_json_option()
    return parser.parse_args(argv)


def check_step(run: RunReader, step: int) -> None:
    """Raise ConfigError if the run has not trained `step`."""
    first, last = run.begin + 1, last_step(run)
    if not first <= step <= last:
        fix = f"give a step from {first} to {last}" if first <= last else "it has not trained yet"
        raise ConfigError("STEP", f"{run.folder} has no step {step}: {fix}")


def _is_taken(folder: Path) -> bool:
    """Whether something other than an empty folder has the name, such as a link to nothing."""
    return os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir()))


@contextmanager
def made(folder: Path) -> Iterator[Path]:
    """Yield a new folder of that name, which takes the place of `folder` at the end of the block.

    A failure leaves nothing behind, and removes nothing that is not its own; what a kill leaves,
    the next command removes that makes a folder there.

    Raises OutputError if somebody fills `folder` in the meantime.
    """
    final = Path(os.path.realpath(folder))
    prepare_directory(final.parent)
    with scratch_folder("new", beside=final) as scratch:
        temporary = prepare_directory(scratch / final.name)
        yield temporary
        if _is_taken(final):
            raise OutputError(
                "RUN_EXISTS", f"{folder} was filled in the meantime: run this one again"
            )
        with writes_to(final):
            filesystem.publish(temporary, final)


def copy_checkpoint(run: RunReader, checkpoint: StoredCheckpoint, folder: Path) -> None:
    """Copy a checkpoint, the rows until its step, and what the run recorded of its start.

    Raises OutputError if the run, which may still train, deletes the checkpoint meanwhile.
    """
    lines = [  # byte for byte: the checkpoint has the length of the file
        line
        for line in filesystem.read_lines(run.folder / "metrics.jsonl")
        if json.loads(line)["optimizer_step"] <= checkpoint.step
    ]
    with writes_to(folder):
        for name in _FILES:
            if (run.folder / name).is_file():
                _copy_file(run.folder / name, folder / name)
        filesystem.write_file_atomic(folder / "metrics.jsonl", b"".join(lines))
        place = folder / "checkpoints" / checkpoint.name
        filesystem.make_directory(place.parent)
        filesystem.make_directory(place)
        for path in files_with_status(checkpoint.path):
            copy = place / path.relative_to(checkpoint.path)
            filesystem.make_directory(copy.parent)  # of shards
            with suppress(FileNotFoundError):
                _copy_file(path, copy)
    if not StoredCheckpoint(place).is_complete or not checkpoint.path.is_dir():
        fact = f"{run.folder} has deleted {checkpoint.name} while it was copied"
        raise OutputError("RUN_CHANGED", f"{fact}: run the same command again")


def _copy_file(path: Path, copy: Path) -> None:
    filesystem.replace_file(copy, filesystem.read_chunks(path))


def _announce(replay: Replay, step: int, folder: Path, *, is_quiet: bool) -> None:
    """Say what is trained, and what makes it only approximate."""
    run = replay.run
    start = replay.begin_after(step - 1)
    if not is_quiet:
        steps = counted(step - start, "step")
        say(f"training {steps} of {run.name} again, from step {start}, in {folder}")
    note_changes(run)


def _rename_in_config(run: Path, folder: Path) -> None:
    """Set the output folder in the config of a run to `folder`, the final one."""
    config = read_run(run).config
    config["run"]["output_dir"] = str(folder)
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    filesystem.write_file_atomic(run / "config.yaml", text.encode())


def _tell(report: JsonObject, proof: Proof | None, *, as_json: bool) -> None:
    if as_json:
        tell_json(report)
        return
    if proof is None:
        tell(f"the run still has it: {report['from']} is copied (--again trains it again)")
    else:
        tell(proof)
    tell(f"the state after step {report['optimizer_step']}: {report['checkpoint']}")
