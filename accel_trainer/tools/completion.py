"""`accel-trainer completion bash | zsh`: what a shell needs to complete commands and flags."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Sequence

from .main import find_commands
from .main import main as door
from .parser import CommandParser

_EXAMPLE = """examples:
  accel-trainer completion bash > ~/.local/share/bash-completion/completions/accel-trainer
  accel-trainer completion zsh >> ~/.zshrc"""
_SCRIPT = """\
_accel_trainer() {{
    local words current=${{COMP_WORDS[COMP_CWORD]}}
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    elif [[ $current != -* ]]; then
        return  # a file
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _accel_trainer accel-trainer
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the script. The flags are those of now: make it anew after an update."""
    parser = CommandParser(
        prog="accel-trainer completion", description=__doc__, epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("shell", choices=("bash", "zsh"))
    options = parser.parse_args(argv)
    names = [name for name in find_commands() if name != "completion"]
    cases = "\n".join(f'    {name}) words="{" ".join(_flags(name))}" ;;' for name in names)
    if options.shell == "zsh":
        print("autoload -Uz compinit bashcompinit && compinit && bashcompinit")
    print(_SCRIPT.format(cases=cases, commands=" ".join([*names, "completion"])), end="")
    return 0


def _flags(command: str) -> list[str]:
    """Return the flags that the help of a command names."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        door([command, "--help"])
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", shown.getvalue())))
