"""`accel-trainer doctor [RECIPE.py | RUN] [flags]`: what would go wrong, with its fix, before anything is trained.

Looks at this machine, the launch, the recipe's config, its data and its run folder; of a run, at what it was started
with, and if it failed, at its last words. To look at many processes, and at the network between them, launch it like a
recipe:

    accelerate launch --multi_gpu --num_processes 8 -m accel_trainer.tools.doctor recipes/cifar.py --batch-size 256

The exit code is 64 if anything is wrong that would stop a run or ruin it, else 0.
"""

from .command import main

__all__ = ["main"]
