"""`accel-trainer doctor [RECIPE.py | RUN] [flags]`: find problems, or explain a failed run.

It checks this machine and the launch for problems. The config, the data and the run folder are
checked by every start, and tried out by `RECIPE.py --dry-run`. To check several processes and the
network between them, launch the doctor like a recipe:

    accelerate launch --multi_gpu --num_processes 8 -m accel_trainer.cli.doctor recipes/cifar.py
    --batch-size 256

Given a run, it explains the error that ended it. The exit code is 64 if a problem would stop or
spoil a run, or has stopped the given one, else 0.

example: accel-trainer doctor recipes/cifar.py --config recipes/configs/digits.yaml
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ...core.errors import ExitCode
from ...core.filesystem import read_file
from ...core.wording import counted
from ...distributed.launch_env import setup_launch_env
from ...run.config import RecipeConfig
from ..common.output import show, tell_json
from ..common.parser import CommandParser
from ..common.recipes import find_config_class
from ..flags.parser import parse_config
from ..runs.status import require_status
from . import launching, machine
from .findings import Check, Finding, LaunchContext, examine
from .next_step import advise
from .starting import examine_start
from .symptoms import diagnose
from .together import examine_together

CHECKS: tuple[Check, ...] = (*launching.CHECKS, *machine.CHECKS)

_MAX_BYTES = 1 << 26
_KILLED = (
    "the run ended without a word: it was killed from outside, often for lack of memory "
    "(`dmesg | grep -i oom`), or the machine stopped; run the same command to continue"
)


def main(argv: Sequence[str]) -> int:
    """Print the problems; return 64 if one is an error.

    **Collective** when launched on several processes.
    """
    parser = CommandParser(__doc__)
    parser.add_json_option("print the findings as JSON")
    options, flags = parser.parse_known_args(argv)
    target = Path(flags.pop(0)) if flags and not flags[0].startswith("-") else None
    if target is not None and target.is_dir():
        lines, found = _explain(target)
    else:
        lines, found = _examine(target, flags)
    if lines and options.json:
        tell_json([asdict(finding) for finding in found])
    elif lines:
        show("\n".join([*lines, *_describe(found), _summary(found)]))
    return ExitCode.USAGE if _has_errors(found) else ExitCode.DONE


def _explain(run: Path) -> tuple[list[str], list[Finding]]:
    """Return lines with the state of a run, and the explanation of what ended it."""
    status = require_status(run)
    lines = [f"{name}: {status[name]}" for name in ("state", "error") if status.get(name)]
    if status["state"] == "killed":
        return lines, [Finding("KILLED", "error", _KILLED)]
    return lines, diagnose(status) or advise(run, status)


def _examine(path: Path | None, flags: Sequence[str]) -> tuple[list[str], list[Finding]]:
    """Return lines about the machine and the checks that pass, and the findings of all processes.

    There are no lines on a process that leaves the printing to another.
    """
    config_class, source = RecipeConfig, ""
    if path is not None:
        config_class = find_config_class(path)
        source = read_file(path, max_bytes=_MAX_BYTES).decode(errors="replace")
    config = parse_config(config_class, flags, description=__doc__)
    setup_launch_env()  # refuses inconsistent launch variables
    now = LaunchContext(config=config, source=source)
    found = [*examine_start(now), *examine(now, CHECKS)]
    lines: list[str] = []
    # After an error such as a port in use, connecting would only wait for the timeout.
    if not _has_errors(found):
        lines, found = examine_together(now, found)
        if lines and now.rank:
            return [], found
    wrong = {finding.code for finding in found}
    passed = [check.code for check in CHECKS if check.code not in wrong]
    return [*lines, f"{'ok':<8}{', '.join(passed)}"], found


def _has_errors(found: Sequence[Finding]) -> bool:
    return any(finding.severity == "error" for finding in found)


def _describe(found: Sequence[Finding]) -> list[str]:
    """Return a sorted line per finding, with its processes if any but the first found something."""
    ranks: dict[str, list[int]] = {}
    for finding in found:
        line = f"{finding.severity:<8}{finding.code}: {finding.message}"
        ranks.setdefault(line, []).append(finding.rank)
    lines = sorted(ranks)
    if any(finding.rank for finding in found):
        return [f"{line} (on processes {', '.join(map(str, ranks[line]))})" for line in lines]
    return lines


def _summary(found: Sequence[Finding]) -> str:
    if not found:
        return "no problems found"
    number = Counter(finding.severity for finding in found)
    kinds = ", ".join(counted(number[kind], kind) for kind in ("error", "warning"))
    return f"{kinds}; see docs/troubleshooting.md"
