"""`--script` of the command: tests any training program, and reports the results."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_trainer import ConfigError, ExitCode
from accel_trainer.commands import (
    JsonObject,
    counted,
    filesystem,
    format_duration,
    say_unless,
    tell,
    tell_json,
)

from .outputs import differences, files_matching
from .script import Kill, Script, Trial, draw_kills, run_script

_DIFFERENT = 1
_SHOWN = 5
_TENSORS = [
    f"{{out}}/**/*.{suffix}"
    for suffix in ("safetensors", "bin", "pt", "pth", "ckpt", "tar", "npz", "pkl")
]


@dataclass(frozen=True)
class _Verdict:
    """The result of a run, with one line for each file that differs from the first run's."""

    trial: Trial
    lines: Sequence[str]

    @property
    def outcome(self) -> str:
        """One word."""
        if self.trial.problem:
            return "FAILED"
        return "DIFFERENT" if self.lines else "equal"

    def __str__(self) -> str:
        """One line."""
        line = f"{self.outcome:9} {_story(self.trial)}"
        return f"{line}: {self.trial.problem}" if self.trial.problem else line


def crash_test(options: Namespace, folder: Path, stops: Sequence[int]) -> int:
    """Run the script without interruption, then with kills; return 0 if all results agree, else 1.

    If it fails without interruption, its exit code is returned.

    Raises:
        ConfigError: it cannot be started, saves nothing, or ends before any kill.
        KeyboardInterrupt: a signal was noted in `stops`.
    """
    say = say_unless(options.json)
    script = _script(options, folder)
    patterns = options.compare or _TENSORS
    reference = run_script(script, (), name="reference", stops=stops)
    if reference.problem:
        tell(f"without any kill, {reference.problem}")
        return reference.code if reference.code > 0 else 128 - reference.code
    wanted = files_matching(patterns, reference.out)
    _check_reference(reference, wanted, options)
    took = format_duration(reference.seconds * (1 + 2 * options.runs))
    say(
        f"chaos: the script took {format_duration(reference.seconds)}, saved "
        f"{counted(reference.num_saves, 'time')} and wrote {counted(len(wanted), 'file')} to "
        f"compare; 1 more run without a kill and {options.runs} with kills take about {took}"
    )

    def judge(kills: Sequence[Kill], name: str) -> _Verdict:
        trial = run_script(script, kills, name=name, stops=stops, whole=reference)
        found = [] if trial.problem else differences(wanted, files_matching(patterns, trial.out))
        if trial.problem is None and not found:
            filesystem.remove_own([trial.out], filesystem.files_in)  # this command has made it
        return _Verdict(trial, found)

    verdicts = [judge((), "again")]
    say(str(verdicts[0]))
    if verdicts[0].outcome == "equal":
        for number, kills in enumerate(draw_kills(options.runs, reference, seed=options.seed), 1):
            verdicts.append(judge(kills, f"run-{number}"))
            say(str(verdicts[-1]))
            if verdicts[-1].outcome != "equal":
                break
    failed = verdicts[-1] if verdicts[-1].outcome != "equal" else None
    once = None
    if failed is not None and sum(failed.trial.resumed) > 1:
        once = judge(failed.trial.kills[:1], "once")
        say(str(once))
    if options.json:
        tell_json(_as_json(options, verdicts, failed, once))
    elif failed is None:
        tell(_survived(verdicts))
    else:
        tell("\n".join(_failure(failed, once, options.keep)))
    return ExitCode.DONE if failed is None else _DIFFERENT


def _script(options: Namespace, folder: Path) -> Script:
    if "{out}" not in options.script:
        fact = f"--script {options.script!r} does not contain {{out}}"
        raise ConfigError("CHAOS", f"{fact}: write {{out}} in place of the output folder")
    words = []
    for name in ("script", "resume"):
        try:
            words.append(shlex.split(getattr(options, name) or ""))
        except ValueError as error:
            given = getattr(options, name)
            fact = f"--{name} {given!r} cannot be split into words ({error})"
            raise ConfigError("CHAOS", f"{fact}: correct its quotes") from None
    return Script(words[0], words[1], options.saves or _TENSORS, folder)


def _check_reference(reference: Trial, wanted: dict[str, Path], options: Namespace) -> None:
    if not wanted:
        given = " ".join(options.compare or _TENSORS)
        fact = f"no file that the script wrote matches --compare {given}"
        raise ConfigError("CHAOS", f"{fact}: give a pattern that matches its results")
    if not reference.num_saves:
        given = " ".join(options.saves or _TENSORS)
        fact = f"the script ended before any checkpoint that matches --saves {given}"
        fix = "give a pattern that matches its checkpoints, or let it save more often"
        raise ConfigError("CHAOS", f"{fact}: {fix}")


def _story(trial: Trial) -> str:
    """Return how a run was killed and started, in one line."""
    if not trial.kills:
        return "no kill"
    words = []
    for kill, is_resumed in zip(trial.reached, trial.resumed[1:], strict=False):
        words += [f"killed {kill}", "resumed" if is_resumed else "started over (nothing saved)"]
    if len(trial.reached) < len(trial.kills) and not trial.problem:
        words.append(f"ended before the kill {trial.kills[len(trial.reached)]}")
    return ", ".join(words)


# --- the last lines ---


def _survived(verdicts: Sequence[_Verdict]) -> str:
    num_kills = sum(len(each.trial.reached) for each in verdicts)
    num_resumes = sum(sum(each.trial.resumed) for each in verdicts)
    num_twice = sum(sum(each.trial.resumed) > 1 for each in verdicts)
    if not num_resumes:
        fact = "no kill came between a checkpoint and the end, so no resume was tested"
        raise ConfigError("CHAOS", f"{fact}: let the script train longer or save more often")
    twice = f" ({counted(num_twice, 'run')} {'was' if num_twice == 1 else 'were'} resumed twice)"
    return (
        f"survived {counted(num_kills, 'kill')} and {counted(num_resumes, 'resume')}"
        f"{twice if num_twice else ''}: all runs ended with the same files"
    )


def _failure(failed: _Verdict, once: _Verdict | None, kept: Path | None) -> Iterator[str]:
    differs_by_itself = not failed.trial.kills and failed.trial.problem is None
    if differs_by_itself:
        yield "the same command did not give the same files again:"
    yield from (f"  {line}" for line in failed.lines[:_SHOWN])
    if (more := len(failed.lines) - _SHOWN) > 0:
        yield f"  and {counted(more, 'more file')}"
    if differs_by_itself:
        yield (
            "resumes cannot be tested until it does: the usual causes are a missing seed, the "
            "time of day, and operations without a deterministic kernel"
        )
    if once is not None and once.outcome == "equal":
        yield "only the second resume loses state: after one kill, the files are equal"
    if kept is None:
        yield "to keep the files and the output of every run, add --keep FOLDER"


def _as_json(
    options: Namespace,
    verdicts: Sequence[_Verdict],
    failed: _Verdict | None,
    once: _Verdict | None,
) -> JsonObject:
    return {
        "script": options.script,
        "resume": options.resume,
        "survived": failed is None,
        "runs": [
            {
                "kills": [str(kill) for kill in each.trial.reached],
                "resumed": each.trial.resumed,
                "outcome": each.outcome,
                "problem": each.trial.problem,
                "differences": each.lines,
            }
            for each in verdicts
        ],
        "survives_one_kill": None if once is None else once.outcome == "equal",
    }
