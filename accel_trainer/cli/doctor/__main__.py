"""Runs the command as a module, so that launchers can start it on several processes."""

import sys

from ..main import main

sys.exit(main(["doctor", *sys.argv[1:]]))
