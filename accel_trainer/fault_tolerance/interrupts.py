"""Says what Ctrl-C does to a run, whoever writes its loop."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ..checkpoint.format import is_committed, list_checkpoints, step_of
from ..core.errors import UserError
from ..core.wording import counted
from .activity import Activity


def say_interrupted(exits: bool, *, activity: Activity, checkpoints: Path) -> None:
    """Say that the run stops after this step, or if the process `exits` next, what is lost.

    It is called by the signal's handler, so it writes past all buffers. Whatever it cannot read or
    write, the run stops or ends.
    """
    text = "stopping after this step; press again to leave now"
    with suppress(OSError, UserError):
        if exits:
            saved = max(
                map(step_of, filter(is_committed, list_checkpoints(checkpoints))), default=0
            )
            lost = counted(activity.state.optimizer_step - saved, "step")
            text = f"stopped, losing {lost} after step {saved}; run the same command to continue"
        os.write(2, f"\n{text}\n".encode())
