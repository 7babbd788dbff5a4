"""The command as a module, which is what launchers start many of."""

import sys

from ..main import main

sys.exit(main(["doctor", *sys.argv[1:]]))
