"""Checks documented commands without running them: scripts, targets and flags."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib.util
import io
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed.run
from accelerate.commands.launch import launch_command_parser

from accel_trainer import parse_config
from accel_trainer.cli.common.recipes import find_config_class
from accel_trainer.cli.main import main as accel_trainer

from .pages import ROOT

_ASSIGNMENT = re.compile(r"[A-Z_]+=")


def check(command: str) -> None:
    """Raise if the shell command names anything that does not exist."""
    words = shlex.split(command, comments=True)
    while words and _ASSIGNMENT.match(words[0]):
        words.pop(0)
    if words and words[-1] == "&":
        words.pop()
    assert words[0] in _CHECKS, f"no rule says how to check {words[0]!r}: add one to {__name__}"
    _CHECKS[words[0]](words[1:])


def check_imports(code: str) -> None:
    """Raise if code is not valid Python or imports what does not exist."""
    tree = ast.parse(code)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), "<documentation>", "exec"), {})


@functools.cache
def recipe_flags(path: str) -> set[str]:
    """Return the flags of a recipe."""
    recipe = find_config_class(ROOT / path)
    text = shown(lambda: parse_config(recipe, ["--help"], description=""))
    return _flags_in(text) | {"--help-all"}


@functools.cache
def command_flags(name: str) -> set[str]:
    """Return the flags of a command of `accel-trainer`."""
    if name == "launch":
        return _parser_flags(launch_command_parser())
    return _flags_in(command_help(name))


def command_help(name: str) -> str:
    """Return what `accel-trainer NAME --help` prints, in lines as long as COLUMNS says."""
    return shown(lambda: accel_trainer([name, "--help"]))


@functools.cache
def launcher_flags() -> set[str]:
    """Return the flags of accelerate's and torch's launchers."""
    return _parser_flags(launch_command_parser()) | _parser_flags(
        torch.distributed.run.get_args_parser()
    )


def _parser_flags(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings}


def _flags_in(text: str) -> set[str]:
    return set(re.findall(r"--[a-z](?:[\w.-]*\w)?", text))


def shown(call: Callable[[], object]) -> str:
    """Return what a call prints, also if it ends the program."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        call()
    return out.getvalue()


def _check_script(script: str, arguments: Sequence[str]) -> None:
    """Check a script or notebook of the repository; for a recipe also its flags and values."""
    path = ROOT / script
    assert path.is_file(), f"there is no {script}"
    if script.startswith("recipes/") and path.suffix == ".py" and "--help" not in arguments:
        parse_config(find_config_class(path), list(arguments), description="")


def _check_module(name: str, arguments: Sequence[str]) -> None:
    assert importlib.util.find_spec(name), f"there is no module {name}"
    if name.startswith("accel_trainer.cli."):
        _check_accel_trainer([name.rpartition(".")[2], *arguments])


def _check_python(words: Sequence[str]) -> None:
    if words[0] == "-m":
        _check_module(words[1], words[2:])
    else:
        _check_script(words[0], words[1:])


def _check_accelerate(words: Sequence[str]) -> None:
    assert words[0] == "launch"
    _check_launch(launch_command_parser(), words[1:])


def _check_launch(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    options = parser.parse_args(words)
    if config := getattr(options, "config_file", None):
        assert (ROOT / config).is_file(), f"there is no {config}"
    check_started = _check_module if options.module else _check_script
    check_started(options.training_script, options.training_script_args)


def _check_accel_trainer(words: Sequence[str]) -> None:
    name, *arguments = words
    if name == "launch":
        return _check_accelerate(words)
    known = command_flags(name)
    recipes = [word for word in arguments if re.match(r"recipes/\w+\.py", word)]
    known = known.union(*map(recipe_flags, recipes))
    for word in arguments:
        # Words with a space are flags in quotes, of a recipe.
        assert not word.startswith("--") or " " in word or word.partition("=")[0] in known, (
            f"{name} knows no {word}"
        )
    return None


def _check_behind_options(words: Sequence[str]) -> None:
    """Check the Python command that a launcher such as srun starts."""
    _check_python(words[words.index("python") + 1 :])


def _check_make(words: Sequence[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    wrong = [word for word in words if "=" not in word and word not in targets]
    assert not wrong, f"make has no {wrong}"


def _check_pip(words: Sequence[str]) -> None:
    declared = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    known = set(re.findall(r"^(\w+) = \[", declared.partition("\n[")[0], re.MULTILINE))
    for extras in re.findall(r"\.\[([\w,]+)\]", " ".join(words)):
        unknown = set(extras.split(",")) - known
        assert not unknown, f"there is no extra {unknown}"


def _check_docker(words: Sequence[str]) -> None:
    if "--target" in words:
        stage = words[words.index("--target") + 1]
        assert f" AS {stage}\n" in (ROOT / "Dockerfile").read_text(), f"there is no stage {stage}"
    if "accel-trainer" in words[:-1] and words[0] == "run":
        check(" ".join(words[words.index("accel-trainer") + 1 :]))


def _check_sbatch(words: Sequence[str]) -> None:
    script = Path(words[0])
    assert (ROOT / script).is_file(), f"there is no {script}"
    started = re.search(r"python (recipes/\w+\.py)", (ROOT / script).read_text())
    assert started, f"{script} starts no recipe"
    _check_script(started[1], words[1:])


_CHECKS: dict[str, Callable[[Sequence[str]], None]] = {
    "accel-trainer": _check_accel_trainer,
    "accelerate": _check_accelerate,
    "torchrun": lambda words: _check_launch(torch.distributed.run.get_args_parser(), words),
    "srun": _check_behind_options,
    "sbatch": _check_sbatch,
    "docker": _check_docker,
    "python": _check_python,
    "make": _check_make,
    "pip": _check_pip,
    "jupyter": lambda words: _check_script(words[1], []),
    "source": lambda words: None,
    "git": lambda words: None,
    "cd": lambda words: None,
    "ssh": lambda words: None,
}
