"""Writes `export/pretrained/`: the best weights, as the family of the model stores them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core import filesystem
from ..core.logger import logger
from ..core.own_files import SUMS, sums_of, unchanged_in
from ..core.parameters import preserved_weights
from ..core.shards import is_shard
from ..core.user_code import describe_error
from ..training.callback import Callback, RunResult, TrainerView


class PretrainedExport(Callback):
    """Calls `save_pretrained` of the model, and of what prepares its inputs, when a run has ended.

    It is the verb of transformers, diffusers and peft, and the library's own `from_pretrained`
    loads the folder. An earlier one is replaced; with a file that somebody has added or changed,
    it is renamed. If it fails, a warning says why: the run is done all the same.
    """

    def __init__(self, run_folder: Path, *, savers: Sequence[Any]) -> None:
        self._folder = run_folder / "export/pretrained"
        self._savers = savers

    def on_fit_end(self, trainer: TrainerView, result: RunResult) -> None:
        """Save the best weights, unless the run was preempted and will continue. **Collective.**"""
        if result.state == "preempted":
            return
        if any(map(is_shard, trainer.model.parameters())):
            logger.warning(
                "[PRETRAINED] no %s: save_pretrained needs whole weights, and these are in "
                "shards: load export/model.safetensors into the model, and call it there",
                self._folder,
            )
            return
        with preserved_weights(trainer.model):
            trainer.load_best()
            if trainer.accelerator.is_main_process:
                self._save()

    def _save(self) -> None:
        try:
            with filesystem.new_directory(self._folder) as new:
                for each in self._savers:
                    each.save_pretrained(str(new))
                for path in filter(Path.is_file, new.rglob("*")):
                    # safetensors 0.8 lets nobody else read its files, whatever the umask.
                    path.chmod(new.stat().st_mode & 0o666)
                filesystem.create_file(new / SUMS, [sums_of(new)])
                if os.path.lexists(self._folder):
                    filesystem.remove_own([self._folder], unchanged_in)
                filesystem.publish(new, self._folder)
        except Exception as error:  # the library's own types
            logger.warning(
                "[PRETRAINED] no %s: save_pretrained failed (%s). The run is done: correct it, and "
                "start the same command again, which then only exports",
                self._folder,
                describe_error(error),
            )
