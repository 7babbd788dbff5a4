"""The entry point of `accel-trainer`. It imports only the command that is called.

`find_commands` finds the commands by the first line of their docstrings. The groups only arrange
the overview: a command that is in none of them is listed under debugging.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
import platform
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import chain
from typing import Any, cast

from ..callbacks import console
from ..core.errors import ConfigError, ExitCode, OneLineError
from ..removed import refuse_removed_command
from .common.output import printable

_PACKAGES = tuple(f"{__name__.partition('.')[0]}.{name}" for name in ("cli", "lab"))
_DONE_BY_RECIPES = ("train", "fit", "run", "resume")
_INTERRUPTED = 130  # 128 + SIGINT
# The optional dependencies that bring a package; commands that do without it check for themselves.
_EXTRAS = {"PIL": "vision", "datasets": "vision", "jinja2": "report", "matplotlib": "report"}
# Matches the first line of a command's source. Only this line is read: parsing all files would take
# longer than a small command.
_SUMMARY = re.compile(
    r'"""`accel-trainer (?P<name>[a-z-]+)(?P<arguments>[^`]*)`: (?P<text>.+?)\.?(?:""")?\n'
)
# What each group is for, and its commands.
_GROUPS = {
    "Train (recipes train and resume: python RECIPE.py --help)": (
        "new",
        "plan",
        "launch",
        "lr-find",
        "sweep",
        "finish",
    ),
    "Inspect runs": ("runs", "status", "watch", "report", "inspect"),
    "Debug runs (by retraining parts of them)": (),
    "Share": ("export", "evaluate", "predict", "verify"),
    "Data": ("data", "pack"),
    "Machine": ("doctor",),
}


@console.speaking_flags()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` and return its exit code; without a command, list all commands.

    A `OneLineError` is printed on stderr and returns its exit code. Ctrl-C returns 130, as for a
    program that the signal kills.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    console.escape_letters()
    try:
        if not argv or argv[0] in ("-h", "--help", "help"):
            print(_overview())
            return 0
        if argv[0] in ("-V", "--version"):
            print(_versions())
            return 0
        # Before a parser asks for arguments that are missing. A recipe has its own --hours.
        gone = [flag for flag in argv[1:] if flag.partition("=")[0] != "--hours"]
        refuse_removed_command(argv[0], gone)
        code = int(_find(argv[0]).main(argv[1:]))
        console.flush()
        return code
    except OneLineError as error:
        # An `UnknownRecipeError` has it, whose module not every command imports.
        shown = error.with_command(argv) if hasattr(error, "with_command") else error
        print(f"accel_trainer: {shown.line}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print("accel_trainer: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, stopped reading
        console.mute()
        return 0
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        fix = f"pip install 'accel-trainer[{_EXTRAS[error.name]}]'"
        message = f"this command needs {error.name}: {fix}"
        print(f"accel_trainer: error[PACKAGE]: {message}", file=sys.stderr)
        return ExitCode.USAGE
    except OSError as error:
        console.mute()  # stdout itself may have failed
        fix = "check the paths, and the disk of stdout"
        print(f"accel_trainer: error[IO]: {printable(str(error))}: {fix}", file=sys.stderr)
        return ExitCode.OUTPUT


def _find(name: str) -> Any:
    commands = find_commands()
    if name not in commands:
        near = difflib.get_close_matches(name, commands, n=1)
        fix = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(commands)}"
        if name in _DONE_BY_RECIPES:
            fix = (
                "to train, run a recipe, such as python recipes/images.py --dataset PHOTOS, or "
                "create one with accel-trainer new FOLDER; the same command resumes"
            )
        raise ConfigError("USAGE", f"{name[:40]!r} is not a command: {fix}")
    return importlib.import_module(commands[name][0])


def _versions() -> str:
    """Return the versions of this package, of Python and of what it builds on."""
    found = [f"{name} {version(name)}" for name in ("accel-trainer", "accelerate", "torch")]
    return ", ".join([*found, f"Python {platform.python_version()}"])


def _overview() -> str:
    commands = find_commands()
    columns = shutil.get_terminal_size().columns
    width = max(map(len, commands))
    lines = ["usage: accel-trainer COMMAND ..."]
    for group, names in grouped(commands).items():
        lines += ["", *textwrap.wrap(group, columns)]
        for name in names:
            first = f"  {name:<{width}}  "
            lines += textwrap.wrap(
                commands[name][2], columns, initial_indent=first, subsequent_indent=" " * len(first)
            )
    return "\n".join([*lines, "", "See accel-trainer COMMAND --help."])


def grouped(commands: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of commands by what they are for; each is in one group."""
    listed = [name for names in _GROUPS.values() for name in names]
    others = [name for name in commands if name not in listed]
    return {group: list(names) or others for group, names in _GROUPS.items()}


def find_commands() -> dict[str, tuple[str, str, str]]:
    """Return the module, the arguments and the summary of each command, by its name.

    A module of cli or lab is a command if its docstring starts like "`accel-trainer status RUN`:
    show the state of a run". The modules are not imported.
    """
    commands = {}
    for module in chain.from_iterable(map(_modules_of, _PACKAGES)):
        loader = cast(Any, importlib.util.find_spec(module.name)).loader
        if match := _SUMMARY.match(loader.get_source(module.name)):
            commands[match["name"]] = (module.name, match["arguments"], match["text"])
    return dict(sorted(commands.items()))


def _modules_of(package: str) -> Iterator[pkgutil.ModuleInfo]:
    return pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
