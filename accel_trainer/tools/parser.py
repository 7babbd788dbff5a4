"""The command line of a command: argparse's, with a mistake told as everything else is, in one line with its fix."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import NoReturn

from ..errors import ConfigError


class CommandParser(argparse.ArgumentParser):
    """Raises ConfigError with the nearest flag, where argparse prints its usage and exits with 2."""

    def error(self, message: str) -> NoReturn:
        """Tell what is wrong."""
        known = list(self._option_string_actions)
        unknown = [flag for flag in re.findall(r"--?[\w-]+", message) if flag not in known]
        near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.5) if unknown else []
        fix = f"did you mean {near[0]}?" if near else f"see {self.prog.split(' REC')[0]} --help"
        raise ConfigError("USAGE", f"{message}: {fix}")
