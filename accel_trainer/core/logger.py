"""The logger of all modules: what it says is worded by `callbacks.console`."""

import logging

# One, as the filter of a parent is not asked for what its children log.
logger = logging.getLogger("accel_trainer")
