"""Writes the page of commands from their docstrings and their `--help`.

`python -m tests.docs.commands_page` writes them into the page.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from typing import Any, cast

from accel_trainer.cli.main import find_commands

from .commands import command_help
from .pages import GENERATED, ROOT

PAGE = ROOT / "docs" / "reference" / "commands.md"
MARK = f"{GENERATED}python -m tests.docs.commands_page -->\n"

# Why the example of a command is not run. All other examples are.
NOT_RUN = {
    "compare": "trains 25 parts of runs",
    "launch": "needs GPUs",
    "lr-find": "takes a hundred steps",
    "plan": "trains for some seconds",
    "probe": "needs a file of callbacks",
    "replay": "needs a run that diverged",
    "report": "opens a browser",
    "sweep": "trains six times",
    "watch": "serves until Ctrl-C",
    "why": "trains parts of both runs again",
}
# These use a different parser, with hundreds of flags.
FLAGS_ELSEWHERE = {
    "doctor": (
        "It takes [the recipe's flags](flags.md). `--json` prints the findings for scripts."
    ),
    "launch": "It takes the flags of `accelerate launch`.",
}
_ENTRY = re.compile(r"^  (\S.*?)(?:  +(.*))?$")


def sections() -> str:
    """Return a table of all commands, and for each a section with its arguments and an example."""
    rows = [f"| [`{name}`](#{name}) | {text} |\n" for name, (_, _, text) in find_commands().items()]
    return "".join(
        ["| command | what it does |\n|---|---|\n", *rows, *map(_section, find_commands())]
    )


def _section(name: str) -> str:
    module, usage, text = find_commands()[name]
    details = _docstring(module).partition(": ")[2].partition("\n\nexample: ")[0].strip()
    shown = command_help(name)
    (example,) = set(re.findall(r"^example: (.*)$", shown, re.MULTILINE))
    mark = f"<!-- not run: {NOT_RUN[name]} -->\n" if name in NOT_RUN else ""
    return (
        f"\n## {name}\n\n`accel-trainer {name}{usage}`\n\n{details[0].upper()}{details[1:]}\n"
        f"\n{_arguments(name, shown)}\n{mark}```bash\n{example}\n```\n"
    )


def _docstring(module: str) -> str:
    """Return the docstring of a module, without importing it."""
    spec = importlib.util.find_spec(module)
    loader = cast(Any, spec).loader
    return ast.get_docstring(ast.parse(loader.get_source(module))) or ""


def _arguments(name: str, shown: str) -> str:
    """Return a table of the arguments that a command's `--help` lists."""
    if name in FLAGS_ELSEWHERE:
        return FLAGS_ELSEWHERE[name] + "\n"
    entries: list[list[str]] = []
    listed = re.split(r"\n(?:positional arguments|options|optional arguments):\n", shown)[1:]
    for line in "\n".join(listed).splitlines():
        if match := _ENTRY.match(line):
            entries.append([match[1], match[2] or ""])
        elif entries and line.startswith("    "):
            entries[-1][1] = f"{entries[-1][1]} {line.strip()}".strip()
    rows = [
        f"| `{argument}` | {help} |\n"
        for argument, help in entries
        if not argument.startswith("-h")
    ]
    return "".join(
        ["| argument | meaning |\n|---|---|\n", *(row.replace("||", "| |") for row in rows)]
    )


if __name__ == "__main__":
    os.environ["COLUMNS"] = "1000"
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + MARK + sections())
