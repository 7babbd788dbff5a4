"""The CIFAR recipe in two processes, started by this script.

The first argument is `launch` or `notebook_launcher`; the recipe's flags follow.
"""

from __future__ import annotations

import sys

from accelerate import notebook_launcher

from accel_trainer import launch, parse_config
from recipes import cifar
from tests.ports import free_port

if __name__ == "__main__":
    config = parse_config(cifar.Config, sys.argv[2:], description="")
    if sys.argv[1] == "launch":
        launch(cifar.train, config, num_processes=2)
    else:
        notebook_launcher(cifar.train, (config,), num_processes=2, use_port=str(free_port()))
