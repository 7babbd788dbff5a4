"""The public names of `accel_trainer.commands`."""

from ..checkpoint.format import LoadedCheckpoint
from ..checks.subject import first_difference
from ..checks.unsaved_state import mark_unsaved
from ..cli.common.listing import files_with_status
from ..cli.common.output import (
    JsonObject,
    Say,
    format_duration,
    format_number,
    format_table,
    is_fraction,
    say,
    say_unless,
    show,
    tell,
    tell_json,
)
from ..cli.common.parser import CommandParser, at_least
from ..cli.common.processes import (
    Stops,
    command_of,
    environment_of,
    stops_noted,
    train_at_once,
    train_recipe,
)
from ..cli.common.recipes import find_config_class
from ..cli.common.scratch import scratch_folder
from ..cli.common.unknown_recipe import UnknownRecipeError
from ..cli.plan.measure import Measured, TrialFailed, measure
from ..cli.plan.steps import RunPlan, plan_run, without_open_settings
from ..cli.recipe.forks import new_process_context
from ..cli.recipe.same_run import cause_of, difference_of_runs, lost_state
from ..cli.recipe.start import Start
from ..cli.recipe.unsaved import UNSAVED
from ..cli.runs.changes import NOT_RECORDED, Change, compare_runs
from ..cli.runs.checkpoints import (
    StoredCheckpoint,
    checkpoints_in,
    complete_by_step,
    last_step,
)
from ..cli.runs.difference import Difference
from ..cli.runs.recorded_start import flags_with, recorded_starts
from ..cli.runs.rows import Row, Rows, at_both, by_place, read_rows
from ..cli.runs.run_reader import RunReader, read_run, reading
from ..core import filesystem
from ..core.config import config_values
from ..core.digest import digest_of, flatten
from ..core.errors import shortened
from ..core.filesystem import writes_to
from ..core.history import is_number
from ..core.json_files import read_json_object
from ..core.parameters import named_parts
from ..core.rng import epoch_permutation
from ..core.run_dir import prepare_directory, run_lock
from ..core.wording import counted
from ..distributed.accelerator import uses_cpu
from ..distributed.machine import available_cpus
from ..run.config import MUTABLE_ON_RESUME
from ..run.extra_callbacks import Observer, callbacks_in

__all__ = [
    "JsonObject",
    "MUTABLE_ON_RESUME",
    "NOT_RECORDED",
    "UNSAVED",
    "Change",
    "CommandParser",
    "Difference",
    "LoadedCheckpoint",
    "Measured",
    "Observer",
    "Row",
    "Rows",
    "RunPlan",
    "RunReader",
    "Say",
    "Start",
    "Stops",
    "StoredCheckpoint",
    "TrialFailed",
    "UnknownRecipeError",
    "at_both",
    "at_least",
    "available_cpus",
    "by_place",
    "callbacks_in",
    "cause_of",
    "checkpoints_in",
    "command_of",
    "compare_runs",
    "complete_by_step",
    "config_values",
    "counted",
    "difference_of_runs",
    "digest_of",
    "environment_of",
    "epoch_permutation",
    "filesystem",
    "files_with_status",
    "find_config_class",
    "first_difference",
    "flags_with",
    "flatten",
    "format_duration",
    "format_number",
    "format_table",
    "is_fraction",
    "is_number",
    "last_step",
    "lost_state",
    "mark_unsaved",
    "measure",
    "named_parts",
    "new_process_context",
    "plan_run",
    "prepare_directory",
    "read_json_object",
    "read_rows",
    "read_run",
    "reading",
    "recorded_starts",
    "run_lock",
    "say",
    "say_unless",
    "scratch_folder",
    "shortened",
    "show",
    "stops_noted",
    "tell",
    "tell_json",
    "train_at_once",
    "train_recipe",
    "uses_cpu",
    "without_open_settings",
    "writes_to",
]
