"""`accel-trainer doctor [RECIPE.py | RUN] [flags]`: find problems before a run, with the fix for each.

Checks this machine, the launch, the recipe's config, its data and its run folder. Given a run, it uses the run's own
config and explains the errors of its last attempt. To check many processes and the network between them, launch it like
a recipe:

    accelerate launch --multi_gpu --num_processes 8 -m accel_trainer.cli.doctor recipes/cifar.py --batch-size 256

The exit code is 64 if something would stop or spoil a run, else 0.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import yaml

from ...core.config import config_to_dict, flatten_config
from ...core.errors import ExitCode, OutputError
from ...distributed.launch_env import setup_launch_env
from ...run import preflight
from ...run.config import RecipeConfig
from ...run.parser import load_config, parse_config, parse_config_and_origins
from ...run.preflight import Check, LaunchContext
from ...run.resume import read_stored_config
from ...vision.sources.photos import PhotoConfig
from ..plan import find_config_class
from ..runs.tables import show
from . import folder, launching, machine
from .findings import Finding, examine, rank_in
from .symptoms import diagnose
from .together import examine_together

CHECKS: tuple[Check, ...] = (*preflight.CHECKS, *launching.CHECKS, *machine.CHECKS, *folder.CHECKS)

_DESCRIPTION = """Find problems before a run.

example: accel-trainer doctor recipes/cifar.py --config recipes/configs/digits.yaml"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the problems; return 64 if one is an error. **Collective** when launched on several processes."""
    flags = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in flags
    config = _read_config([flag for flag in flags if flag != "--json"])
    setup_launch_env()  # refuses inconsistent launch variables
    now = LaunchContext(config=config)
    rank = rank_in(now)
    mine = examine(now, CHECKS)
    if rank == 0 and config.run.output_dir is not None:
        mine += diagnose(config.run.output_dir)
    has_errors = any(finding.severity == "error" for finding in mine)
    # After an error such as a port in use, connecting would only wait for the timeout.
    lines, everything = ([], mine) if has_errors else examine_together(now, mine)
    if rank == 0 or not lines:
        if as_json:
            print(_as_json(everything))
        else:
            show("\n".join([*lines, *_describe(everything, now)]))
    is_bad = any(finding.severity == "error" for finding in everything)
    return ExitCode.USAGE if is_bad else ExitCode.DONE


@dataclass(frozen=True, kw_only=True)
class _StoredConfig(RecipeConfig):
    """The part of a run's `config.yaml` that the checks read, for any recipe."""

    dataset: str | None = None
    """`--dataset` of a recipe that has one."""


@dataclass(frozen=True, kw_only=True)
class _StoredPhotosConfig(_StoredConfig):
    """The same, of a recipe that reads photos."""

    photos: PhotoConfig = field(default_factory=PhotoConfig)


def _read_config(flags: list[str]) -> RecipeConfig:
    """Return the config of a recipe with flags, or of a run, or without either the defaults with flags."""
    target = Path(flags.pop(0)) if flags and not flags[0].startswith("-") else None
    if target is not None and target.is_dir():
        return _read_run(target, flags)
    config_class = RecipeConfig if target is None else find_config_class(target)
    return parse_config(config_class, flags, description=_DESCRIPTION)


def _read_run(run: Path, flags: Sequence[str]) -> RecipeConfig:
    """Return the config of a run, changed by `flags`. Its recipe is not imported: it is code."""
    has_config = os.path.lexists(run / "config.yaml")
    if not has_config and not os.path.lexists(run / "status.json"):
        raise OutputError("NOT_A_RUN", f"{run} is not a run (there is no config.yaml): check the path")
    stored = dict(flatten_config(read_stored_config(run))) if has_config else {}
    config_class = _StoredPhotosConfig if "photos.image_size" in stored else _StoredConfig
    asked, origins = parse_config_and_origins(config_class, flags, description=_DESCRIPTION)
    config: RecipeConfig = asked
    if has_config:
        values = dict(flatten_config(config_to_dict(asked)))
        kept = {name: stored[name] for name in values if name in stored and origins[name] == "default"}
        text = yaml.safe_dump(values | kept)
        config = load_config(config_class, text, source=str(run / "config.yaml"))
    return replace(config, run=replace(config.run, output_dir=run, resume="auto"))


def _as_json(everything: Sequence[Finding]) -> str:
    return json.dumps([asdict(finding) for finding in everything], indent=1)


def _describe(everything: Sequence[Finding], now: LaunchContext) -> list[str]:
    """Return a line per finding, merged over processes, and one per check that passed."""
    ranks: dict[tuple[str, str, str], list[int]] = {}
    for finding in everything:
        ranks.setdefault((finding.severity, finding.code, finding.message), []).append(finding.rank)
    lines = []
    for (severity, code, message), who in sorted(ranks.items()):
        where = f" (on processes {', '.join(map(str, who))})" if now.num_processes > 1 else ""
        lines.append(f"{severity:<8}{code}: {message}{where}")
    codes = {code for _, code, _ in ranks}
    well = [(check.run.__doc__ or "").rstrip(".") for check in CHECKS if check.code not in codes]
    return [*(f"{'ok':<8}{line}" for line in well), *lines, _summary([s for s, _, _ in ranks])]


def _summary(severities: Sequence[str]) -> str:
    num_errors = severities.count("error")
    num_warnings = len(severities) - num_errors
    if not severities:
        return "no problems found"
    return f"{num_errors} errors, {num_warnings} warnings; see docs/troubleshooting.md"
