"""Runs `accel-trainer doctor` as a module, so that launchers can start it on many processes."""

import sys

from ..main import main

sys.exit(main(["doctor", *sys.argv[1:]]))
