"""Runs of any training program: each is killed, and started again, until it is done."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path

import psutil

from accel_trainer import ConfigError
from accel_trainer.commands import files_with_status

_POLL_S = 0.02
_QUIET_S = 0.1
_MIN_LIMIT_S = 60.0
_LIMIT = 5  # times what a whole run takes
_MARK = "ACCEL_TRAINER_CHAOS_START"
_LATE = 124  # as `timeout` exits


@dataclass(frozen=True)
class Script:
    """A program, and where it saves.

    `first` and `resume` are words of its command, `saves` patterns of its checkpoints. Every run
    writes to the same folder `out`, so that no path differs; afterwards its files are moved away.
    """

    first: Sequence[str]
    resume: Sequence[str]
    saves: Sequence[str]
    folder: Path

    @property
    def out(self) -> Path:
        """The folder that `{out}` stands for."""
        return self.folder / "out"

    def words(self, newest: Path | None) -> list[str]:
        """Return the command that starts it, or resumes it if there is a `newest` checkpoint."""
        words = [*self.first, *(self.resume if newest else ())]
        return [
            word.replace("{out}", str(self.out)).replace("{newest}", str(newest)) for word in words
        ]


@dataclass(frozen=True)
class Kill:
    """When a start is killed: as soon as it has saved `saves` times, or else after `seconds`."""

    saves: int = 0
    seconds: float = 0

    def __str__(self) -> str:
        return f"after save {self.saves}" if self.saves else f"after {self.seconds:.1f} s"


@dataclass
class Trial:
    """How a run went: `out` is the folder of its files, `problem` the reason why it failed.

    `resumed` has, for each start, whether it was a resume. `reached` has the kills that took place.
    `num_saves` counts the checkpoints of the last start.
    """

    kills: Sequence[Kill]
    out: Path
    resumed: list[bool] = field(default_factory=list)
    reached: list[Kill] = field(default_factory=list)
    num_saves: int = 0
    seconds: float = 0
    code: int = 0
    problem: str | None = None


class _Saves:
    """Watches the checkpoints of a program, of which each is a file or a folder."""

    def __init__(self, script: Script, whole: Path | None) -> None:
        self.count = 0
        self._out, self._whole = script.out, whole
        self._patterns = [each.replace("{out}", str(script.out)) for each in script.saves]
        self._files = self._look()
        self._changed_at: float | None = None

    def _look(self) -> dict[Path, tuple[int, int]]:
        return {
            file: (status.st_size, status.st_mtime_ns)
            for _, files in self._checkpoints()
            for file, status in files.items()
        }

    def _checkpoints(self) -> Iterator[tuple[Path, dict[Path, os.stat_result]]]:
        """Yield the path of each checkpoint, with its files."""
        for pattern in self._patterns:
            for path in map(Path, glob(pattern, recursive=True)):
                yield path, files_with_status(path)

    def update(self) -> None:
        """Count a save once its files have not changed for a moment."""
        files = self._look()
        if files != self._files:
            self._files = files
            self._changed_at = time.monotonic()
        elif self._changed_at is not None and time.monotonic() - self._changed_at >= _QUIET_S:
            self._changed_at = None
            self.count += 1

    def newest(self, killed_at: float) -> Path | None:
        """Return the newest checkpoint that was complete a moment before `killed_at`.

        Complete is one that has not changed since, and has the files that the whole run left there.
        """
        newest: tuple[float, Path] | None = None
        for path, files in self._checkpoints():
            changed_at = max((file.st_mtime for file in files.values()), default=killed_at)
            written = {file for file in files if files[file].st_size}
            is_quiet = killed_at - changed_at >= _QUIET_S
            if written and is_quiet and written >= self._wanted(path):
                newest = max(newest or (0.0, path), (changed_at, path))
        return newest and newest[1]

    def _wanted(self, checkpoint: Path) -> set[Path]:
        """Return the files that a checkpoint needs as far as the whole run has it."""
        if self._whole is None:
            return set()
        files = files_with_status(self._whole / checkpoint.relative_to(self._out))
        return {
            self._out / file.relative_to(self._whole)
            for file, status in files.items()
            if status.st_size
        }


def run_script(
    script: Script,
    kills: Sequence[Kill],
    *,
    name: str,
    stops: Sequence[int],
    whole: Trial | None = None,
) -> Trial:
    """Start a program again after each kill, until it is done.

    Its files are then in the folder `name`, and its output in `name`.log. A start may take five
    times as long as `whole`, a run without a kill; None: any time.

    Raises:
        ConfigError: the program cannot be started, or its folder is gone in the end.
        KeyboardInterrupt: a signal was noted in `stops`.
    """
    trial = Trial(kills, script.folder / name)
    script.out.mkdir()
    log = script.folder / f"{name}.log"
    limit_s = max(_LIMIT * whole.seconds, _MIN_LIMIT_S) if whole else float("inf")
    newest = None
    begin = time.monotonic()
    for kill in (*kills, None):
        trial.resumed.append(newest is not None)
        saves = _Saves(script, whole.out if whole else None)
        with _started(script.words(newest), log) as process:
            code = _wait(process, saves, kill, limit_s, stops)
            killed_at = time.time()
        trial.num_saves = saves.count
        if code is not None:
            trial.code = code
            break
        assert kill is not None
        trial.reached.append(kill)
        newest = saves.newest(killed_at)
    if trial.code:
        trial.problem = _problem(trial, log)
    trial.seconds = time.monotonic() - begin
    if script.out.is_symlink() or not script.out.is_dir():
        fact = "--script has removed the folder {out}, or put a link in its place"
        raise ConfigError("CHAOS", f"{fact}: let it write into the folder")
    script.out.rename(trial.out)
    return trial


def _problem(trial: Trial, log: Path) -> str:
    kind = "a resume" if trial.resumed[-1] else "from the beginning"
    late = trial.code == _LATE
    how = "took too long" if late else f"ended with exit code {trial.code}"
    said = log.read_text(encoding="utf-8", errors="replace").rstrip().rpartition("\n")[2]
    return f"start {len(trial.resumed)}, {kind}, {how}: {said or 'it printed nothing'}"


@contextmanager
def _started(words: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a new session, and kill it with all its children at the end.

    Raises ConfigError for a program that cannot be started.
    """
    mark = uuid.uuid4().hex
    with log.open("ab") as said:
        try:
            process = subprocess.Popen(
                words,
                env={**os.environ, _MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            fact = f"--script cannot start {words[0]!r}: {error.strerror}"
            raise ConfigError("CHAOS", f"{fact}: check the path of the program") from None
    try:
        yield process
    finally:
        _kill_all(process, mark)


def _kill_all(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill a process and all that it has started, in other sessions and detached from it, too."""
    children = []
    if process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
    psutil.wait_procs(children, timeout=_MIN_LIMIT_S)
    while detached := [each for each in psutil.process_iter() if _is_marked(each, mark)]:
        for each in detached:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(detached, timeout=_QUIET_S)


def _is_marked(process: psutil.Process, mark: str) -> bool:
    """Whether the environment of a process, which it inherits, has the mark of a start."""
    with suppress(psutil.Error, OSError):
        return bool(process.environ().get(_MARK) == mark)
    return False


def _wait(
    process: subprocess.Popen[bytes],
    saves: _Saves,
    kill: Kill | None,
    limit_s: float,
    stops: Sequence[int],
) -> int | None:
    """Return the exit code, 124 if it takes too long; None if it is to be killed now."""
    begin = time.monotonic()
    while (code := process.poll()) is None:
        time.sleep(_POLL_S)
        saves.update()
        seconds = time.monotonic() - begin
        if stops:
            raise KeyboardInterrupt
        if seconds > limit_s:
            return _LATE
        if kill is not None and (
            saves.count >= kill.saves if kill.saves else seconds >= kill.seconds
        ):
            return None
    return code


def draw_kills(num_runs: int, reference: Trial, *, seed: int) -> list[tuple[Kill, Kill]]:
    """Return two kills for each run: in turn, soon after two saves, and at any two moments."""
    draw = random.Random(seed)
    plans = []
    for number in range(num_runs):
        if number % 2:
            first, second = sorted(draw.uniform(0, reference.seconds) for _ in range(2))
            plans.append((Kill(seconds=first), Kill(seconds=second - first)))
        else:
            saves = draw.randint(1, max(1, reference.num_saves - 2))
            more = draw.randint(1, max(1, reference.num_saves - saves - 1))
            plans.append((Kill(saves=saves), Kill(saves=more)))
    return plans
