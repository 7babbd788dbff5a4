"""A callback that keeps the warnings of a replay from the terminal: the run has given them."""

from __future__ import annotations

import logging

from accel_trainer.core.callback import Callback, TrainerView


class OnlyErrors(Callback):
    """Logs errors only."""

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Begin before the rehearsal of a start may warn."""
        logging.getLogger("accel_trainer").setLevel(logging.ERROR)
