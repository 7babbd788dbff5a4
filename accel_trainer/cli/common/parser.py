"""An argument parser whose errors are one line that names the fix."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from ...core.errors import ConfigError

# What a docstring begins with: `accel-trainer plan [RECIPE.py] [its flags]`.
_USAGE = re.compile(
    r"`(?P<prog>accel-trainer [a-z-]+(?: RECIPE\.py| \[RECIPE\.py[^]]*\])?)(?P<arguments>[^`]*)`"
)


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError with the nearest flag instead of exiting with 2."""

    def __init__(self, docstring: str | None) -> None:
        """`docstring` is that of the command: its usage, what it does, and an example at the end.

        A command that takes the flags of a recipe lets none be abbreviated.
        """
        description, mark, example = (docstring or "").partition("\n\nexample: ")
        named = _USAGE.match(description)
        super().__init__(
            prog=named and named["prog"],
            description=description,
            epilog=mark.strip() + " " + example.strip(),
            allow_abbrev=named is None or "RECIPE" not in named["prog"] + named["arguments"],
            formatter_class=_Paragraphs,
        )

    @property
    def _command(self) -> str:
        return " ".join(self.prog.split()[1:2])

    def parse_recipe(
        self, argv: Sequence[str]
    ) -> tuple[argparse.Namespace, Path | None, list[str]]:
        """Return the options, the recipe in front of them (None: it is missing), and its flags."""
        recipe = Path(argv[0]) if argv and not argv[0].startswith("-") else None
        options, flags = self.parse_known_args(argv[recipe is not None :])
        return options, recipe, flags

    def require_recipe(self, argv: Sequence[str]) -> tuple[argparse.Namespace, Path, list[str]]:
        """Return what `parse_recipe` does. Raises ConfigError if there is no recipe."""
        options, recipe, flags = self.parse_recipe(argv)
        if recipe is None:
            code = self._command.upper().replace("-", "_")
            raise ConfigError(code, f"the recipe comes first; {self.epilog}")
        return options, recipe, flags

    def add_path(self, flag: str, metavar: str, text: str) -> None:
        """Add a flag whose value is a path."""
        self.add_argument(flag, type=Path, metavar=metavar, help=text)

    def add_switch(self, flag: str, text: str) -> None:
        """Add a flag without a value."""
        self.add_argument(flag, action="store_true", help=text)

    def add_number(
        self,
        flag: str,
        text: str,
        *,
        default: int | None = None,
        lowest: int | None = None,
        highest: float = math.inf,
        metavar: str = "N",
    ) -> None:
        """Add a flag whose value is a whole number, from the `lowest` to the `highest`."""
        kind = int if lowest is None else at_least(lowest, highest=highest)
        self.add_argument(flag, type=kind, default=default, metavar=metavar, help=text)

    def add_run(self) -> None:
        """Add the argument of commands on one run."""
        self.add_argument("run", type=Path, help="the run folder")

    def add_step_option(self) -> None:
        """Add the flag of commands on one step of a run."""
        step_help = "the optimizer step; the first is 1"
        self.add_argument("--step", type=int, required=True, help=step_help)

    def add_source(self) -> None:
        """Add the argument of commands on a dataset of photos."""
        source_help = "photos, parquet or tar files, the output of save_to_disk, or OWNER/NAME"
        self.add_argument("source", help=source_help)

    def add_model(self) -> None:
        """Add the argument of commands on a stored model."""
        model_help = "a run, one of its checkpoints, an export, or ORG/NAME on the hub"
        self.add_argument("model", type=Path, help=model_help)

    def add_json_option(self, text: str = "print one JSON object") -> None:
        """Add the flag of commands whose result programs can read."""
        self.add_switch("--json", text)

    def add_data_options(self) -> None:
        """Add the flags of commands that read labelled photos."""
        self.add_argument(
            "--image-column", metavar="NAME", help="the image column, if there are several"
        )
        self.add_argument(
            "--label-column", metavar="NAME", help="the class column, if there are several"
        )
        self.add_workers_option()
        self.add_cache_option()

    def add_workers_option(self) -> None:
        """Add the flag of commands that decode images."""
        self.add_number("--num-workers", "decoding threads; default: one per CPU", lowest=0)

    def add_cache_option(self) -> None:
        """Add the flag of commands that read a dataset."""
        cache_help = "the cache for decoded images and the files of `datasets`"
        self.add_argument(
            "--cache-dir",
            type=Path,
            default=Path("~/.cache/accel_trainer"),
            metavar="DIR",
            help=cache_help,
        )

    def add_recipe_option(self) -> None:
        """Add the flag of commands that retrain a recorded run."""
        recipe_help = "the recipe to run; default: the one you started the run with here"
        self.add_path("--recipe", "FILE", recipe_help)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with the message and its fix."""
        known = list(self._option_string_actions)
        unknown = [flag for flag in re.findall(r"--?[\w-]+", message) if flag not in known]
        near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.5) if unknown else []
        fix = (
            f"did you mean {near[0]}?" if near else f"see {' '.join(self.prog.split()[:2])} --help"
        )
        if lacks_value := re.match(
            r"argument (--[\w-]+): expected (one|at least one) argument", message
        ):
            fix = f"give it; if its value starts with dashes, write {lacks_value[1]}=VALUE"
        raise ConfigError("USAGE", f"{message}: {fix}")


def at_least(
    lowest: int, kind: Callable[[str], float] = int, *, highest: float = math.inf
) -> Callable[[str], float]:
    """Return a type of argument: a number that is not below `lowest`, nor above `highest`."""

    def convert(text: str) -> float:
        value = kind(text)
        if not lowest <= value <= highest:
            most = "or more" if highest == math.inf else f"to {highest}"
            raise argparse.ArgumentTypeError(f"it is {text}, and must be {lowest} {most}")
        return value

    convert.__name__ = kind.__name__  # in the message about a text that is no number
    return convert


class _Paragraphs(argparse.HelpFormatter):
    """Keeps the paragraphs of a description, and no line ends within a flag such as `--dry-run`."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = re.split(r"\n\s*\n", text.strip())
        return "\n\n".join("\n".join(self._split_lines(each, width)) for each in paragraphs)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)
