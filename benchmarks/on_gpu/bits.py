"""Wrong bits: steps that are checked, a device that seems to compute wrong, and an operation that
does not repeat itself, with what each is said to be."""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

from accel_trainer.lab.why.why import why

from .. import results
from .page import Page, Setting
from .runs import SMALL, command, finish, hashes, result, train

FOLDER = results.COMMITTED / "on_gpu"
PLANTED = FOLDER / "planted.py"
OPERATION = {"cuda": "grid_sampler_2d_backward_cuda", "cpu": "put_"}
CAUSE = {"cuda": "no deterministic kernel", "cpu": "a generator that is not seeded"}


def run(page: Page, setting: Setting) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checks = {
            "an operation named": partial(_name_operation, page, setting, folder),
            "checked steps": partial(_check_steps, page, setting, folder),
            "a wrong bit": partial(_flip_bit, page, setting, folder),
        }
        flags = [("--check-every", "2")]
        if setting.device == "cuda":
            flags.append(("--runtime.deterministic", "strict"))
        for each in flags:
            checks[" ".join(each)] = partial(_refuse, page, setting, folder, each)
        page.attempt_together(checks)
        page.attempt("why", partial(_ask_why, page, setting, folder))


def _check_steps(page: Page, setting: Setting, folder: Path) -> None:
    """Train with every fourth step computed twice, and without: the tensors must be the same."""
    num_steps = 8 if setting.is_tiny else 200
    for name, flags in (("plain", ()), ("checked", ("--check-every", "4"))):
        train(setting, folder / name, *SMALL, "--max-steps", str(num_steps), *flags)
        speed = result(folder / name)["samples_per_s"]
        page.add(f"{num_steps} steps", {"run": " ".join((name, *flags)), "images/s": speed})
    is_equal = hashes(folder / "plain") == hashes(folder / "checked")
    page.judge("--check-every finds nothing, and leaves the same bits", holds=is_equal)


def _flip_bit(page: Page, setting: Setting, folder: Path) -> None:
    """Change a bit of a gradient when step 4 is computed again, as a faulty device might."""
    words = command(setting, folder / "flip", *SMALL, "--max-steps", "8", "--check-every", "4")
    done = finish(words, {"ACCEL_TRAINER_CALLBACKS": str(FOLDER / "flip.py")})
    line = _last_error(done.stdout)
    page.add("A run that ended", {"run": "a wrong bit", "exit code": done.returncode, "line": line})
    names_device = f"since {setting.device}" in line and "test or replace the device" in line
    page.judge("a wrong bit ends the run, and names the device", holds=names_device)


def _planted(folder: Path, *flags: str) -> list[str]:
    steps = ("--max-steps", "4", "--trainer.log-every-n-steps", "1")
    digests = ("--trainer.digest-every-n-steps", "1")
    words = [sys.executable, str(PLANTED), "--output-dir", str(folder), "--seed", "0", "--quiet"]
    return [*words, *steps, *digests, *flags]


def _name_operation(page: Page, setting: Setting, folder: Path) -> None:
    """Train twice with an operation that has no deterministic kernel: each run must say so."""
    for name in ("one", "two"):
        done = finish(_planted(folder / name))
        said = [line for line in done.stdout.splitlines() if "no deterministic kernel" in line]
        named = ", ".join(result(folder / name).get("nondeterministic_operations", ()))
        row = {"run": name, "exit code": done.returncode, "in result.json": named}
        page.add("An operation that does not repeat itself", {**row, "lines": len(said)})
        if setting.device == "cuda":  # a CPU is not asked for deterministic kernels
            page.judge(
                f"run {name} names {OPERATION['cuda']} once, and in result.json",
                holds=len(said) == 1
                and OPERATION["cuda"] in said[0]
                and OPERATION["cuda"] in named,
            )
    differ = hashes(folder / "one") != hashes(folder / "two")
    page.judge("two runs with such an operation differ", holds=differ)


def _refuse(page: Page, setting: Setting, folder: Path, flags: tuple[str, ...]) -> None:
    name = " ".join(flags)
    done = finish(_planted(folder / "-".join(flags).strip("-"), *flags))
    line = _last_error(done.stdout)
    page.add("A run that ended", {"run": name, "exit code": done.returncode, "line": line})
    page.judge(
        f"{name} names {OPERATION[setting.device]} and ends the run",
        holds=bool(done.returncode) and OPERATION[setting.device] in line,
    )


def _ask_why(page: Page, setting: Setting, folder: Path) -> None:
    """Ask why the two runs of `_name_operation` differ."""
    found = why(folder / "one", folder / "two", recipes=[PLANTED], say=print)
    row = {"step": found.step, "phase": found.phase, "operator": found.operator, "ulp": found.ulp}
    page.add("Why two runs differ", {**row, "line": found.line, "cause": found.cause})
    page.judge(
        f"`why` names the cause: {CAUSE[setting.device]}",
        holds=found.cause == CAUSE[setting.device],
    )


def _last_error(said: str) -> str:
    lines = [line for line in said.splitlines() if "error[" in line]
    return lines[-1] if lines else "none"
