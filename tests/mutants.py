"""Small mistakes, made one at a time in a copy of the repository: some test must see each.

    python -m tests.mutants [--only NAME] [--log mutants.txt]

The log has a line for each mistake that was tried. The same command continues after the last one.
The exit code is 1 if a mistake was not seen, or no longer fits the code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutant:
    """A planted mistake: `old`, found once in `path`, becomes `new`; one of `tests` must fail."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


EXACT = (
    "tests/training/strategy/test_exact.py::test_a_run_leaves_the_same_bytes_on_1_2_and_4_processes"
)
EXACT_EVALUATION = (
    "tests/training/evaluation/test_evaluator.py"
    "::test_metrics_in_fixed_parts_are_the_same_bits_on_any_processes"
)

MUTANTS = [
    # --- what only odd circumstances show ---
    Mutant(
        "state that changes where an epoch ends is not looked at",
        "accel_trainer/checks/boundaries.py",
        'parts = {**self.parts(), "train_set": self._subject.train_set}',
        "parts: Mapping[str, object] = {}",
        (
            "tests/checks/test_rehearsal.py::test_state_that_the_end_of_an_epoch_changes_is_named_once",
        ),
    ),
    Mutant(
        "numbers that a task draws from numpy are others after a resume",
        "accel_trainer/core/rng.py",
        "    np.random.seed(key)\n",
        "",
        (
            "tests/training/test_exactness.py::test_a_task_may_draw_from_any_generator_and_change_gradients",
        ),
    ),
    Mutant(
        "an optimizer inside of another is not looked at",
        "accel_trainer/checks/unsaved_state.py",
        'self.visit(f"{name}.state", value.state)',
        "pass",
        ("tests/checks/test_rehearsal.py",),
    ),
    Mutant(
        "a replay that fails has an exit code of its own",
        "accel_trainer/lab/silent.py",
        "self.exit_code = ExitCode(ended_with)",
        "pass",
        ("tests/lab/replay/test_replay.py::test_a_replay_that_fails_says_so",),
    ),
    Mutant(
        "the status of a killed run is of its start",
        "accel_trainer/cli/runs/status.py",
        'status["state"] in ("running", "killed")',
        'status["state"] in ()',
        ("tests/cli/test_runs.py",),
    ),
    # --- settings chosen from photos ---
    Mutant(
        "a run that continues chooses its open settings again",
        "accel_trainer/vision/rules.py",
        "stored=_stored_settings(config, recipe)",
        "stored={}",
        (
            "tests/vision/test_rules.py::test_a_killed_run_keeps_its_settings_though_the_rules_change",
        ),
    ),
    Mutant(
        "a rule overrides what a user gave",
        "accel_trainer/vision/rules.py",
        "        if attrgetter(name)(config) is not None:\n            continue\n",
        "",
        ("tests/vision/test_rules.py::test_a_flag_wins_and_the_rest_follows_it",),
    ),
    Mutant(
        "weights are trained at the learning rate of a net from scratch",
        "accel_trainer/vision/rules.py",
        "peaks[facts.is_pretrained]",
        "peaks[False]",
        ("tests/vision/test_rules.py::test_photos_and_weights_decide_the_settings",),
    ),
    # --- the commands that train a part of a run again ---
    Mutant(
        "a replay's rows are not compared",
        "accel_trainer/lab/replay/proof.py",
        "if (found := Difference.of(one, other)) is not None:",
        "if (found := None) is not None:",
        ("tests/lab/replay/test_at.py::test_at_trains_a_kept_step_again_and_names_what_differs",),
    ),
    Mutant(
        "a copied checkpoint comes with all rows of its run",
        "accel_trainer/lab/replay/at.py",
        'json.loads(line)["optimizer_step"] <= checkpoint.step',
        "line",
        ("tests/lab/replay/test_at.py::test_at_copies_a_checkpoint_that_the_run_still_has",),
    ),
    Mutant(
        "an ending decays a step late",
        "accel_trainer/lab/finish/ending.py",
        '*("--schedule.decay-at", str(self.at)),',
        '*("--schedule.decay-at", str(self.at + 1)),',
        ("tests/lab/finish/test_finish.py",),
    ),
    Mutant(
        "an ending of a different trunk is taken for its own",
        "accel_trainer/lab/finish/ending.py",
        "        if found:\n",
        "        if False:\n",
        (
            "tests/lab/finish/test_finish.py"
            "::test_an_ending_of_a_different_trunk_of_that_name_is_refused",
        ),
    ),
    Mutant(
        "the progress of a trunk depends on its length",
        "accel_trainer/training/trainer.py",
        "if self._decay is not None:",
        "if self._decay is not None and self._decay.start < self._decay.end:",
        ("tests/training/test_position.py",),
    ),
    # --- what a run shows ---
    Mutant(
        "the live page needs no token",
        "accel_trainer/cli/watch/server.py",
        "if not secrets.compare_digest(token.encode(), server.token.encode()):",
        "if not token:",
        ("tests/cli/watch/test_watch.py",),
    ),
    Mutant(
        "a malformed run is a traceback of the live page",
        "accel_trainer/cli/report/by_itself.py",
        "with reading(*(run.folder for run in runs)):",
        "if True:",
        ("tests/cli/watch/test_watch.py",),
    ),
    Mutant(
        "rows that a resume has removed stay in the live page",
        "accel_trainer/cli/runs/run_reader.py",
        "if not self._is_continued():",
        "if not self._end:",
        ("tests/cli/watch/test_watch.py",),
    ),
    Mutant(
        "a run that diverged flattens all curves",
        "accel_trainer/cli/report/charts.py",
        "if highest > top > 0 else None",
        "if False else None",
        ("tests/cli/test_report.py",),
    ),
    Mutant(
        "a second Ctrl-C fails if the checkpoints cannot be listed",
        "accel_trainer/callbacks/progress_bar.py",
        "suppress(OSError, UserError)",
        "suppress(OSError)",
        ("tests/callbacks/test_progress_bar.py",),
    ),
    Mutant(
        "the best evaluation is not marked",
        "accel_trainer/callbacks/progress_bar.py",
        'mark = "" if trainer.best is self._best else "*"',
        'mark = ""',
        (
            "tests/callbacks/test_progress_bar.py"
            "::test_a_terminal_shows_a_table_of_epochs_with_the_best_so_far_marked",
        ),
    ),
    Mutant(
        "the bar's loss is a sum divided by the samples of all processes",
        "accel_trainer/callbacks/progress_bar.py",
        "report.num_samples if is_exact else sum(map(len, report.sample_ids))",
        "report.num_samples",
        (
            "tests/callbacks/test_progress_bar.py"
            "::test_the_loss_of_a_step_is_the_mean_of_this_process",
        ),
    ),
    Mutant(
        "a launcher's TERM before the INT of the same Ctrl-C counts as a first press",
        "accel_trainer/fault_tolerance/preemption.py",
        "_SAME_INTERRUPT_S = 0.25",
        "_SAME_INTERRUPT_S = 0.0",
        ("tests/fault_tolerance/test_preemption.py::test_a_second_interrupt_leaves_at_once",),
    ),
    Mutant(
        "the state of a callback that is gone is lost without a word",
        "accel_trainer/training/callback_runner.py",
        "if name not in self._callbacks:",
        "if False:",
        (
            "tests/training/test_callback_runner.py"
            "::test_the_state_of_a_callback_that_is_gone_is_named",
        ),
    ),
    Mutant(
        "Ctrl-C says nothing",
        "accel_trainer/fault_tolerance/preemption.py",
        "            flag.on_interrupt(exits)\n",
        "",
        (
            "tests/callbacks/test_progress_bar.py"
            "::test_ctrl_c_says_at_once_what_happens_and_at_the_end_how_to_go_on",
        ),
    ),
    Mutant(
        "a table of runs imports torch",
        "accel_trainer/cli/runs/run_reader.py",
        "from ...core.filesystem import read_lines\n",
        "from ...core.filesystem import read_lines\nimport torch\n",
        ("tests/cli/test_main.py::test_what_only_reads_runs_imports_no_torch",),
    ),
    Mutant(
        "another processor is not named before a replay",
        "accel_trainer/lab/replay/replay.py",
        '"kernels for": kernels_here()',
        '"kernels for": hardware.get("cpu_kernels")',
        ("tests/lab/replay/test_replay.py::test_another_processor_gpu_or_version_is_named",),
    ),
    # --- who reads and writes ---
    Mutant(
        "a group may write the files of a run",
        "accel_trainer/core/filesystem.py",
        "return os.open(path, _NEW_FILE, 0o644)",
        "return os.open(path, _NEW_FILE, 0o664)",
        (
            "tests/checkpoint/test_manager.py"
            "::test_the_umask_decides_who_reads_and_nobody_else_writes",
        ),
    ),
    Mutant(
        "a shared run leaves its umask behind",
        "accel_trainer/run/joining.py",
        "folder_resources.callback(os.umask, os.umask(0o027))",
        "os.umask(0o027)",
        ("tests/run/test_session.py::test_a_shared_run_can_be_read_by_its_group",),
    ),
    # --- tables of runs ---
    Mutant(
        "the row of a sweep is that of its worst run",
        "accel_trainer/cli/runs/runs.py",
        "best = min(rows, key=",
        "best = max(rows, key=",
        ("tests/cli/test_runs.py::test_a_sweep_is_one_row_of_its_best_run",),
    ),
    Mutant(
        "a sweep prints the commands of finished runs only",
        "accel_trainer/cli/sweep/sweep.py",
        "        if _finished_run(trial) is None:\n",
        "        if _finished_run(trial) is not None:\n",
        ("tests/cli/test_sweep.py::test_print_shows_a_command_a_line_and_trains_nothing",),
    ),
    # --- why two runs differ ---
    Mutant(
        "an operator's outputs are compared before its inputs",
        "accel_trainer/lab/why/traces.py",
        'for place in ("inputs", "plain", "outputs"):',
        'for place in ("outputs", "plain", "inputs"):',
        ("tests/lab/why/test_traces.py",),
    ),
    Mutant(
        "negative floats are counted away from zero",
        "accel_trainer/lab/why/element.py",
        "return number if number >= 0 else",
        "return number if number else",
        ("tests/lab/why/test_element.py",),
    ),
    Mutant(
        "a run that does not repeat its record is compared with the other one",
        "accel_trainer/lab/why/why.py",
        "        if each.from_record is not None:\n",
        "        if False:\n",
        ("tests/lab/why/test_why.py::test_state_that_no_checkpoint_holds_is_named_after_a_resume",),
    ),
    # --- what a run takes ---
    Mutant(
        "the samples that an evaluation left out cost nothing",
        "accel_trainer/cli/plan/timer.py",
        "return self._num_left_out * (end - start)",
        "return 0 * (end - start)",
        ("tests/cli/plan/test_plan.py",),
    ),
    Mutant(
        "what a run does once is paid by each epoch",
        "accel_trainer/cli/plan/measure.py",
        "(sum(self.costs(plan).values()) - self.once_s)",
        "sum(self.costs(plan).values())",
        ("tests/cli/plan/test_plan.py",),
    ),
    Mutant(
        "an evaluation before a signal is taken for one after it",
        "accel_trainer/cli/share/export.py",
        'is_evaluated = run.result.get("state") != "preempted"',
        "is_evaluated = True",
        ("tests/cli/test_export.py",),
    ),
    # --- a user's own recipe among faults ---
    Mutant(
        "no fault comes",
        "accel_trainer/lab/chaos/fault_bringer.py",
        "if fault.step != step:",
        "if True:",
        ("tests/lab/chaos/test_chaos.py",),
    ),
    Mutant(
        "a byte is written back as it was",
        "accel_trainer/lab/chaos/runs.py",
        "file.write(bytes([byte ^ 0xFF]))",
        "file.write(bytes([byte]))",
        ("tests/lab/chaos/test_faults.py",),
    ),
    Mutant(
        "what runs with faults leave is not compared",
        "accel_trainer/lab/chaos/campaign.py",
        "if ending.problem or ending.refused or not is_compared:",
        "if ending.plan:",
        ("tests/lab/chaos/test_chaos.py",),
    ),
    Mutant(
        "what a campaign has started lives on",
        "accel_trainer/lab/chaos/runs.py",
        "    finally:\n        for life in living:",
        "    finally:\n        for life in []:",
        ("tests/lab/chaos/test_chaos.py",),
    ),
    Mutant(
        "a closer look has no end",
        "accel_trainer/lab/chaos/closer.py",
        " and time.monotonic() < deadline",
        "",
        (
            "tests/lab/chaos/test_chaos.py::"
            "test_state_of_a_callback_is_named_with_the_first_difference",
        ),
    ),
    Mutant(
        "a command removes the folder of a command that is running",
        "accel_trainer/cli/common/scratch.py",
        " and not is_locked(folder / _MARK)",
        "",
        ("tests/cli/common/test_scratch.py",),
    ),
    Mutant(
        "what a killed command left stays",
        "accel_trainer/cli/common/scratch.py",
        "filter(_is_abandoned, folder.parent.glob",
        "filter(None, Path().glob",
        ("tests/cli/common/test_scratch.py",),
    ),
    # --- what callbacks log themselves ---
    Mutant(
        "pending values are not in a checkpoint",
        "accel_trainer/training/loop_state.py",
        'self.log.pending = state["log"]',
        "self.log.pending = {}",
        ("tests/callbacks/test_own_numbers.py",),
    ),
    Mutant(
        "a data worker stays if the main process died before it began",
        "accel_trainer/data/workers.py",
        " and main.is_alive()",
        "",
        ("tests/data/test_workers.py",),
    ),
    Mutant(
        "a resume on several processes counts the samples before it once for each",
        "accel_trainer/callbacks/samples_so_far.py",
        "(total or 0) * self._accelerator.is_main_process",
        "total or 0",
        ("tests/callbacks/test_samples_so_far.py",),
    ),
    Mutant(
        "a shard is logged as it is",
        "accel_trainer/training/log.py",
        "    if is_shard(value):\n",
        "    if False:\n",
        ("tests/callbacks/test_own_numbers.py::test_a_shard_is_not_logged_and_no_process_waits",),
    ),
    Mutant(
        "what a signal interrupts in the start may take it for its own error",
        "accel_trainer/core/errors.py",
        "class Preempted(OneLineError):",
        "class Preempted(UserError):",
        (
            "tests/fault_tolerance/test_preemption.py"
            "::test_a_signal_in_the_start_is_no_error_of_what_it_interrupts",
        ),
    ),
    Mutant(
        "a logged tensor is not copied",
        "accel_trainer/training/log.py",
        "kept.append(value + 0)",
        "kept.append(value)",
        ("tests/training/test_log.py",),
    ),
    Mutant(
        "a logged tensor is read at once",
        "accel_trainer/training/log.py",
        "kept.append(value + 0)",
        "kept.append(float(value))",
        ("tests/training/test_log.py",),
    ),
    Mutant(
        "the numbers of all processes count",
        "accel_trainer/training/log.py",
        "        if self.is_main_process:\n            kept =",
        "        if True:\n            kept =",
        ("tests/training/test_log.py",),
    ),
    Mutant(
        "a callback may log under the names of evaluations",
        "accel_trainer/training/log.py",
        "train|optim|perf|digest|test|eval[^/]*",
        "train|optim|perf|digest|test|eval",
        ("tests/training/test_log.py",),
    ),
    Mutant(
        "what is logged after the last row is lost",
        "accel_trainer/callbacks/metric_logger.py",
        'if result.state != "preempted" and (left := trainer.log.read()):',
        'if result.state == "never" and (left := trainer.log.read()):',
        ("tests/callbacks/test_own_numbers.py",),
    ),
    Mutant(
        "a row is written before the hooks of its step",
        "accel_trainer/run/callbacks.py",
        "return [*own, *callbacks, log, *trackers]",
        "return [*own, log, *callbacks, *trackers]",
        ("tests/callbacks/test_own_numbers.py",),
    ),
    Mutant(
        "a report reads any path as a logged picture",
        "accel_trainer/cli/report/logged.py",
        "not _PATH.fullmatch(path)",
        "not path",
        ("tests/cli/test_report.py",),
    ),
    Mutant(
        "a report reads pictures through a linked folder",
        "accel_trainer/cli/report/logged.py",
        'if (run.folder / "pictures").is_symlink():',
        "if False:",
        ("tests/cli/test_report.py",),
    ),
    Mutant(
        "a number replaces the histogram of its name",
        "accel_trainer/training/log.py",
        "if not isinstance(kept, list):",
        "if False:",
        ("tests/training/test_log.py",),
    ),
    Mutant(
        "anything in bytes is logged as a picture",
        "accel_trainer/training/log.py",
        " and png.startswith(",
        " or png.startswith(",
        ("tests/training/test_log.py",),
    ),
    Mutant(
        "a step that cannot evaluate a set is found after the training",
        "accel_trainer/checks/evaluation_trial.py",
        'isinstance(error, UserError) or not hasattr(task, "eval_step")',
        "isinstance(error, UserError)",
        ("tests/run/test_eval_sets.py::test_a_step_that_fails_on_a_set_costs_no_training",),
    ),
    Mutant(
        "numbers of the task may come and go",
        "accel_trainer/training/step/optimizer_step.py",
        "if len(forms | self._form) > 1 or",
        "if",
        ("tests/training/test_items.py",),
    ),
    Mutant(
        "losses without items count as they are",
        "accel_trainer/training/evaluation/metrics.py",
        "if not num_items > 0:",
        "if num_items < 0:",
        ("tests/checks/test_metric_rehearsal.py",),
    ),
    Mutant(
        "weights of a loader of one's own are ignored",
        "accel_trainer/data/loader.py",
        "options.labels is not None or options.weights is not None",
        "False",
        ("tests/run/test_eval_sets.py",),
    ),
    Mutant(
        "out of memory, pairs are to be split",
        "accel_trainer/checks/out_of_memory.py",
        "elif activity.couples_batch:",
        "elif False:",
        ("tests/checks/test_out_of_memory.py",),
    ),
    Mutant(
        "the ONNX export gathers on one process",
        "accel_trainer/run/build.py",
        'couples_batch == "gathered" and run.accelerator.num_processes > 1',
        "couples_batch is None",
        (
            "tests/training/tasks/test_pairs.py"
            "::test_all_processes_evaluate_a_gathering_task_equally_often",
        ),
    ),
    Mutant(
        "a process ends before the main process has said why",
        "accel_trainer/cli/recipe/exit.py",
        "if is_alone else _WAIT_FOR_LINE_S",
        "if is_alone else 0",
        (
            "tests/cli/recipe/test_main.py"
            "::test_no_process_ends_before_the_main_process_has_said_why",
        ),
    ),
    # --- a past run that is trained again ---
    Mutant(
        "a stretch begins at a checkpoint after which something was logged",
        "accel_trainer/lab/replay/stretches.py",
        "stretch.after if is_first else stretch.after - 1",
        "stretch.after",
        (
            "tests/lab/replay/test_probe.py"
            "::test_a_stretch_begins_at_a_checkpoint_before_the_row_that_it_follows",
        ),
    ),
    Mutant(
        "two stretches have the same rows",
        "accel_trainer/lab/replay/again.py",
        'row["optimizer_step"] > stretch.after]',
        'row["optimizer_step"] > start]',
        (
            "tests/lab/replay/test_probe.py"
            "::test_a_probe_logs_the_bits_that_it_would_have_logged_live",
        ),
    ),
    Mutant(
        "a condition on a column that a row does not have holds there",
        "accel_trainer/lab/replay/first_step.py",
        "if condition.holds(known)\n",
        "if condition.holds(known) is not False\n",
        ("tests/lab/replay/test_bisect.py::test_a_condition_that_never_holds_is_said",),
    ),
    Mutant(
        "samples are not ordered by their losses",
        "accel_trainer/lab/replay/samples.py",
        "sorted(samples, key=_by_loss)",
        "samples",
        ("tests/lab/replay/test_bisect.py::test_the_step_and_the_sample_behind_a_mean_are_found",),
    ),
    # --- a step that is computed twice ---
    Mutant(
        "a wrong bit of another process is not noticed",
        "accel_trainer/training/step/step_check.py",
        "float(first != second)",
        "0.0",
        (
            "tests/training/step/test_step_check.py::test_a_wrong_bit_ends_the_run_and_names_the_device",
        ),
    ),
    Mutant(
        "a step that is computed again starts from the buffers of the first time",
        "accel_trainer/training/step/step_check.py",
        "    restart()\n    result",
        "    result",
        ("tests/training/step/test_step_check.py::test_checked_steps_leave_the_same_bytes",),
    ),
    Mutant(
        "a step that is computed again reads its micro-batches again",
        "accel_trainer/training/step/optimizer_step.py",
        "step_batch = step_batch._replace(micro_batches=[*step_batch.micro_batches])",
        "pass",
        ("tests/training/step/test_step_check.py::test_checked_steps_leave_the_same_bytes",),
    ),
    Mutant(
        "a forward that does not repeat itself is taken for a device",
        "accel_trainer/training/step/step_check.py",
        "third in (first, second)",
        "third",
        (
            "tests/training/step/test_step_check.py"
            "::test_a_step_that_never_repeats_itself_is_told_from_a_device",
        ),
    ),
    # --- data: the plan, the order, what is drawn ---
    Mutant(
        "a process's part of a step begins one sample early",
        "accel_trainer/core/batch_plan.py",
        "return [positions[start:stop] for start, stop in pairwise(cuts)]",
        "return [positions[max(0, start - 1) : stop] for start, stop in pairwise(cuts)]",
        ("tests/core/test_batch_plan.py",),
    ),
    Mutant(
        "the last short step of an epoch is left out",
        "accel_trainer/core/batch_plan.py",
        "return full + (rest > 0 and not self.drop_last)",
        "return full",
        ("tests/core/test_batch_plan.py",),
    ),
    Mutant(
        "every epoch has the same order",
        "accel_trainer/core/rng.py",
        "manual_seed(fold_in(seed, epoch))",
        "manual_seed(fold_in(seed, 0))",
        ("tests/core/test_rng.py",),
    ),
    Mutant(
        "the loss is divided by the items of this process only",
        "accel_trainer/training/strategy/base.py",
        "self.accelerator.reduce(sums.num_items)",
        "sums.num_items",
        ("tests/training/test_items.py",),
    ),
    Mutant(
        "mixing shares leave the range from 0 to 1",
        "accel_trainer/vision/augment/batch.py",
        ".clamp(0, 1)",
        "",
        ("tests/vision/test_augment.py",),
    ),
    Mutant(
        "the target of a pasted box follows the draw and not the pixels",
        "accel_trainer/vision/augment/batch.py",
        "return weights, weights.mean((1, 2, 3))",
        "return weights, weight",
        ("tests/vision/test_augment.py",),
    ),
    # --- optimisation ---
    Mutant(
        "the warmup is late by one step",
        "accel_trainer/optim/lr_scheduler.py",
        "(optimizer_step + 1) / warmup_steps",
        "optimizer_step / warmup_steps",
        ("tests/optim/test_lr_scheduler.py",),
    ),
    Mutant(
        "the decay of the average does not ramp up",
        "accel_trainer/optim/ema.py",
        "decay = min(self.decay, (1 + step) / (10 + step))",
        "decay = self.decay",
        ("tests/optim/test_ema.py",),
    ),
    Mutant(
        "what has no turn requires gradients all the same",
        "accel_trainer/training/step/turns.py",
        "        parameter.requires_grad = False\n",
        "        pass\n",
        ("tests/training/step/test_turns.py",),
    ),
    Mutant(
        "a resume has forgotten how often each optimizer has stepped",
        "accel_trainer/training/progress.py",
        '        self.num_turns = Counter(state.get("num_turns"))\n',
        "",
        ("tests/training/step/test_turns.py",),
    ),
    Mutant(
        "the average takes the new weights by the decay",
        "accel_trainer/optim/ema.py",
        "sources, 1 - decay)",
        "sources, decay)",
        ("tests/optim/test_ema.py",),
    ),
    Mutant(
        "filters that are zero become NaN",
        "accel_trainer/optim/muon.py",
        "length = torch.where(length.isfinite(), length, 1.0)",
        "length = length * 1.0",
        ("tests/optim/test_muon.py::test_filters_that_begin_at_zero_or_next_to_it_are_trained",),
    ),
    # --- the step ---
    Mutant(
        "a short last step is divided by the size of a full one",
        "accel_trainer/training/step/optimizer_step.py",
        "self.strategy.gradient_factor / step_batch.num_samples",
        "self.strategy.gradient_factor / 16",
        (
            "tests/training/test_trainer.py::test_a_step_short_or_not_goes_down_the_mean_loss_of_its_samples",
        ),
    ),
    Mutant(
        "gradients are scaled as for one process",
        "accel_trainer/training/strategy/base.py",
        "self.gradient_factor = self.accelerator.num_processes",
        "self.gradient_factor = 1",
        ("tests/optim/test_muon.py::test_two_processes_train_the_model_that_one_does",),
    ),
    # --- the same bits on any number of processes ---
    Mutant(
        "exact: processes add up by a float all-reduce",
        "accel_trainer/training/strategy/exact.py",
        "lambda flat: sum_pairwise(flat, self.accelerator)",
        'lambda flat: self.accelerator.reduce(flat, reduction="sum")',
        (EXACT,),
    ),
    Mutant(
        "exact: a process adds up one micro-batch after another",
        "accel_trainer/core/pairwise.py",
        "while self._partial and self._partial[-1][0] == level:",
        "while self._partial:",
        (EXACT,),
    ),
    Mutant(
        "exact: dropout is seeded by the process",
        "accel_trainer/training/strategy/exact.py",
        "fold_in(self.seed, 0)",
        "fold_in(self.seed, self.accelerator.process_index)",
        (EXACT,),
    ),
    Mutant(
        "exact: dropout is seeded by the place in the process",
        "accel_trainer/training/strategy/exact.py",
        "self._offset + index",
        "index",
        (EXACT,),
    ),
    Mutant(
        "exact: running statistics are updated in the order of arrival",
        "accel_trainer/training/strategy/exact.py",
        "        self._buffers.restore()\n        super()",
        "        super()",
        (EXACT,),
    ),
    Mutant(
        "exact: the logged sums are those of each process",
        "accel_trainer/training/strategy/exact.py",
        "[*totals, *numbers], lambda",
        "totals, lambda",
        (EXACT,),
    ),
    Mutant(
        "config: the defaults that a resume compares are made by a class that refuses them",
        "accel_trainer/run/config.py",
        "config_values(unchecked_defaults(type(config)))",
        "config_values(type(config)())",
        (
            "tests/run/test_config.py"
            "::test_a_config_that_refuses_its_defaults_is_compared_with_a_stored",
        ),
    ),
    Mutant(
        "exact: batch norms normalise over all processes",
        "accel_trainer/run/config.py",
        "sync_batch_norm=False, ",
        "",
        (EXACT,),
    ),
    Mutant(
        "exact: the sums of an evaluation are added up by an all-reduce",
        "accel_trainer/training/evaluation/evaluator.py",
        "sum_pairwise(flat, self.accelerator)",
        'flat = self.accelerator.reduce(flat, reduction="sum")',
        (EXACT_EVALUATION,),
    ),
    Mutant(
        "exact: the parts of an evaluation are one",
        "accel_trainer/training/evaluation/evaluator.py",
        "while self.ends and first_sample >= self.ends[0]:",
        "while False:",
        (EXACT_EVALUATION,),
    ),
    Mutant(
        "dropout draws the same in every step",
        "accel_trainer/training/strategy/base.py",
        "fold_in(optimizer_step, index, start=self._forward_key)",
        "fold_in(0, index, start=self._forward_key)",
        ("tests/training/strategy/test_data_parallel.py",),
    ),
    Mutant(
        "a step that is skipped moves the average",
        "accel_trainer/training/trainer.py",
        "if self._average is not None and not was_skipped:",
        "if self._average is not None:",
        (
            "tests/training/step/test_mixed_precision.py::test_an_overflow_skips_the_update_and_average_and_halves_the_scale",
        ),
    ),
    Mutant(
        "a gradient that is not finite is applied",
        "accel_trainer/training/step/nonfinite_check.py",
        "        if not self.find(grad_norm):\n            return False\n",
        "        return False\n",
        (
            "tests/training/step/test_nonfinite_report.py::test_of_two_processes_both_stop_before_the_update_and_name_the_sample",
        ),
    ),
    Mutant(
        "a step that is skipped keeps its running statistics",
        "accel_trainer/training/step/nonfinite_check.py",
        "        self.buffers.restore(steps_ago=steps_ago)\n",
        "",
        (
            "tests/training/step/test_nonfinite_report.py::test_a_skipped_step_leaves_no_trace_and_training_goes_on",
        ),
    ),
    Mutant(
        "bfloat16 is switched off",
        "accel_trainer/distributed/accelerator.py",
        "mixed_precision=precision,",
        'mixed_precision="no",',
        (
            "tests/training/step/test_mixed_precision.py::test_bfloat16_is_what_layers_compute_in_and_not_what_weights_are",
        ),
    ),
    # --- processes ---
    Mutant(
        "what is not the main process's stays as it was",
        "accel_trainer/distributed/collectives.py",
        "        exchange_flattened(tensors, _send_from_main)",
        "        return",
        (
            "tests/distributed/test_collectives.py::test_rows_are_gathered_and_tensors_of_any_kind_are_copied_from_main",
        ),
    ),
    Mutant(
        "rows that only pad are gathered",
        "accel_trainer/distributed/collectives.py",
        "return rows[rows[:, 0] >= 0].cpu()",
        "return rows.cpu()",
        (
            "tests/distributed/test_collectives.py::test_rows_are_gathered_and_tensors_of_any_kind_are_copied_from_main",
        ),
    ),
    Mutant(
        "--runtime.backend is ignored",
        "accel_trainer/distributed/accelerator.py",
        'backend: str = config.backend or "gloo"',
        'backend = "gloo"',
        (
            "tests/distributed/test_accelerator.py::test_processes_send_their_messages_by_the_backend_that_is_asked_for",
        ),
    ),
    Mutant(
        "subclasses of BatchNorm see their own process alone",
        "accel_trainer/distributed/sync_batch_norm.py",
        "        model.forward = MethodType(forward, model)  # type: ignore[method-assign]\n",
        "        del forward\n",
        (
            "tests/distributed/test_sync_batch_norm.py::test_a_subclass_of_batch_norm_keeps_its_forward_over_all_processes",
        ),
    ),
    Mutant(
        "the gradient of gathered samples is that of this process only",
        "accel_trainer/distributed/differentiable.py",
        "return sum_with_gradient(gradient)",
        "return gradient",
        (
            "tests/distributed/test_differentiable.py::test_gathered_samples_have_the_gradient_of_the_whole_batch",
        ),
    ),
    Mutant(
        "pairs that are not gathered train on several processes",
        "accel_trainer/checks/parts.py",
        "num_processes = plan.num_processes if coupling is True else 1",
        "num_processes = 1",
        (
            "tests/training/tasks/test_pairs.py::test_a_step_that_splits_pairs_is_refused_before_any_work",
        ),
    ),
    Mutant(
        "pairs are split by accumulation",
        "accel_trainer/checks/parts.py",
        "num_processes * plan.accumulation_steps > 1",
        "num_processes > 1",
        ("tests/checks/test_parts.py::test_a_step_that_splits_the_pairs_of_a_loss_is_one_line",),
    ),
    Mutant(
        "a process without samples leaves out an evaluation batch that gathers",
        "accel_trainer/run/build.py",
        'or run.activity.couples_batch == "gathered"',
        "or False",
        (
            "tests/training/tasks/test_pairs.py::test_all_processes_evaluate_a_gathering_task_equally_often",
        ),
    ),
    # --- evaluation ---
    Mutant(
        "the sums of the processes are averaged",
        "accel_trainer/training/evaluation/evaluator.py",
        "flat = self.accelerator.reduce(flat)",
        'flat = self.accelerator.reduce(flat, reduction="mean")',
        (
            "tests/training/evaluation/test_evaluator.py::test_metrics_equal_a_plain_loop_for_any_samples_and_processes",
        ),
    ),
    Mutant(
        "a sample that is counted twice is not noticed",
        "accel_trainer/training/evaluation/evaluator.py",
        "if not torch.all(counts[1:-1] == 1) or counts[0] or counts[-1]:",
        "if counts.sum() != num_samples:",
        (
            "tests/training/evaluation/test_evaluator.py::test_a_sample_given_twice_in_the_place_of_another_is_found_out",
        ),
    ),
    Mutant(
        "NaN can be the best",
        "accel_trainer/training/progress.py",
        "if is_better and not unusable:",
        "if is_better or math.isnan(value) or math.isnan(self.best.value):",
        ("tests/training/test_progress.py::test_an_evaluation_without_a_number_is_never_the_best",),
    ),
    Mutant(
        "the confusion matrix is transposed",
        "accel_trainer/training/evaluation/metrics.py",
        "batch.targets.long() * self.num_classes + output.outputs.argmax(1)",
        "output.outputs.argmax(1) * self.num_classes + batch.targets.long()",
        ("tests/training/evaluation/test_metrics.py",),
    ),
    # --- when and on what to evaluate, and in which order to train ---
    Mutant(
        "an evaluation within an epoch that a signal stopped is left out",
        "accel_trainer/training/trainer.py",
        "elif self._is_evaluation_due:  # perhaps a stop came before it, or during it",
        "elif False:",
        ("tests/training/evaluation/test_interrupted_evaluation.py",),
    ),
    Mutant(
        "a run evaluates a step again that its checkpoint has as evaluated",
        "accel_trainer/training/trainer.py",
        "not self._progress.is_evaluated\n            and self.state",
        "self.state",
        (
            "tests/training/evaluation/test_interrupted_evaluation.py",
            "tests/training/evaluation/test_evaluation_interval.py",
        ),
    ),
    Mutant(
        "a stop that an evaluation asks for comes a step late",
        "accel_trainer/training/trainer.py",
        "return not (self.is_finished or self._stop_flag.agreed)",
        "return not self._stop_flag.agreed",
        ("tests/training/evaluation/test_evaluation_interval.py",),
    ),
    Mutant(
        "the best evaluation within an epoch is not saved at once",
        "accel_trainer/training/trainer.py",
        "if self._evaluate_at(self.state) and self._is_save_due:",
        "if self._evaluate_at(self.state) and False:",
        ("tests/training/evaluation/test_evaluation_interval.py",),
    ),
    Mutant(
        "fractions of an epoch are counted from its start",
        "accel_trainer/training/config.py",
        "step = position.epoch * steps_per_epoch + position.step_in_epoch",
        "step = position.step_in_epoch",
        ("tests/training/evaluation/test_evaluation_interval.py",),
    ),
    Mutant(
        "the last of a given number of steps is not evaluated unless it is due",
        "accel_trainer/training/config.py",
        "is_last = position.optimizer_step == self.num_steps or (",
        "is_last = (",
        ("tests/training/test_steps.py",),
    ),
    Mutant(
        "an evaluation of a run of some steps is in no checkpoint",
        "accel_trainer/training/trainer.py",
        "or (self._config.num_steps is not None and self._progress.is_evaluated)",
        "",
        ("tests/training/test_steps.py",),
    ),
    Mutant(
        "processes find out one after another that a stream has ended",
        "accel_trainer/data/loader.py",
        "return [*parts, range(end - 1, end)] if",
        "return [*parts, parts[-1][-1:]] if",
        ("tests/data/test_endless.py",),
    ),
    Mutant(
        "the progress of a batch forgets the steps of its epoch",
        "accel_trainer/training/trainer.py",
        "epochs = state.epoch + state.step_in_epoch / self.loader.plan.steps_per_epoch",
        "epochs = float(state.epoch)",
        ("tests/training/test_position.py",),
    ),
    Mutant(
        "all sets have the metrics of the first",
        "accel_trainer/run/data.py",
        "listed.get(name, listed[names[0]])",
        "listed[names[0]]",
        ("tests/run/test_eval_sets.py",),
    ),
    Mutant(
        "the test set is not tried before the first step",
        "accel_trainer/checks/rehearsal.py",
        "for name, evaluation in self.evaluations.items():",
        'for name, evaluation in [each for each in self.evaluations.items() if each[0] != "test"]:',
        ("tests/run/test_eval_sets.py",),
    ),
    Mutant(
        "processes choose the best checkpoint by numbers of their own",
        "accel_trainer/training/evaluation/evaluation.py",
        "return {**values, **run_on_main(lambda: single, accelerator)}",
        "return values",
        ("tests/run/test_own_evaluation.py",),
    ),
    Mutant(
        "an evaluation draws from the generators of the training",
        "accel_trainer/training/evaluation/evaluation.py",
        "with evaluation_mode(model), preserved_generators(accelerator.device), torch.no_grad():",
        "with evaluation_mode(model), torch.no_grad():",
        ("tests/training/evaluation/test_random_evaluation.py",),
    ),
    Mutant(
        "an evaluation that wants the model alone measures the average, too",
        "accel_trainer/training/evaluation/evaluation.py",
        'getattr(evaluation, "weights", None) == "model"',
        "False",
        ("tests/run/test_own_evaluation.py",),
    ),
    Mutant(
        "a run keeps the weights that were tested",
        "accel_trainer/core/parameters.py",
        "model.load_state_dict(live)",
        "pass",
        ("tests/run/test_final_test.py",),
    ),
    Mutant(
        "a run that was stopped early is tested",
        "accel_trainer/training/trainer.py",
        'if result.state == "done" and TEST in self._evaluations:',
        "if TEST in self._evaluations:",
        ("tests/run/test_final_test.py",),
    ),
    Mutant(
        "a repeated sample is augmented alike each time",
        "accel_trainer/data/order.py",
        "drawn[by_id] += (torch.arange(len(ids)) - first_places) * dataset_size",
        "pass",
        (
            "tests/data/test_order.py",
            "tests/vision/test_order.py",
        ),
    ),
    Mutant(
        "an image may be mixed with one that is left out",
        "accel_trainer/vision/augment/mix.py",
        "return torch.cat([drawn, self._kept[places]])",
        "return torch.cat([drawn, places])",
        ("tests/vision/test_order.py",),
    ),
    Mutant(
        "balanced weights ignore the number of classes",
        "accel_trainer/training/tasks/tasks.py",
        "class_counts.sum() / (num_classes * class_counts.clamp_min(1))",
        "class_counts.sum() / class_counts.clamp_min(1)",
        ("tests/vision/test_order.py",),
    ),
    Mutant(
        "a balanced order begins again in each epoch",
        "accel_trainer/data/order.py",
        "epoch * quota, quota, fold_in(seed, label)",
        "0, quota, fold_in(seed, label)",
        ("tests/data/test_order.py",),
    ),
    Mutant(
        "a split depends on the place of a sample",
        "accel_trainer/data/split.py",
        "for name in names]",
        "for name, _ in enumerate(names)]",
        ("tests/data/test_split.py",),
    ),
    Mutant(
        "the report shows no named set",
        "accel_trainer/cli/runs/metric_groups.py",
        'return [group for group in groups if group.startswith("eval")]',
        'return [group for group in groups if group in ("eval", "eval_ema")]',
        ("tests/cli/test_named_sets.py",),
    ),
    # --- checkpoints ---
    Mutant(
        "the hash of a slice is not looked at",
        "accel_trainer/checkpoint/sharded.py",
        "if _sha256(memory_of(data)) != self.sha256:",
        "if not self.sha256:",
        ("tests/checkpoint/test_sharded.py::test_what_is_not_what_was_saved_is_named",),
    ),
    Mutant(
        "the hash of a header of slices is not looked at",
        "accel_trainer/checkpoint/sharded.py",
        'if _sha256(header) != entry["sha256"]:',
        'if not entry["sha256"]:',
        ("tests/checkpoint/test_sharded.py::test_what_is_not_what_was_saved_is_named",),
    ),
    Mutant(
        "a process that cannot write its shards votes yes",
        "accel_trainer/distributed/collectives.py",
        'captured = ["OSError", error.errno, reason]',
        "captured = [{}]",
        (
            "tests/faults/test_sharded_faults.py::test_a_process_that_cannot_write_or_sync_votes_no_and_nobody_commits",
        ),
    ),
    Mutant(
        "the name of a file of shards may be lost",
        "accel_trainer/checkpoint/sharded.py",
        "    filesystem.disk.sync_directory(path.parent)\n",
        "",
        (
            "tests/faults/test_sharded_faults.py::test_no_power_loss_takes_an_acknowledged_checkpoint_of_shards",
        ),
    ),
    Mutant(
        "a part of a tensor is taken from the start of a slice",
        "accel_trainer/checkpoint/sharded.py",
        "stored.read()[_box(common, stored.offsets)]",
        "stored.read()[_box(common, [start for start, _ in common])]",
        (
            "tests/checkpoint/test_sharded.py::test_a_part_of_a_tensor_is_read_only_from_the_slices_that_hold_it",
        ),
    ),
    Mutant(
        "a checkpoint is there before what must not fall behind it",
        "accel_trainer/checkpoint/format.py",
        "            before_commit()\n"
        "            _write(temporary / COMMIT, [_commit_mark(manifest)])\n"
        "\n"
        "        def publish() -> None:\n"
        "            if peers.process_index == 0:\n"
        "                filesystem.publish(temporary, final)\n",
        "            _write(temporary / COMMIT, [_commit_mark(manifest)])\n"
        "\n"
        "        def publish() -> None:\n"
        "            if peers.process_index == 0:\n"
        "                filesystem.publish(temporary, final)\n"
        "                before_commit()\n",
        (
            "tests/checkpoint/test_manager.py::test_the_history_is_synced_before_the_commit_of_a_checkpoint",
        ),
    ),
    Mutant(
        "files are not synced",
        "accel_trainer/core/filesystem.py",
        "            disk.write(path, descriptor, chunk)\n        disk.sync(path, descriptor)\n",
        "            disk.write(path, descriptor, chunk)\n",
        (
            "tests/core/test_filesystem.py::test_a_file_is_replaced_in_one_step_and_synced_with_its_name",
        ),
    ),
    Mutant(
        "a folder that is renamed is not synced before",
        "accel_trainer/core/filesystem.py",
        "    disk.sync_directory(temporary)\n",
        "",
        (
            "tests/faults/test_power_loss.py::test_no_power_loss_takes_an_acknowledged_checkpoint",
            "tests/core/test_filesystem.py",
        ),
    ),
    Mutant(
        "a file is replaced in place",
        "accel_trainer/core/filesystem.py",
        "    try:\n        create_file(temporary, chunks)\n",
        "    try:\n        path.unlink(missing_ok=True)\n        create_file(temporary, chunks)\n",
        (
            "tests/core/test_filesystem.py::test_a_failed_replacement_leaves_the_old_file_and_no_temporary",
            "tests/faults/test_checkpoint_crash.py",
        ),
    ),
    Mutant(
        "no file's hash is compared",
        "accel_trainer/checkpoint/format.py",
        '    if sha256 != entry["sha256"]:',
        "    if False:",
        (
            "tests/checkpoint/test_loading.py::test_a_damaged_newest_checkpoint_is_skipped_and_quarantined_by_a_save",
        ),
    ),
    Mutant(
        "the best is deleted with the old",
        "accel_trainer/checkpoint/retention.py",
        "kept = {best_name(directory), *(",
        "kept = {*(",
        ("tests/checkpoint/test_retention.py::test_the_last_the_best_and_the_permanent_are_kept",),
    ),
    Mutant(
        "one fewer is kept than asked for",
        "accel_trainer/checkpoint/retention.py",
        "committed[: -config.keep_last_n]",
        "committed[: 1 - config.keep_last_n]",
        ("tests/checkpoint/test_retention.py::test_the_last_the_best_and_the_permanent_are_kept",),
    ),
    Mutant(
        "a resume begins its epoch again",
        "accel_trainer/training/progress.py",
        "        if RESTARTS_EPOCH & set(changes):\n",
        "        if True:\n",
        (
            "tests/training/test_ends.py::test_each_of_two_callbacks_of_one_class_finds_its_own_state",
            "tests/training/test_ends.py::test_a_run_stopped_by_a_time_limit_ends_as_one_without_it",
        ),
    ),
    Mutant(
        "a resume forgets what the optimizer had gathered",
        "accel_trainer/checkpoint/optimizer_state.py",
        'state[number] = _fitted(stored["state"][name], parameter)',
        "state[number] = {}",
        (
            "tests/checkpoint/test_state_dict.py::test_restored_objects_have_the_state_that_was_taken",
        ),
    ),
    Mutant(
        "state that may follow the order of the parameters is loaded in another one",
        "accel_trainer/checkpoint/optimizer_state.py",
        "        if self._follows_order(piece):\n",
        "        if False:\n",
        ("tests/checkpoint/test_optimizer_state.py",),
    ),
    Mutant(
        "a model keeps the order that a set gave it in this process",
        "accel_trainer/core/module_order.py",
        "    if mine == names or {*mine} != {*names}:\n",
        "    if True:\n",
        ("tests/training/test_orders.py::test_a_model_takes_any_order_and_keeps_its_layers",),
    ),
    Mutant(
        "a parameter that no micro-batch reaches has a gradient of zeros",
        "accel_trainer/training/strategy/exact.py",
        "gradient if has_one else None",
        "gradient",
        (
            "tests/training/strategy/test_exact.py"
            "::test_a_parameter_that_no_micro_batch_reaches_has_no_gradient",
        ),
    ),
    Mutant(
        "a change of the order's seed is allowed on resume",
        "accel_trainer/run/config.py",
        'MUTABLE_ON_RESUME = (\n    "run.",',
        'MUTABLE_ON_RESUME = (\n    "seed",\n    "run.",',
        (
            "tests/run/test_session.py::test_a_changed_config_is_listed_with_the_flag_that_allows_it",
            "tests/run/test_session.py",
        ),
    ),
    Mutant(
        "the export has the weights of the model where their average was the best",
        "accel_trainer/core/train_state.py",
        'return "ema" if self.metric.startswith("eval_ema") else "model"',
        'return "model"',
        (
            "tests/training/test_trainer.py::test_exported_weights_load_into_the_plain_model",
            "tests/cli/test_export.py::test_an_export_and_a_run_are_verified",
        ),
    ),
    # --- ends ---
    Mutant(
        "of two processes the one without a signal trains on",
        "accel_trainer/fault_tolerance/preemption.py",
        "self._follow(*self._reduced.tolist())",
        "self._follow(self._wish or _NOTHING, bool(self._reduced[1]))",
        (
            "tests/fault_tolerance/test_preemption.py::test_all_processes_stop_at_the_same_step_though_only_one_got_a_signal",
        ),
    ),
    Mutant(
        "a later signal replaces the first",
        "accel_trainer/fault_tolerance/preemption.py",
        "        if not self._wish.is_preemption:\n            self._wish = Stop(code)\n",
        "        self._wish = Stop(code)\n",
        ("tests/fault_tolerance/test_preemption.py::test_the_first_stop_request_is_kept",),
    ),
    Mutant(
        "a save that each process asked for is made twice",
        "accel_trainer/fault_tolerance/preemption.py",
        "            self._wants_save = False\n",
        "            self._wants_save = self._wants_save and not self.is_save_agreed\n",
        (
            "tests/fault_tolerance/test_preemption.py::test_all_processes_agree_on_one_save_though_each_asks_when_it_will",
        ),
    ),
    Mutant(
        "a save that was agreed on in an evaluation is forgotten",
        "accel_trainer/fault_tolerance/preemption.py",
        "            self.is_save_agreed = True\n",
        "        self.is_save_agreed = code == _SAVE\n",
        ("tests/faults/test_save_signals.py::test_usr2_in_an_evaluation_saves_after_it",),
    ),
    Mutant(
        "a signal that asks for a save during the start raises",
        "accel_trainer/fault_tolerance/preemption.py",
        "            flag.request_save()\n            return\n",
        "            flag.request_save()\n",
        (
            "tests/faults/test_save_signals.py::test_usr2_during_the_start_saves_after_the_first_step",
        ),
    ),
    Mutant(
        "data workers die of a signal that asks for a save",
        "accel_trainer/data/signals.py",
        "for number in RUN_SIGNALS:",
        "for number in RUN_SIGNALS[:-1]:",
        (
            "tests/fault_tolerance/test_preemption.py::test_data_workers_outlive_every_signal_to_a_run",
        ),
    ),
    Mutant(
        "once a save was asked for, every step saves",
        "accel_trainer/training/trainer.py",
        "        self._stop_flag.is_save_agreed = False\n",
        "",
        (
            "tests/faults/test_save_signals.py::test_usr2_saves_once_and_the_run_ends_with_the_same_bytes",
        ),
    ),
    Mutant(
        "the metadata of the program replaces that of the checkpoint",
        "accel_trainer/run/build.py",
        'trainer.metadata.update(run.resume.checkpoint.manifest.get("metadata", {}))',
        'trainer.metadata = {**run.resume.checkpoint.manifest["metadata"], **trainer.metadata}',
        ("tests/run/test_metadata.py::test_metadata_is_stored_in_every_checkpoint_and_restored",),
    ),
    Mutant(
        "a checkpoint stores what a callback notes after it was saved",
        "accel_trainer/checkpoint/manager.py",
        '"metadata": copy_metadata(metadata),',
        '"metadata": metadata or {},',
        ("tests/run/test_metadata.py",),
    ),
    Mutant(
        "slow evaluations are taken for stuck",
        "accel_trainer/fault_tolerance/watchdog.py",
        "now = (phase, self.stop_flag.num_polls + self.activity.num_forwards)",
        "now = (phase, self.activity.num_forwards)",
        ("tests/fault_tolerance/test_watchdog.py::test_slow_work_is_not_stuck",),
    ),
    Mutant(
        "of several failures the last one is named",
        "accel_trainer/fault_tolerance/failure_report.py",
        'min(failures, key=itemgetter("time_s"))',
        'max(failures, key=itemgetter("time_s"))',
        ("tests/fault_tolerance/test_failure_report.py",),
    ),
    Mutant(
        "what gloo raises is taken for an error of this process",
        "accel_trainer/core/user_code.py",
        'is_from_gloo = isinstance(cause, RuntimeError) and "gloo" in str(cause)',
        "is_from_gloo = False",
        ("tests/fault_tolerance/test_failure_report.py",),
    ),
    Mutant(
        "a metric that failed on one process saves on that process only",
        "accel_trainer/training/trainer.py",
        "isinstance(error, PartFailed) or",
        'isinstance(error, PartFailed) and type(error).__name__ != "PeerFailed" or',
        ("tests/faults/test_user_code.py",),
    ),
    Mutant(
        "a process that is stuck does not say where",
        "accel_trainer/fault_tolerance/watchdog.py",
        "                    faulthandler.dump_traceback(2)\n",
        "",
        (
            "tests/fault_tolerance/test_watchdog.py::test_a_stuck_timeout_ends_a_process_and_shows_its_stacks",
        ),
    ),
    # --- vision and commands ---
    Mutant(
        "the ResNet never applies its dropout",
        "accel_trainer/vision/models/resnet.py",
        "self.fc(self.dropout(x.mean((2, 3))))",
        "self.fc(x.mean((2, 3)))",
        ("tests/vision/test_zoo.py::test_dropout_drops_its_fraction_only_in_training",),
    ),
    Mutant(
        "predict swaps height and width",
        "accel_trainer/cli/share/predict.py",
        "height, width = config.image_size",
        "width, height = config.image_size",
        ("tests/cli/test_export.py::test_a_picture_is_resized_to_the_size_of_the_training_images",),
    ),
    Mutant(
        "the stem for large images begins where the longer side is large",
        "accel_trainer/vision/models/zoo.py",
        "min(image_size) >= _LARGE_IMAGES",
        "max(image_size) >= _LARGE_IMAGES",
        ("tests/vision/test_zoo.py",),
    ),
    Mutant(
        "a continued build of the cache trusts what it finds",
        "accel_trainer/vision/data/cache.py",
        'if hashlib.sha256(data).hexdigest() != row["sha256"]:',
        'if len(data) != (row["stop"] - row["start"] - len(row["left_out"])) * math.prod(shape):',
        ("tests/vision/test_cache.py",),
    ),
    Mutant(
        "a packed photo is not compared with its hash",
        "accel_trainer/vision/sources/photo_columns.py",
        "if checksum not in (None, hashlib.sha256(encoded).hexdigest()):",
        "if False:",
        (
            "tests/cli/test_pack.py::test_a_photo_that_changed_after_a_pack_is_named_when_it_is_read",
        ),
    ),
    Mutant(
        "a file that was packed before is kept although it has changed",
        "accel_trainer/cli/data/pack.py",
        'digest != known.get(f"{split}/{shard.name}")',
        "digest is None",
        (
            "tests/cli/test_pack.py::test_a_photo_that_changed_after_a_pack_is_named_when_it_is_read",
        ),
    ),
    Mutant(
        "a model is evaluated with the labels of other data as they are",
        "accel_trainer/cli/share/evaluation_data.py",
        "return numbers[labels]",
        "return labels",
        ("tests/cli/test_evaluate.py::test_classes_are_matched_by_name_in_any_order_and_number",),
    ),
    Mutant(
        "a folder is predicted with the errors of others in between",
        "accel_trainer/cli/share/predict.py",
        "else next(predicted)",
        "else list(predicted)[0]",
        ("tests/cli/test_evaluate.py",),
    ),
    Mutant(
        "the least sure mistakes are stored first",
        "accel_trainer/vision/mistakes.py",
        "argsort(descending=True, stable=True)",
        "argsort(stable=True)",
        ("tests/vision/test_mistakes.py",),
    ),
    # --- photos ---
    Mutant(
        "a file is known by its size and time of modification alone",
        "accel_trainer/core/filesystem.py",
        "return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns",
        "return status.st_size, status.st_mtime_ns",
        ("tests/vision/sources/test_stamps.py",),
    ),
    Mutant(
        "the names of a file are set aside one by one",
        "accel_trainer/vision/sources/held_out.py",
        "is_val = is_val[first_rows(columns.images)]",
        "pass",
        ("tests/vision/sources/test_links.py",),
    ),
    Mutant(
        "a dark class is hidden by the others",
        "accel_trainer/vision/data/pixel_range.py",
        "if not found or not (is_usual or dark_classes):",
        "if len(found) < total:",
        ("tests/vision/test_one_decoder.py",),
    ),
    Mutant(
        "the class of metadata is any column of its type",
        "accel_trainer/vision/sources/label_columns.py",
        "if any(map(is_label_name, features)):",
        "if features:",
        ("tests/vision/sources/test_label_choice.py",),
    ),
    Mutant(
        "a selection of photos is read from its first row on",
        "accel_trainer/vision/sources/photo_columns.py",
        "return index if self._rows is None else int(self._rows[index])",
        "return index",
        ("tests/vision/test_photos.py::test_a_selection_of_a_dataset_keeps_its_order",),
    ),
    Mutant(
        "photos are set aside by where their folder is",
        "accel_trainer/vision/sources/photo_columns.py",
        "names = pc.if_else(pc.starts_with(paths, self._prefix), below, paths)",
        "names = paths",
        ("tests/vision/test_photos.py::test_a_fraction_is_set_aside_by_name",),
    ),
    Mutant(
        "photos are augmented the same in all epochs",
        "accel_trainer/vision/augment/photo.py",
        "key = fold_in(self._seed, self._epoch)",
        "key = fold_in(self._seed, 0)",
        ("tests/vision/test_photo_augment.py::test_draws_for_a_sample_do_not_depend_on_its_batch",),
    ),
    Mutant(
        "a batch of photos is used before its threads are done",
        "accel_trainer/vision/data/photo_reader.py",
        "    for task in tasks:",
        "    for task in tasks[:1]:",
        (
            "tests/vision/test_photo_reader.py::test_a_photo_that_cannot_be_decoded_is_named_and_the_threads_end",
        ),
    ),
    Mutant(
        "a photo may claim any number of pixels",
        "accel_trainer/vision/data/photo_decode.py",
        "if header.height * header.width > MAX_PIXELS:",
        "if header.height * header.width < 0:",
        ("tests/vision/test_photo_decode.py::test_a_decompression_bomb_is_refused_by_its_header",),
    ),
    Mutant(
        "EXIF data after a fill byte is not found",
        "accel_trainer/vision/data/photo_decode.py",
        "if data[place + 1] == 0xFF:",
        "if not data:",
        ("tests/vision/test_one_decoder.py",),
    ),
    Mutant(
        "the transparent shade of a 16-bit photo stays as it is",
        "accel_trainer/vision/data/photo_decode.py",
        'grey[stored == image.info.get("transparency", -1)] = 255',
        "pass",
        ("tests/vision/test_one_decoder.py",),
    ),
    Mutant(
        "photos that are almost black are not said",
        "accel_trainer/vision/data/pixel_range.py",
        "self.high - self.low < _NARROW",
        "self.high < self.low",
        ("tests/vision/test_one_decoder.py",),
    ),
    Mutant(
        "a batch that cannot be collated names the usual sample alone",
        "accel_trainer/data/workers.py",
        "key=forms.count)[:2]",
        "key=forms.count)[-1:]",
        ("tests/data/test_workers.py",),
    ),
    Mutant(
        "a graph stays on the CPU",
        "accel_trainer/core/types.py",
        'return moved.map(lambda value: value.to(device), lambda value: hasattr(value, "to"))',
        "return moved",
        ("tests/data/test_graphs.py",),
    ),
    # --- a mistake in a module, shown to the direct tests of that module alone ---
    Mutant(
        "buffers are not brought back into the tensors that hold them",
        "accel_trainer/core/buffers.py",
        "            if buffer is before:",
        "            if False:",
        ("tests/core/test_buffers.py",),
    ),
    Mutant(
        "a callback without a state stores one",
        "accel_trainer/training/callback.py",
        "return {}",
        'return {"state": None}',
        ("tests/training/test_callback.py",),
    ),
    Mutant(
        "an error with a line break takes two lines",
        "accel_trainer/core/errors.py",
        '_CONTROL.sub(" ", message)',
        "message",
        ("tests/core/test_errors.py",),
    ),
    Mutant(
        "another folder may stand in the place of a guarded one",
        "accel_trainer/core/guards.py",
        "os.path.samestat(os.lstat(place), expected)",
        "os.lstat(place)",
        ("tests/core/test_guards.py",),
    ),
    Mutant(
        "the learning rate of a group is not scaled",
        "accel_trainer/core/learning_rate.py",
        "learning_rate * group.get(RATIO, 1.0)",
        "learning_rate",
        ("tests/core/test_learning_rate.py",),
    ),
    Mutant(
        "sums in pairs take the lists one after the other",
        "accel_trainer/core/pairwise.py",
        "while self._partial and self._partial[-1][0] == level:",
        "while self._partial:",
        ("tests/core/test_pairwise.py",),
    ),
    Mutant(
        "a shard begins at the start of the whole",
        "accel_trainer/core/shards.py",
        "return list(offsets), list(shape)",
        "return [0] * len(offsets), list(shape)",
        ("tests/core/test_shards.py",),
    ),
    Mutant(
        "parameters with one memory are not found",
        "accel_trainer/core/tensor_memory.py",
        "parameter.data_ptr(), parameter.shape",
        "id(parameter), parameter.shape",
        ("tests/core/test_tensor_memory.py",),
    ),
    Mutant(
        "the time of the work counts as waiting for data",
        "accel_trainer/core/timing.py",
        "            yield item\n            start_s = clock()",
        "            yield item",
        ("tests/core/test_timing.py",),
    ),
    Mutant(
        "the next epoch begins at the step where the last one ended",
        "accel_trainer/core/train_state.py",
        "epoch=self.epoch + 1, step_in_epoch=0",
        "epoch=self.epoch + 1",
        ("tests/core/test_train_state.py",),
    ),
    Mutant(
        "the norms of a frozen part train on",
        "accel_trainer/training/assembly.py",
        "            module.eval()",
        "            module.train()",
        ("tests/run/test_modes.py",),
    ),
    Mutant(
        "lazy batches count from the start of a slice",
        "accel_trainer/core/types.py",
        "[self._make(each) for each in found]",
        "[self._make(each) for each in range(len(found))]",
        ("tests/core/test_types.py",),
    ),
    Mutant(
        "parameters that share memory are placed apart",
        "accel_trainer/distributed/placement.py",
        "        parameter.data = other.data\n",
        "        pass\n",
        ("tests/distributed/test_placement.py",),
    ),
    Mutant(
        "a stream may be a dataset of samples by index",
        "accel_trainer/data/samples.py",
        "is_stream = isinstance(dataset, IterableDataset) or",
        "is_stream = False and",
        ("tests/data/test_samples.py",),
    ),
    Mutant(
        "a dead data worker raises wherever the process is",
        "accel_trainer/data/signals.py",
        "self._is_waiting and self._raise_if_dead(*event)",
        "self._raise_if_dead(*event)",
        ("tests/data/test_signals.py",),
    ),
    Mutant(
        "every sample of an epoch draws the same",
        "accel_trainer/data/workers.py",
        "seed_generators(fold_in(key, drawn_id))",
        "seed_generators(fold_in(key, len(self.last_begun)))",
        ("tests/data/test_workers.py",),
    ),
    Mutant(
        "a default learning rate is the one of torch",
        "accel_trainer/optim/config.py",
        "lr=_LEARNING_RATES.get(self.name, 0.0)",
        "lr=1e-3",
        ("tests/optim/test_config.py",),
    ),
    Mutant(
        "a checkpoint is complete without its mark",
        "accel_trainer/checkpoint/format.py",
        "        return filesystem.read_file(path / COMMIT, max_bytes=MAX_BYTES)\n",
        "        return filesystem.read_file(path / MANIFEST, max_bytes=MAX_BYTES)\n",
        ("tests/checkpoint/test_format.py",),
    ),
    Mutant(
        "the host memory of a snapshot keeps its first shape",
        "accel_trainer/checkpoint/staging.py",
        "form = (tensor.shape, tensor.dtype)",
        "form = (tensor.dtype,)",
        ("tests/checkpoint/test_staging.py",),
    ),
    Mutant(
        "the average of a trainer is the model itself",
        "accel_trainer/training/assembly.py",
        "copied = None if config.ema_decay is None else strategy.copy(model)",
        "copied = None if config.ema_decay is None else model",
        ("tests/training/test_assembly.py",),
    ),
    Mutant(
        "a second callback of a class takes the state of the first",
        "accel_trainer/training/callback_runner.py",
        'named[name if count[name] == 1 else f"{name}-{count[name]}"] = part',
        "named[name] = part",
        ("tests/training/test_callback_runner.py",),
    ),
    Mutant(
        "the last epoch is not evaluated unless it is due",
        "accel_trainer/training/config.py",
        "return is_last or step * denominator % numerator < denominator",
        "return step * denominator % numerator < denominator",
        ("tests/training/test_config.py",),
    ),
    Mutant(
        "an evaluation set decides the best checkpoint because it has an accuracy",
        "accel_trainer/training/progress.py",
        "name = config.monitor or (accuracy if accuracy in known else first)",
        "name = config.monitor or next((n for n in known if n.endswith('/accuracy')), first)",
        ("tests/training/test_progress.py",),
    ),
    Mutant(
        "a hook of one step changes the gradients of the next",
        "accel_trainer/training/step/optimizer_step.py",
        "gradient = torch.full_like(losses, factor)",
        "gradient = self.__dict__.setdefault(\n"
        '            f"{losses.shape}", torch.full_like(losses, factor)\n'
        "        )",
        ("tests/training/test_exactness.py",),
    ),
    Mutant(
        "the search for a NaN does not know where the training stands",
        "accel_trainer/training/trainer.py",
        "StepBatch(micro_batches, step_batch.num_samples, position, turn)",
        "StepBatch(micro_batches, step_batch.num_samples, turn=turn)",
        (
            "tests/training/step/test_nonfinite_report.py"
            "::test_a_loss_that_depends_on_the_position_is_blamed_on_its_sample",
        ),
    ),
    Mutant(
        "the file of an evaluation has single numbers too",
        "accel_trainer/callbacks/evaluation_file.py",
        "return isinstance(value, list | dict | Tensor)",
        "return True",
        ("tests/callbacks/test_evaluation_file.py",),
    ),
    Mutant(
        "a metric of torchmetrics adds up all batches so far",
        "accel_trainer/training/evaluation/metric_adapters.py",
        "        metric.reset()\n        metric.update(",
        "        metric.update(",
        ("tests/training/evaluation/test_metric_adapters.py",),
    ),
    Mutant(
        "the last evaluation of equals is the best",
        "accel_trainer/training/progress.py",
        "sign * value > sign * self.best.value",
        "sign * value >= sign * self.best.value",
        ("tests/training/test_progress.py",),
    ),
    Mutant(
        "the items of a step are those of its first micro-batch",
        "accel_trainer/training/strategy/base.py",
        "add(torch.stack(counts)) if counts else None",
        "counts[0] if counts else None",
        ("tests/training/strategy/test_data_parallel.py",),
    ),
    Mutant(
        "shards are gathered for checkpoints of shards too",
        "accel_trainer/training/strategy/sharded.py",
        "        if fsdp.saves_shards(self.accelerator):\n            return dict(pieces)\n",
        "",
        ("tests/training/strategy/test_sharded.py",),
    ),
    Mutant(
        "a loss without a graph is accepted",
        "accel_trainer/training/tasks/task_output.py",
        "if has_graph and not losses.requires_grad:",
        "if False:",
        ("tests/training/tasks/test_task_output.py",),
    ),
    Mutant(
        "the mean over a batch of one sample is taken for its loss",
        "accel_trainer/training/tasks/task_output.py",
        "losses.shape != (num_samples,):",
        "losses.numel() != num_samples:",
        ("tests/training/tasks/test_task_output.py",),
    ),
    Mutant(
        "a mean counts alike for any number of items",
        "accel_trainer/core/types.py",
        "torch.promote_types(loss.dtype, torch.float)) * num_items",
        "torch.promote_types(loss.dtype, torch.float))",
        ("tests/training/tasks/test_task_output.py",),
    ),
    Mutant(
        "a mean over no item is NaN",
        "accel_trainer/core/types.py",
        "loss_sum.masked_fill(num_items == 0, 0)",
        "loss_sum",
        ("tests/training/test_items.py",),
    ),
    Mutant(
        "the outputs of a task are kept during the backward",
        "accel_trainer/training/step/optimizer_step.py",
        "        del output  # so",
        "        pass  # so",
        ("tests/training/tasks/test_task_output.py",),
    ),
    Mutant(
        "a number of items that is NaN is accepted",
        "accel_trainer/training/step/optimizer_step.py",
        "not each.num_items >= 0",
        "each.num_items < 0",
        ("tests/training/tasks/test_task_output.py",),
    ),
    Mutant(
        "a trial shares the lists of the part",
        "accel_trainer/checks/trial_copy.py",
        "attributes[name] = copy.copy(value)",
        "attributes[name] = value",
        ("tests/checks/test_trial_copy.py",),
    ),
    Mutant(
        "state in a class is not looked for",
        "accel_trainer/checks/unsaved_state.py",
        "        self.visit_code(*type(value).__mro__)\n",
        "",
        ("tests/checks/test_unsaved_state.py",),
    ),
    Mutant(
        "early stopping forgets what it has counted",
        "accel_trainer/callbacks/early_stopping.py",
        '        self.num_bad_evaluations = state["num_bad_evaluations"]\n',
        "",
        ("tests/callbacks/test_early_stopping.py",),
    ),
    Mutant(
        "the last weights are exported and tested, and not the best",
        "accel_trainer/callbacks/export.py",
        "    if best is not None:\n",
        "    if False:\n",
        ("tests/callbacks/test_export.py", "tests/run/test_final_test.py"),
    ),
    Mutant(
        "a recipe may differ between processes",
        "accel_trainer/checks/agreement.py",
        'sources = [*sorted(Path(__file__).parents[1].rglob("*.py")), Path(sys.argv[0])]',
        'sources = [*sorted(Path(__file__).parents[1].rglob("*.py"))]',
        ("tests/checks/test_agreement.py",),
    ),
    Mutant(
        "a setting that may change counts as a change of the training",
        "accel_trainer/run/config.py",
        "if name in pinned or not name.startswith(MUTABLE_ON_RESUME)",
        "if True",
        ("tests/run/test_config.py",),
    ),
    Mutant(
        "a refused run leaves its new folder",
        "accel_trainer/run/folder.py",
        "            _remove_refused(folder)\n",
        "            pass\n",
        ("tests/run/test_folder.py",),
    ),
    Mutant(
        "a changed setting is compared with what an attempt left that saved nothing",
        "accel_trainer/run/resume.py",
        'stored = {} if resume is None else resume.checkpoint.manifest.get("settings", {})',
        "stored: Mapping[str, Any] = {}",
        ("tests/run/test_resume.py",),
    ),
    Mutant(
        "a class is taken for an instance of a part",
        "accel_trainer/checks/parts.py",
        "    if isinstance(part, type):\n        raise ConfigError(",
        "    if False:\n        raise ConfigError(",
        ("tests/checks/test_parts.py",),
    ),
    Mutant(
        "other data of the same size is restored without a word",
        "accel_trainer/run/resume.py",
        "return None if is_same_data(old, new) else",
        "return None if True else",
        ("tests/run/test_resume.py",),
    ),
    Mutant(
        "another order of the samples is restored without a word",
        "accel_trainer/run/resume.py",
        'stored["order"] != now["order"] and',
        "False and",
        ("tests/run/test_resume.py",),
    ),
    Mutant(
        "an order that was changed on purpose is other data",
        "accel_trainer/run/resume.py",
        ' and "batch.order" not in changes',
        "",
        ("tests/run/test_resume.py",),
    ),
    Mutant(
        "a change by an attempt that was killed before its first save is forgotten",
        "accel_trainer/run/resume.py",
        "self.changes += [change[0] for change in changes]",
        "pass",
        ("tests/run/test_resume.py",),
    ),
    Mutant(
        "a finished run is continued",
        "accel_trainer/run/resume.py",
        "return not is_done and has_same_start",
        "return has_same_start",
        ("tests/run/test_resume.py",),
    ),
    Mutant(
        "the schedule ends at --max-steps",
        "accel_trainer/run/optimization.py",
        "        total_steps=config.trainer.total_steps(plan.steps_per_epoch),",
        "        total_steps=config.trainer.last_step(plan.steps_per_epoch),",
        ("tests/run/test_optimization.py",),
    ),
    Mutant(
        "every process writes the result",
        "accel_trainer/run/callbacks.py",
        "    if is_main:\n        exporter",
        "    if True:\n        exporter",
        ("tests/run/test_callbacks.py",),
    ),
    Mutant(
        "a teacher that the first step creates is not named",
        "accel_trainer/checks/rehearsal.py",
        "kind[0] is nn.Parameter",
        "False",
        ("tests/checks/test_rehearsal.py",),
    ),
    Mutant(
        "an assignment to a frozen batch is a bug of the engine",
        "accel_trainer/core/user_code.py",
        ' and frame.f_code.co_filename != "<string>"',
        "",
        ("tests/run/test_mistakes.py",),
    ),
    Mutant(
        "a batch without items ends the run before its first step",
        "accel_trainer/checks/evaluation_trial.py",
        " and sums.any()",
        "",
        ("tests/checks/test_metric_rehearsal.py",),
    ),
    Mutant(
        "a parameter that one process leaves out of a step is not noticed",
        "accel_trainer/training/strategy/data_parallel.py",
        "        if self._ddp is None:\n",
        "        if True:\n",
        ("tests/training/strategy/test_data_parallel.py", "tests/training/test_exactness.py"),
    ),
    Mutant(
        "data with a generator of its own is read twice only",
        "accel_trainer/data/fingerprint.py",
        "NUM_REPEATS = 8",
        "NUM_REPEATS = 2",
        ("tests/data/test_fingerprint.py",),
    ),
    Mutant(
        "the state of a subclass of the trainer is not looked for",
        "accel_trainer/training/trainer.py",
        "return {name: value for name, value in vars(self).items() if name not in known}",
        "return {}",
        ("tests/checks/test_rehearsal.py",),
    ),
    Mutant(
        "the state of callbacks is not looked for",
        "accel_trainer/run/build.py",
        "    parts |= named([*callbacks, *own])\n",
        "",
        ("tests/checks/test_rehearsal.py",),
    ),
    Mutant(
        "the error of the main process is lost with a peer",
        "accel_trainer/distributed/collectives.py",
        "        if captured[1:]:\n            _reraise(captured)\n",
        "",
        ("tests/distributed/test_collectives.py",),
    ),
    Mutant(
        "a lost peer has the code of the user's errors",
        "accel_trainer/fault_tolerance/failure_report.py",
        "found = replace(mine, rank=rank, error=reason, exit_code=ExitCode.INTERNAL)",
        "found = replace(mine, rank=rank, error=reason)",
        ("tests/fault_tolerance/test_failure_report.py",),
    ),
    Mutant(
        "an export without the best weights does not say so",
        "accel_trainer/callbacks/export.py",
        "if result.best is not None and result.best.name not in source:",
        "if False:",
        ("tests/callbacks/test_export.py",),
    ),
    Mutant(
        "a hook of a callback that nothing calls is accepted",
        "accel_trainer/checks/parts.py",
        "if method.startswith(HOOKS) and not hasattr(Callback, method):",
        "if False:",
        ("tests/run/test_mistakes.py",),
    ),
    Mutant(
        "a checkpoint is due before the first step",
        "accel_trainer/checkpoint/config.py",
        "return step > 0 and (is_epoch_due or is_step_due)",
        "return is_epoch_due or is_step_due",
        ("tests/checkpoint/test_config.py",),
    ),
    Mutant(
        "JSON has a NaN that other programs cannot read",
        "accel_trainer/core/json_files.py",
        "allow_nan=False",
        "allow_nan=True",
        ("tests/core/test_json_files.py",),
    ),
    Mutant(
        "the defaults of a recipe are those that its config has now",
        "accel_trainer/run/build.py",
        "describe_environment(run.accelerator, defaults_of(type(run.config)))",
        "describe_environment(run.accelerator, config_to_dict(run.config))",
        ("tests/run/test_provenance.py",),
    ),
    Mutant(
        "every device but the CPU has copies in the background",
        "accel_trainer/distributed/streams.py",
        "return accelerator is not None and device.type == accelerator.type",
        "return True",
        ("tests/distributed/test_streams.py",),
    ),
]


