"""What to do about a run that failed with an error that no rule knows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...core.errors import ExitCode
from ..common.output import JsonObject
from .findings import Finding

# By how the run ended.
_FIXES: Mapping[int, str] = {
    ExitCode.USAGE: "correct the flag or the value, and start the command again",
    ExitCode.DATA: "correct the data, and start the same command again; {resumes}",
    ExitCode.OUTPUT: "free some space, or choose a different --output-dir, and start again",
    ExitCode.CHECKPOINT: "`accel-trainer inspect {run}` shows the contents of the checkpoints",
    ExitCode.DIVERGED: "train with a lower learning rate in a different --output-dir; "
    "`accel-trainer replay {run} --step {step}` lists the samples of that step",
    ExitCode.USER_CODE: "correct that code, and start the same command again; {resumes}",
}
_AGAIN = "start the same command again, with --debug for the whole traceback; {resumes}"


def advise(run: Path, status: JsonObject) -> list[Finding]:
    """Return the cause of the failure that `status` records, and the next command."""
    if status["state"] not in ("failed", "diverged"):
        return []
    commit = status.get("last_commit")
    step = status.get("optimizer_step") or 0
    step += (run / f"nonfinite-step-{step + 1:010d}.json").exists()  # it was not applied
    resumes = (
        f"it resumes from {commit}"
        if commit
        else "there is no checkpoint, so it starts from scratch"
    )
    fix = _FIXES.get(status["exit_code"] or 0, _AGAIN).format(run=run, resumes=resumes, step=step)
    unknown = "" if status.get("error") else "its error was not recorded; "
    return [Finding("FAILED", "error", f"the last attempt ended with an error: {unknown}{fix}")]
