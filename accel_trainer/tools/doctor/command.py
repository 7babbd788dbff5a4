"""Reads the command line, applies all rules and prints what they find."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml

from ... import preflight
from ...config import (
    config_to_dict,
    flatten_config,
    load_config,
    parse_config,
    parse_config_and_origins,
)
from ...errors import ExitCode, OutputError
from ...launcher_variables import setup_launch_env
from ...preflight import Rule, Situation
from ...resume import Source, read_stored_config
from ...run_config import RecipeConfig
from ..plan import find_config_class
from . import folder, launching, machine
from .findings import Finding, examine, rank_in
from .symptoms import diagnose
from .together import examine_together

RULES: tuple[Rule, ...] = (*preflight.RULES, *launching.RULES, *machine.RULES, *folder.RULES)

_DESCRIPTION = """Look before leaping.

example: accel-trainer doctor recipes/cifar.py --config recipes/configs/digits.yaml"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print what would go wrong; return 64 if it is an error. **Collective** when launched on several processes."""
    flags = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in flags
    config = _read_config([flag for flag in flags if flag != "--json"])
    setup_launch_env()  # refuses a launch that contradicts itself
    now = Situation(config=config)
    rank = rank_in(now)
    mine = examine(now, RULES)
    if rank == 0 and config.run.output_dir is not None:
        mine += diagnose(config.run.output_dir)
    has_errors = any(finding.severity == "error" for finding in mine)
    # With a port in use and the like, to join would only wait for the others in vain.
    lines, everything = ([], mine) if has_errors else examine_together(now, mine)
    if rank == 0 or not lines:
        print(_as_json(everything) if as_json else "\n".join([*lines, *_describe(everything, now)]))
    is_bad = any(finding.severity == "error" for finding in everything)
    return ExitCode.USAGE if is_bad else ExitCode.DONE


@dataclass(frozen=True, kw_only=True)
class _StoredConfig(RecipeConfig):
    """What the rules look at in the `config.yaml` of a run, whatever its recipe."""

    dataset: str | None = None
    """As `--dataset` of a recipe that has it."""


def _read_config(flags: list[str]) -> RecipeConfig:
    """Return the config of a recipe with its flags, of a run, or of any recipe."""
    target = Path(flags.pop(0)) if flags and not flags[0].startswith("-") else None
    if target is not None and target.is_dir():
        return _read_run(target, flags)
    config_class = RecipeConfig if target is None else find_config_class(target)
    return parse_config(config_class, flags, description=_DESCRIPTION)


def _read_run(run: Path, flags: Sequence[str]) -> RecipeConfig:
    """Return what a run was started with, as changed by `flags`. Its recipe stays unread: it is code."""
    asked, origins = parse_config_and_origins(_StoredConfig, flags, description=_DESCRIPTION)
    config: RecipeConfig = asked
    if os.path.lexists(run / "config.yaml"):
        stored = dict(flatten_config(read_stored_config(Source(run, None))))
        values = dict(flatten_config(config_to_dict(asked)))
        kept = {name: stored[name] for name in values if name in stored and origins[name] == "default"}
        text = yaml.safe_dump(values | kept)
        config = load_config(_StoredConfig, text, source=str(run / "config.yaml"))
    elif not os.path.lexists(run / "status.json"):
        raise OutputError("NOT_A_RUN", f"{run} is not a run (there is no config.yaml): check the path")
    return replace(config, run=replace(config.run, output_dir=run, resume="auto"))


def _as_json(everything: Sequence[Finding]) -> str:
    return json.dumps([asdict(finding) for finding in everything], indent=1)


def _describe(everything: Sequence[Finding], now: Situation) -> list[str]:
    """Return a line for each thing that was found, the same of several processes once, and one for all that is well."""
    ranks: dict[tuple[str, str, str], list[int]] = {}
    for finding in everything:
        ranks.setdefault((finding.severity, finding.code, finding.message), []).append(finding.rank)
    lines = []
    for (severity, code, message), who in sorted(ranks.items()):
        where = f" (on processes {', '.join(map(str, who))})" if now.num_processes > 1 else ""
        lines.append(f"{severity:<8}{code}: {message}{where}")
    codes = {code for _, code, _ in ranks}
    well = [(rule.find.__doc__ or "").rstrip(".") for rule in RULES if rule.code not in codes]
    return [*(f"{'ok':<8}{line}" for line in well), *lines, _summary([s for s, _, _ in ranks])]


def _summary(severities: Sequence[str]) -> str:
    num_errors = severities.count("error")
    num_warnings = len(severities) - num_errors
    if not severities:
        return "nothing is wrong"
    return f"{num_errors} errors, {num_warnings} warnings; docs/troubleshooting.md says more about each"