def copy_repository(folder: Path) -> None:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        listed, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


def outcome_of(tests: Sequence[str], repository: Path, *options: str) -> str:
    """Return `red` if a test failed or hung, `GREEN` if none did, or why they did not run."""
    words = ["-q", "-x", "-p", "no:cacheprovider", "--timeout", "120", "-m", "not slow", *options]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *tests],
        cwd=repository,
        env=os.environ | {"PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
    )
    if done.returncode == 1 and "FAILED" in done.stdout:
        return "red"
    return "GREEN" if done.returncode == 0 else f"BROKEN: {(done.stdout + done.stderr)[-200:]!r}"


def try_mutant(mutant: Mutant, repository: Path) -> str:
    """Return the outcome of the mutant's tests."""
    path = repository / mutant.path
    source = path.read_text()
    if source.count(mutant.old) != 1:
        return f"GONE: {mutant.path} has its text {source.count(mutant.old)} times"
    path.write_text(source.replace(mutant.old, mutant.new))
    try:
        return outcome_of(mutant.tests, repository, "--whole-runs")
    finally:
        path.write_text(source)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME", help="those whose name has this in it")
    parser.add_argument(
        "--log", type=Path, help="a line for each; those that it has as red are not tried again"
    )
    options = parser.parse_args()
    known = (
        options.log.read_text().splitlines()
        if options.log is not None and options.log.exists()
        else []
    )
    results = [line for line in known if line.startswith("red")]
    left = [mutant for mutant in MUTANTS if f"red  {mutant.name}" not in results]
    if options.only is not None:
        left = [mutant for mutant in left if options.only in mutant.name]
    has_survivors = False
    with tempfile.TemporaryDirectory() as folder:
        copy_repository(Path(folder))
        for mutant in left:
            result = try_mutant(mutant, Path(folder))
            has_survivors |= result != "red"
            print(line := f"{result}  {mutant.name}", flush=True)
            if options.log is not None:
                with options.log.open("a") as log:
                    log.write(f"{line}\n")
    sys.exit(has_survivors)


if __name__ == "__main__":
    main()
