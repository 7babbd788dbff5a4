"""`python -m accel_trainer` is `accel-trainer`."""

import sys

from .cli.main import main

sys.exit(main())
