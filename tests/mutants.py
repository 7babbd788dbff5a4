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
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    """A planted mistake: `old`, found once in its file, becomes `new`; one of `tests` must fail."""

    name: str
    old: str
    new: str
    tests: str


# By file of `accel_trainer`; a mistake in a function that `promises` breaks stands there.
MUTANTS: dict[str, list[Mutant]] = {
    "callbacks/export.py": [
        Mutant(
            "the last weights are exported and tested, and not the best",
            "    if best is not None:\n",
            "    if False:\n",
            "callbacks/test_export.py run/test_final_test.py",
        ),
        Mutant(
            "an export without the best weights does not say so",
            "if result.best is not None and result.best.name not in source:",
            "if False:",
            "callbacks/test_export.py",
        ),
    ],
    "callbacks/metric_logger.py": [
        Mutant(
            "what is logged after the last row is lost",
            'if result.state != "preempted" and (left := trainer.log.read()):',
            'if result.state == "never" and (left := trainer.log.read()):',
            "callbacks/test_own_numbers.py",
        ),
    ],
    "callbacks/progress_bar.py": [
        Mutant(
            "the best evaluation is not marked",
            'mark = "" if trainer.best is self._best else "*"',
            'mark = ""',
            "callbacks/test_progress_bar.py::test_a_terminal_shows_a_table_of_epochs_with_the_best_so_far_marked",
        ),
        Mutant(
            "the bar's loss is a sum divided by the samples of all processes",
            "report.num_samples if is_exact else sum(map(len, report.sample_ids))",
            "report.num_samples",
            "callbacks/test_progress_bar.py::test_the_loss_of_a_step_is_the_mean_of_this_process",
        ),
    ],
    "checkpoint/config.py": [
        Mutant(
            "a checkpoint is due before the first step",
            "return step > 0 and (is_epoch_due or is_step_due)",
            "return is_epoch_due or is_step_due",
            "checkpoint/test_config.py",
        ),
    ],
    "checkpoint/format.py": [
        Mutant(
            "a checkpoint is there before what must not fall behind it",
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
            "checkpoint/test_manager.py::test_the_history_is_synced_before_the_commit_of_a_checkpoint",
        ),
        Mutant(
            "a checkpoint is complete without its mark",
            "        return filesystem.read_file(path / COMMIT, max_bytes=MAX_BYTES)\n",
            "        return filesystem.read_file(path / MANIFEST, max_bytes=MAX_BYTES)\n",
            "checkpoint/test_format.py",
        ),
    ],
    "checkpoint/manager.py": [
        Mutant(
            "a checkpoint stores what a callback notes after it was saved",
            '"metadata": copy_metadata(metadata),',
            '"metadata": metadata or {},',
            "run/test_metadata.py",
        ),
    ],
    "checkpoint/optimizer_state.py": [
        Mutant(
            "a resume forgets what the optimizer had gathered",
            'state[number] = _fitted(stored["state"][name], parameter)',
            "state[number] = {}",
            "checkpoint/test_state_dict.py::test_restored_objects_have_the_state_that_was_taken",
        ),
        Mutant(
            "state that may follow the order of the parameters is loaded in another one",
            "        if self._follows_order(piece):\n",
            "        if False:\n",
            "checkpoint/test_optimizer_state.py",
        ),
    ],
    "checkpoint/retention.py": [
        Mutant(
            "the best is deleted with the old",
            "kept = {best_name(directory), *(",
            "kept = {*(",
            "checkpoint/test_retention.py::test_the_last_the_best_and_the_permanent_are_kept",
        ),
        Mutant(
            "one fewer is kept than asked for",
            "committed[: -config.keep_last_n]",
            "committed[: 1 - config.keep_last_n]",
            "checkpoint/test_retention.py::test_the_last_the_best_and_the_permanent_are_kept",
        ),
    ],
    "checkpoint/sharded.py": [
        Mutant(
            "the hash of a header of slices is not looked at",
            'if _sha256(header) != entry["sha256"]:',
            'if not entry["sha256"]:',
            "checkpoint/test_sharded.py::test_what_is_not_what_was_saved_is_named",
        ),
        Mutant(
            "the name of a file of shards may be lost",
            "    filesystem.disk.sync_directory(path.parent)\n",
            "",
            "faults/test_sharded_faults.py::test_no_power_loss_takes_an_acknowledged_checkpoint_of_shards",
        ),
        Mutant(
            "a part of a tensor is taken from the start of a slice",
            "stored.read()[_box(common, stored.offsets)]",
            "stored.read()[_box(common, [start for start, _ in common])]",
            "checkpoint/test_sharded.py::test_a_part_of_a_tensor_is_read_only_from_the_slices_that_hold_it",
        ),
    ],
    "checkpoint/staging.py": [
        Mutant(
            "the host memory of a snapshot keeps its first shape",
            "form = (tensor.shape, tensor.dtype)",
            "form = (tensor.dtype,)",
            "checkpoint/test_staging.py",
        ),
    ],
    "checks/agreement.py": [
        Mutant(
            "a recipe may differ between processes",
            'sources = [*sorted(Path(__file__).parents[1].rglob("*.py")), Path(sys.argv[0])]',
            'sources = [*sorted(Path(__file__).parents[1].rglob("*.py"))]',
            "checks/test_agreement.py",
        ),
    ],
    "checks/boundaries.py": [
        Mutant(
            "state that changes where an epoch ends is not looked at",
            'parts = {**self.parts(), "train_set": self._subject.train_set}',
            "parts: Mapping[str, object] = {}",
            "checks/test_rehearsal.py::test_state_that_the_end_of_an_epoch_changes_is_named_once",
        ),
    ],
    "checks/evaluation_trial.py": [
        Mutant(
            "a step that cannot evaluate a set is found after the training",
            'isinstance(error, UserError) or not hasattr(task, "eval_step")',
            "isinstance(error, UserError)",
            "run/test_eval_sets.py::test_a_step_that_fails_on_a_set_costs_no_training",
        ),
        Mutant(
            "a batch without items ends the run before its first step",
            " and sums.any()",
            "",
            "checks/test_metric_rehearsal.py",
        ),
    ],
    "checks/out_of_memory.py": [
        Mutant(
            "out of memory, pairs are to be split",
            "elif activity.couples_batch:",
            "elif False:",
            "checks/test_out_of_memory.py",
        ),
    ],
    "checks/parts.py": [
        Mutant(
            "pairs that are not gathered train on several processes",
            "num_processes = plan.num_processes if coupling is True else 1",
            "num_processes = 1",
            "training/tasks/test_pairs.py::test_a_step_that_splits_pairs_is_refused_before_any_work",
        ),
        Mutant(
            "pairs are split by accumulation",
            "num_processes * plan.accumulation_steps > 1",
            "num_processes > 1",
            "checks/test_parts.py::test_a_step_that_splits_the_pairs_of_a_loss_is_one_line",
        ),
        Mutant(
            "a class is taken for an instance of a part",
            "    if isinstance(part, type):\n        raise ConfigError(",
            "    if False:\n        raise ConfigError(",
            "checks/test_parts.py",
        ),
        Mutant(
            "a hook of a callback that nothing calls is accepted",
            "if method.startswith(HOOKS) and not hasattr(Callback, method):",
            "if False:",
            "run/test_mistakes.py",
        ),
    ],
    "checks/rehearsal.py": [
        Mutant(
            "the test set is not tried before the first step",
            "for name, evaluation in self.evaluations.items():",
            "for name, evaluation in [each for each in self.evaluations.items() if "
            'each[0] != "test"]:',
            "run/test_eval_sets.py",
        ),
        Mutant(
            "a teacher that the first step creates is not named",
            "kind[0] is nn.Parameter",
            "False",
            "checks/test_hidden_state.py",
        ),
    ],
    "checks/trial_copy.py": [
        Mutant(
            "a trial shares the lists of the part",
            "attributes[name] = copy.copy(value)",
            "attributes[name] = value",
            "checks/test_trial_copy.py",
        ),
    ],
    "checks/unsaved_state.py": [
        Mutant(
            "an optimizer inside of another is not looked at",
            'self.visit(f"{name}.state", value.state)',
            "pass",
            "checks/test_hidden_state.py",
        ),
        Mutant(
            "state in a class is not looked for",
            "        self.visit_code(*kind.__mro__)\n",
            "",
            "checks/test_unsaved_state.py",
        ),
    ],
    "cli/common/scratch.py": [
        Mutant(
            "a command removes the folder of a command that is running",
            " and not is_locked(folder / _MARK)",
            "",
            "cli/common/test_scratch.py",
        ),
        Mutant(
            "what a killed command left stays",
            "filter(_is_abandoned, folder.parent.glob",
            "filter(None, Path().glob",
            "cli/common/test_scratch.py",
        ),
    ],
    "cli/data/pack.py": [
        Mutant(
            "a file that was packed before is kept although it has changed",
            'digest != known.get(f"{split}/{shard.name}")',
            "digest is None",
            "cli/test_pack.py::test_a_photo_that_changed_after_a_pack_is_named_when_it_is_read",
        ),
    ],
    "cli/plan/measure.py": [
        Mutant(
            "what a run does once is paid by each epoch",
            "(sum(self.costs(plan).values()) - self.once_s)",
            "sum(self.costs(plan).values())",
            "cli/plan/test_plan.py",
        ),
    ],
    "cli/plan/timer.py": [
        Mutant(
            "the samples that an evaluation left out cost nothing",
            "return self._num_left_out * (end - start)",
            "return 0 * (end - start)",
            "cli/plan/test_plan.py",
        ),
    ],
    "cli/recipe/exit.py": [
        Mutant(
            "a process ends before the main process has said why",
            "if is_alone else _WAIT_FOR_LINE_S",
            "if is_alone else 0",
            "cli/recipe/test_main.py::test_no_process_ends_before_the_main_process_has_said_why",
        ),
    ],
    "cli/report/by_itself.py": [
        Mutant(
            "a malformed run is a traceback of the live page",
            "with reading(*(run.folder for run in runs)):",
            "if True:",
            "cli/watch/test_watch.py",
        ),
    ],
    "cli/report/charts.py": [
        Mutant(
            "a run that diverged flattens all curves",
            "if highest > top > 0 else None",
            "if False else None",
            "cli/test_report.py",
        ),
    ],
    "cli/report/logged.py": [
        Mutant(
            "a report reads any path as a logged picture",
            "not _PATH.fullmatch(path)",
            "not path",
            "cli/test_report.py",
        ),
        Mutant(
            "a report reads pictures through a linked folder",
            'if (run.folder / "pictures").is_symlink():',
            "if False:",
            "cli/test_report.py",
        ),
    ],
    "cli/runs/metric_groups.py": [
        Mutant(
            "the report shows no named set",
            'return [group for group in groups if group.startswith("eval")]',
            'return [group for group in groups if group in ("eval", "eval_ema")]',
            "cli/test_named_sets.py",
        ),
    ],
    "cli/runs/run_reader.py": [
        Mutant(
            "rows that a resume has removed stay in the live page",
            "if not self._is_continued():",
            "if not self._end:",
            "cli/watch/test_watch.py",
        ),
        Mutant(
            "a table of runs imports torch",
            "from ...core.filesystem import read_lines\n",
            "from ...core.filesystem import read_lines\nimport torch\n",
            "cli/test_main.py::test_what_only_reads_runs_imports_no_torch",
        ),
    ],
    "cli/runs/runs.py": [
        Mutant(
            "the row of a sweep is that of its worst run",
            "best = min(rows, key=",
            "best = max(rows, key=",
            "cli/test_runs.py::test_a_sweep_is_one_row_of_its_best_run",
        ),
    ],
    "cli/runs/status.py": [
        Mutant(
            "the status of a killed run is of its start",
            'status["state"] in ("running", "killed")',
            'status["state"] in ()',
            "cli/test_runs.py",
        ),
    ],
    "cli/share/evaluation_data.py": [
        Mutant(
            "a model is evaluated with the labels of other data as they are",
            "return numbers[labels]",
            "return labels",
            "cli/test_evaluate.py::test_classes_are_matched_by_name_in_any_order_and_number",
        ),
    ],
    "cli/share/export.py": [
        Mutant(
            "an evaluation before a signal is taken for one after it",
            'is_evaluated = run.result.get("state") != "preempted"',
            "is_evaluated = True",
            "cli/test_export.py",
        ),
    ],
    "cli/share/predict.py": [
        Mutant(
            "predict swaps height and width",
            "height, width = config.image_size",
            "width, height = config.image_size",
            "cli/test_export.py::test_a_picture_is_resized_to_the_size_of_the_training_images",
        ),
        Mutant(
            "a folder is predicted with the errors of others in between",
            "else next(predicted)",
            "else list(predicted)[0]",
            "cli/test_evaluate.py",
        ),
    ],
    "cli/sweep/sweep.py": [
        Mutant(
            "a sweep prints the commands of finished runs only",
            "        if _finished_run(trial) is None:\n",
            "        if _finished_run(trial) is not None:\n",
            "cli/test_sweep.py::test_print_shows_a_command_a_line_and_trains_nothing",
        ),
    ],
    "cli/watch/server.py": [
        Mutant(
            "the live page needs no token",
            "if secrets.compare_digest(token.encode(), server.token.encode()) and",
            "if token and",
            "cli/watch/test_watch.py",
        ),
    ],
    "core/errors.py": [
        Mutant(
            "what a signal interrupts in the start may take it for its own error",
            "class Preempted(OneLineError):",
            "class Preempted(UserError):",
            "fault_tolerance/test_preemption.py::test_a_signal_in_the_start_is_no_error_of_what_it_interrupts",
        ),
        Mutant(
            "an error with a line break takes two lines",
            '_CONTROL.sub(" ", message)',
            "message",
            "core/test_errors.py",
        ),
    ],
    "core/filesystem.py": [
        Mutant(
            "a group may write the files of a run",
            "return os.open(path, _NEW_FILE, 0o644)",
            "return os.open(path, _NEW_FILE, 0o664)",
            "checkpoint/test_manager.py::test_the_umask_decides_who_reads_and_nobody_else_writes",
        ),
        Mutant(
            "a folder that is renamed is not synced before",
            "    disk.sync_directory(temporary)\n",
            "",
            "faults/test_power_loss.py::test_no_power_loss_takes_an_acknowledged_checkpoint "
            "core/test_filesystem.py",
        ),
        Mutant(
            "a file is known by its size and time of modification alone",
            "return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns",
            "return status.st_size, status.st_mtime_ns",
            "vision/sources/test_stamps.py",
        ),
    ],
    "core/json_files.py": [
        Mutant(
            "JSON has a NaN that other programs cannot read",
            "allow_nan=False",
            "allow_nan=True",
            "core/test_json_files.py",
        ),
    ],
    "core/module_order.py": [
        Mutant(
            "a model keeps the order that a set gave it in this process",
            "    if mine == names or {*mine} != {*names}:\n",
            "    if True:\n",
            "training/test_orders.py::test_a_model_takes_any_order_and_keeps_its_layers",
        ),
    ],
    "core/parameters.py": [
        Mutant(
            "a run keeps the weights that were tested",
            "model.load_state_dict(live)",
            "pass",
            "run/test_final_test.py",
        ),
    ],
    "core/shards.py": [
        Mutant(
            "a shard begins at the start of the whole",
            "return list(offsets), list(shape)",
            "return [0] * len(offsets), list(shape)",
            "core/test_shards.py",
        ),
    ],
    "core/tensor_memory.py": [
        Mutant(
            "parameters with one memory are not found",
            "parameter.data_ptr(), parameter.shape",
            "id(parameter), parameter.shape",
            "core/test_tensor_memory.py",
        ),
    ],
    "core/timing.py": [
        Mutant(
            "the time of the work counts as waiting for data",
            "            yield item\n            start_s = clock()",
            "            yield item",
            "core/test_timing.py",
        ),
    ],
    "core/types.py": [
        Mutant(
            "a graph stays on the CPU",
            'return moved.map(lambda value: value.to(device), lambda value: hasattr(value, "to"))',
            "return moved",
            "data/test_graphs.py",
        ),
        Mutant(
            "lazy batches count from the start of a slice",
            "[self._make(each) for each in found]",
            "[self._make(each) for each in range(len(found))]",
            "core/test_types.py",
        ),
        Mutant(
            "a mean counts alike for any number of items",
            "torch.promote_types(loss.dtype, torch.float)) * num_items",
            "torch.promote_types(loss.dtype, torch.float))",
            "training/tasks/test_task_output.py",
        ),
        Mutant(
            "a mean over no item is NaN",
            "loss_sum.masked_fill(num_items == 0, 0)",
            "loss_sum",
            "training/test_items.py",
        ),
    ],
    "core/user_code.py": [
        Mutant(
            "what gloo raises is taken for an error of this process",
            'is_from_gloo = isinstance(cause, RuntimeError) and "gloo" in str(cause)',
            "is_from_gloo = False",
            "fault_tolerance/test_failure_report.py",
        ),
        Mutant(
            "an assignment to a frozen batch is a bug of the engine",
            ' and frame.f_code.co_filename != "<string>"',
            "",
            "run/test_mistakes.py",
        ),
    ],
    "data/fingerprint.py": [
        Mutant(
            "data with a generator of its own is read twice only",
            "NUM_REPEATS = 8",
            "NUM_REPEATS = 2",
            "data/test_fingerprint.py",
        ),
    ],
    "data/loader.py": [
        Mutant(
            "weights of a loader of one's own are ignored",
            "any(each is not None for each in own)",
            "False",
            "run/test_eval_sets.py",
        ),
        Mutant(
            "processes find out one after another that a stream has ended",
            "return [*parts, range(end - 1, end)] if",
            "return [*parts, parts[-1][-1:]] if",
            "data/test_endless.py",
        ),
    ],
    "data/order.py": [
        Mutant(
            "a repeated sample is augmented alike each time",
            "drawn[by_id] += (torch.arange(len(ids)) - first_places) * dataset_size",
            "pass",
            "data/test_order.py vision/test_order.py",
        ),
        Mutant(
            "a balanced order begins again in each epoch",
            "epoch * quota, quota, fold_in(seed, label)",
            "0, quota, fold_in(seed, label)",
            "data/test_order.py",
        ),
    ],
    "data/samples.py": [
        Mutant(
            "a stream may be a dataset of samples by index",
            "is_stream = isinstance(dataset, IterableDataset) or",
            "is_stream = False and",
            "data/test_samples.py",
        ),
    ],
    "data/signals.py": [
        Mutant(
            "a dead data worker raises wherever the process is",
            "self._is_waiting and self._raise_if_dead(*event)",
            "self._raise_if_dead(*event)",
            "data/test_signals.py",
        ),
    ],
    "data/split.py": [
        Mutant(
            "a split depends on the place of a sample",
            "for name in names]",
            "for name, _ in enumerate(names)]",
            "data/test_split.py",
        ),
    ],
    "data/workers.py": [
        Mutant(
            "a data worker stays if the main process died before it began",
            " and main.is_alive()",
            "",
            "data/test_workers.py",
        ),
        Mutant(
            "a batch that cannot be collated names the usual sample alone",
            "key=forms.count)[:2]",
            "key=forms.count)[-1:]",
            "data/test_workers.py",
        ),
    ],
    "distributed/accelerator.py": [
        Mutant(
            "bfloat16 is switched off",
            "mixed_precision=precision,",
            'mixed_precision="no",',
            "training/step/test_mixed_precision.py::test_bfloat16_is_what_layers_compute_in_and_not_what_weights_are",
        ),
        Mutant(
            "--runtime.backend is ignored",
            'backend: str = config.backend or "gloo"',
            'backend = "gloo"',
            "distributed/test_accelerator.py::test_processes_send_their_messages_by_the_backend_that_is_asked_for",
        ),
    ],
    "distributed/collectives.py": [
        Mutant(
            "the error of the main process is lost with a peer",
            "        if captured[1:]:\n            _reraise(captured)\n",
            "",
            "distributed/test_collectives.py",
        ),
    ],
    "distributed/placement.py": [
        Mutant(
            "parameters that share memory are placed apart",
            "        parameter.data = other.data\n",
            "        pass\n",
            "distributed/test_placement.py",
        ),
    ],
    "distributed/streams.py": [
        Mutant(
            "every device but the CPU has copies in the background",
            "return accelerator is not None and device.type == accelerator.type",
            "return True",
            "distributed/test_streams.py",
        ),
    ],
    "fault_tolerance/failure_report.py": [
        Mutant(
            "of several failures the last one is named",
            'min(failures, key=itemgetter("time_s"))',
            'max(failures, key=itemgetter("time_s"))',
            "fault_tolerance/test_failure_report.py",
        ),
        Mutant(
            "a lost peer has the code of the user's errors",
            "found = replace(mine, rank=rank, error=reason, exit_code=ExitCode.INTERNAL)",
            "found = replace(mine, rank=rank, error=reason)",
            "fault_tolerance/test_failure_report.py",
        ),
    ],
    "fault_tolerance/interrupts.py": [
        Mutant(
            "a second Ctrl-C fails if the checkpoints cannot be listed",
            "suppress(OSError, UserError)",
            "suppress(OSError)",
            "callbacks/test_progress_bar.py",
        ),
    ],
    "fault_tolerance/preemption.py": [
        Mutant(
            "a launcher's TERM before the INT of the same Ctrl-C counts as a first press",
            "_SAME_INTERRUPT_S = 0.25",
            "_SAME_INTERRUPT_S = 0.0",
            "fault_tolerance/test_preemption.py::test_a_second_interrupt_leaves_at_once",
        ),
        Mutant(
            "Ctrl-C says nothing",
            "                flag.on_interrupt(exits)\n",
            "                pass\n",
            "callbacks/test_progress_bar.py::test_ctrl_c_says_at_once_what_happens_and_at_the_end_how_to_go_on",
        ),
        Mutant(
            "of two processes the one without a signal trains on",
            "self._follow(*self._reduced.tolist())",
            "self._follow(self._wish or _NOTHING, bool(self._reduced[1]))",
            "fault_tolerance/test_preemption.py::test_all_processes_stop_at_the_same_step_though_only_one_got_a_signal",
        ),
        Mutant(
            "a save that was agreed on in an evaluation is forgotten",
            "            self.is_save_agreed = True\n",
            "        self.is_save_agreed = code == _SAVE\n",
            "faults/test_save_signals.py::test_usr2_in_an_evaluation_saves_after_it",
        ),
        Mutant(
            "a signal that asks for a save during the start raises",
            "            flag.request_save()\n            return\n",
            "            flag.request_save()\n",
            "faults/test_save_signals.py::test_usr2_during_the_start_saves_after_the_first_step",
        ),
    ],
    "lab/chaos/campaign.py": [
        Mutant(
            "what runs with faults leave is not compared",
            "if ending.problem or ending.refused or not is_compared:",
            "if ending.plan:",
            "lab/chaos/test_chaos.py",
        ),
    ],
    "lab/chaos/fault_bringer.py": [
        Mutant("no fault comes", "if fault.step != step:", "if True:", "lab/chaos/test_chaos.py"),
    ],
    "lab/chaos/runs.py": [
        Mutant(
            "a byte is written back as it was",
            "file.write(bytes([byte ^ 0xFF]))",
            "file.write(bytes([byte]))",
            "lab/chaos/test_faults.py",
        ),
        Mutant(
            "what a campaign has started lives on",
            "    finally:\n        for life in living:",
            "    finally:\n        for life in []:",
            "lab/chaos/test_chaos.py",
        ),
    ],
    "lab/finish/ending.py": [
        Mutant(
            "an ending decays a step late",
            '*("--schedule.decay-at", str(self.at)),',
            '*("--schedule.decay-at", str(self.at + 1)),',
            "lab/finish/test_finish.py",
        ),
        Mutant(
            "an ending of a different trunk is taken for its own",
            "        if found:\n",
            "        if False:\n",
            "lab/finish/test_finish.py::test_an_ending_of_a_different_trunk_of_that_name_is_refused",
        ),
    ],
    "lab/replay/again.py": [
        Mutant(
            "two stretches have the same rows",
            'row["optimizer_step"] > stretch.after]',
            'row["optimizer_step"] > start]',
            "lab/replay/test_probe.py::test_a_probe_logs_the_bits_that_it_would_have_logged_live",
        ),
    ],
    "lab/replay/at.py": [
        Mutant(
            "a copied checkpoint comes with all rows of its run",
            'json.loads(line)["optimizer_step"] <= checkpoint.step',
            "line",
            "lab/replay/test_at.py::test_at_copies_a_checkpoint_that_the_run_still_has",
        ),
    ],
    "lab/replay/first_step.py": [
        Mutant(
            "a condition on a column that a row does not have holds there",
            "if condition.holds(known)\n",
            "if condition.holds(known) is not False\n",
            "lab/replay/test_bisect.py::test_a_condition_that_never_holds_is_said",
        ),
    ],
    "lab/replay/proof.py": [
        Mutant(
            "a replay's rows are not compared",
            "if (found := Difference.of(one, other)) is not None:",
            "if (found := None) is not None:",
            "lab/replay/test_at.py::test_at_trains_a_kept_step_again_and_names_what_differs",
        ),
    ],
    "lab/replay/replay.py": [
        Mutant(
            "another processor is not named before a replay",
            '"kernels for": kernels_here()',
            '"kernels for": hardware.get("cpu_kernels")',
            "lab/replay/test_replay.py::test_another_processor_gpu_or_version_is_named",
        ),
    ],
    "lab/replay/samples.py": [
        Mutant(
            "samples are not ordered by their losses",
            "sorted(samples, key=_by_loss)",
            "samples",
            "lab/replay/test_bisect.py::test_the_step_and_the_sample_behind_a_mean_are_found",
        ),
    ],
    "lab/replay/stretches.py": [
        Mutant(
            "a stretch begins at a checkpoint after which something was logged",
            "stretch.after if is_first else stretch.after - 1",
            "stretch.after",
            "lab/replay/test_probe.py::test_a_stretch_begins_at_a_checkpoint_before_the_row_that_it_follows",
        ),
    ],
    "lab/silent.py": [
        Mutant(
            "a replay that fails has an exit code of its own",
            "self.exit_code = ExitCode(ended_with)",
            "pass",
            "lab/replay/test_replay.py::test_a_replay_that_fails_says_so",
        ),
    ],
    "lab/why/element.py": [
        Mutant(
            "negative floats are counted away from zero",
            "return number if number >= 0 else",
            "return number if number else",
            "lab/why/test_element.py",
        ),
    ],
    "lab/why/traces.py": [
        Mutant(
            "an operator's outputs are compared before its inputs",
            'for place in ("inputs", "plain", "outputs"):',
            'for place in ("outputs", "plain", "inputs"):',
            "lab/why/test_traces.py",
        ),
    ],
    "lab/why/why.py": [
        Mutant(
            "a run that does not repeat its record is compared with the other one",
            "        if each.from_record is not None:\n",
            "        if False:\n",
            "lab/why/test_why.py::test_state_that_no_checkpoint_holds_is_named_after_a_resume",
        ),
    ],
    "optim/config.py": [
        Mutant(
            "a default learning rate is the one of torch",
            "lr=_LEARNING_RATES.get(self.name, 0.0)",
            "lr=1e-3",
            "optim/test_config.py",
        ),
    ],
    "optim/lr_scheduler.py": [
        Mutant(
            "the warmup is late by one step",
            "(optimizer_step + 1) / warmup_steps",
            "optimizer_step / warmup_steps",
            "optim/test_lr_scheduler.py",
        ),
    ],
    "optim/muon.py": [
        Mutant(
            "filters that are zero become NaN",
            "length = torch.where(length.isfinite(), length, 1.0)",
            "length = length * 1.0",
            "optim/test_muon.py::test_filters_that_begin_at_zero_or_next_to_it_are_trained",
        ),
    ],
    "run/build.py": [
        Mutant(
            "the ONNX export gathers on one process",
            'couples_batch == "gathered" and run.accelerator.num_processes > 1',
            "couples_batch is None",
            "training/tasks/test_pairs.py::test_all_processes_evaluate_a_gathering_task_equally_often",
        ),
        Mutant(
            "a process without samples leaves out an evaluation batch that gathers",
            'or run.activity.couples_batch == "gathered"',
            "or False",
            "training/tasks/test_pairs.py::test_all_processes_evaluate_a_gathering_task_equally_often",
        ),
        Mutant(
            "the metadata of the program replaces that of the checkpoint",
            'trainer.metadata.update(run.resume.checkpoint.manifest.get("metadata", {}))',
            'trainer.metadata = {**run.resume.checkpoint.manifest["metadata"], **trainer.metadata}',
            "run/test_metadata.py::test_metadata_is_stored_in_every_checkpoint_and_restored",
        ),
        Mutant(
            "the state of callbacks is not looked for",
            "    parts |= named([*callbacks, *own])\n",
            "",
            "checks/test_hidden_state.py",
        ),
        Mutant(
            "the defaults of a recipe are those that its config has now",
            "recipe_defaults=defaults_of(type(run.config)),",
            "recipe_defaults=config_to_dict(run.config),",
            "run/test_provenance.py",
        ),
    ],
    "run/callbacks.py": [
        Mutant(
            "a row is written before the hooks of its step",
            "return [*ours, *callbacks, log, *trackers]",
            "return [*ours, log, *callbacks, *trackers]",
            "callbacks/test_own_numbers.py",
        ),
        Mutant(
            "every process writes the result",
            "    if is_main:\n        exporter",
            "    if True:\n        exporter",
            "run/test_callbacks.py",
        ),
    ],
    "run/config.py": [
        Mutant(
            "exact: batch norms normalise over all processes",
            "sync_batch_norm=False, ",
            "",
            "training/strategy/test_exact.py::test_a_run_leaves_the_same_bytes_on_1_2_and_4_processes",
        ),
        Mutant(
            "a change of the order's seed is allowed on resume",
            'MUTABLE_ON_RESUME = (\n    "run.",',
            'MUTABLE_ON_RESUME = (\n    "seed",\n    "run.",',
            "run/test_session.py::test_a_changed_config_is_listed_with_the_flag_that_allows_it "
            "run/test_session.py",
        ),
        Mutant(
            "a setting that may change counts as a change of the training",
            "if name in pinned or not name.startswith(MUTABLE_ON_RESUME)",
            "if True",
            "run/test_config.py",
        ),
    ],
    "run/data.py": [
        Mutant(
            "all sets have the metrics of the first",
            "listed.get(name, listed[names[0]])",
            "listed[names[0]]",
            "run/test_eval_sets.py",
        ),
    ],
    "run/folder.py": [
        Mutant(
            "a refused run leaves its new folder",
            "            _remove_refused(folder)\n",
            "            pass\n",
            "run/test_folder.py",
        ),
    ],
    "run/joining.py": [
        Mutant(
            "a shared run leaves its umask behind",
            "folder_resources.callback(os.umask, os.umask(0o027))",
            "os.umask(0o027)",
            "run/test_session.py::test_a_shared_run_can_be_read_by_its_group",
        ),
    ],
    "run/optimization.py": [
        Mutant(
            "the schedule ends at --max-steps",
            "        total_steps=config.trainer.total_steps(plan.steps_per_epoch),",
            "        total_steps=config.trainer.last_step(plan.steps_per_epoch),",
            "run/test_optimization.py",
        ),
    ],
    "run/resume.py": [
        Mutant(
            "a changed setting is compared with what an attempt left that saved nothing",
            'stored = resume.checkpoint.manifest.get("settings", {})',
            "pass",
            "run/test_resume.py",
        ),
        Mutant(
            "other data of the same size is restored without a word",
            "return None if is_same_data(old, new) else",
            "return None if True else",
            "data/test_fingerprint.py",
        ),
        Mutant(
            "another order of the samples is restored without a word",
            'stored["order"] != now["order"] and',
            "False and",
            "data/test_order_of_runs.py",
        ),
        Mutant(
            "an order that was changed on purpose is other data",
            ' and "batch.order" not in changes',
            "",
            "data/test_order_of_runs.py",
        ),
        Mutant(
            "a finished run is continued",
            'if result.exists() and read_json_object(result)["state"] == "done":',
            "if False:",
            "run/test_resume.py",
        ),
    ],
    "training/assembly.py": [
        Mutant(
            "the average of a trainer is the model itself",
            "copied = None if config.ema_decay is None else strategy.copy(model)",
            "copied = None if config.ema_decay is None else model",
            "training/test_assembly.py",
        ),
    ],
    "training/callback.py": [
        Mutant(
            "a callback without a state stores one",
            "return {}",
            'return {"state": None}',
            "training/test_callback.py",
        ),
    ],
    "training/callback_runner.py": [
        Mutant(
            "a second callback of a class takes the state of the first",
            'named[name if count[name] == 1 else f"{name}-{count[name]}"] = part',
            "named[name] = part",
            "training/test_callback_runner.py",
        ),
    ],
    "training/config.py": [
        Mutant(
            "fractions of an epoch are counted from its start",
            "step = state.epoch * steps_per_epoch + state.step_in_epoch",
            "step = state.step_in_epoch",
            "training/evaluation/test_evaluation_interval.py",
        ),
        Mutant(
            "the last of a given number of steps is not evaluated unless it is due",
            "is_last = state.optimizer_step == self.num_steps or (",
            "is_last = (",
            "training/test_steps.py",
        ),
        Mutant(
            "the last epoch is not evaluated unless it is due",
            "return is_last or step * denominator % numerator < denominator",
            "return step * denominator % numerator < denominator",
            "training/test_config.py",
        ),
    ],
    "training/evaluation/evaluation.py": [
        Mutant(
            "processes choose the best checkpoint by numbers of their own",
            "return {**values, **run_on_main(lambda: single, accelerator)}",
            "return values",
            "run/test_own_evaluation.py",
        ),
        Mutant(
            "an evaluation draws from the generators of the training",
            "with evaluation_mode(model), "
            "preserved_generators(accelerator.device), torch.no_grad():",
            "with evaluation_mode(model), torch.no_grad():",
            "training/evaluation/test_random_evaluation.py",
        ),
        Mutant(
            "an evaluation that wants the model alone measures the average, too",
            'getattr(evaluation, "weights", None) == "model"',
            "False",
            "run/test_own_evaluation.py",
        ),
    ],
    "training/evaluation/evaluator.py": [
        Mutant(
            "exact: the parts of an evaluation are one",
            "while self.ends and first_sample >= self.ends[0]:",
            "while False:",
            "training/evaluation/test_evaluator.py::test_metrics_in_fixed_parts_are_the_same_bits_on_any_processes",
        ),
        Mutant(
            "a sample that is counted twice is not noticed",
            "if not torch.all(counts[1:-1] == 1) or counts[0] or counts[-1]:",
            "if counts.sum() != num_samples:",
            "training/evaluation/test_evaluator.py::test_a_sample_given_twice_in_the_place_of_another_is_found_out",
        ),
    ],
    "training/evaluation/metric_adapters.py": [
        Mutant(
            "a metric of torchmetrics adds up all batches so far",
            "        metric.reset()\n        metric.update(",
            "        metric.update(",
            "training/evaluation/test_metric_adapters.py",
        ),
    ],
    "training/evaluation/metrics.py": [
        Mutant(
            "losses without items count as they are",
            "if not num_items > 0:",
            "if num_items < 0:",
            "checks/test_metric_rehearsal.py",
        ),
        Mutant(
            "the confusion matrix is transposed",
            "batch.targets.long() * self.num_classes + output.outputs.argmax(1)",
            "output.outputs.argmax(1) * self.num_classes + batch.targets.long()",
            "training/evaluation/test_metrics.py",
        ),
    ],
    "training/log.py": [
        Mutant(
            "a shard is logged as it is",
            "    if is_shard(value):\n",
            "    if False:\n",
            "callbacks/test_own_numbers.py::test_a_shard_is_not_logged_and_no_process_waits",
        ),
        Mutant(
            "a logged tensor is not copied",
            "kept.append(value + 0)",
            "kept.append(value)",
            "training/test_log.py",
        ),
        Mutant(
            "a logged tensor is read at once",
            "kept.append(value + 0)",
            "kept.append(float(value))",
            "training/test_log.py",
        ),
        Mutant(
            "the numbers of all processes count",
            "        if self.is_main_process:\n            kept =",
            "        if True:\n            kept =",
            "training/test_log.py",
        ),
        Mutant(
            "a callback may log under the names of evaluations",
            "train|optim|perf|digest|test|eval[^/]*",
            "train|optim|perf|digest|test|eval",
            "training/test_log.py",
        ),
        Mutant(
            "a number replaces the picture of its name",
            "if not isinstance(kept, list):",
            "if False:",
            "training/test_log.py",
        ),
        Mutant(
            "anything in bytes is logged as a picture",
            " and png.startswith(",
            " or png.startswith(",
            "training/test_log.py",
        ),
    ],
    "training/plain_values.py": [
        Mutant(
            "the file of an evaluation has single numbers too",
            "return isinstance(value, list | dict | Tensor)",
            "return True",
            "callbacks/test_evaluation_file.py",
        ),
    ],
    "training/progress.py": [
        Mutant(
            "pending values are not in a checkpoint",
            'self.log.pending = state["log"]',
            "self.log.pending = {}",
            "callbacks/test_own_numbers.py",
        ),
        Mutant(
            "a resume has forgotten how often each optimizer has stepped",
            '        self.num_turns = Counter(state.get("num_turns"))\n',
            "",
            "training/step/test_turns.py",
        ),
        Mutant(
            "NaN can be the best",
            "if is_better and not unusable:",
            "if is_better or math.isnan(value) or math.isnan(self.best.value):",
            "training/test_progress.py::test_an_evaluation_without_a_number_is_never_the_best",
        ),
        Mutant(
            "a resume begins its epoch again",
            "        if RESTARTS_EPOCH & set(changes):\n",
            "        if True:\n",
            "training/test_ends.py::test_each_of_two_callbacks_of_one_class_finds_its_own_state "
            "training/test_ends.py::test_a_run_stopped_by_a_time_limit_ends_as_one_without_it",
        ),
        Mutant(
            "an evaluation set decides the best checkpoint because it has an accuracy",
            "name = config.monitor or (accuracy if accuracy in known else first)",
            "name = config.monitor or next((n for n in known if n.endswith('/accuracy')), first)",
            "training/test_progress.py",
        ),
        Mutant(
            "the last evaluation of equals is the best",
            "sign * value > sign * self.best.value",
            "sign * value >= sign * self.best.value",
            "training/test_progress.py",
        ),
    ],
    "training/step/nonfinite_check.py": [
        Mutant(
            "a step that is skipped keeps its running statistics",
            "        self.buffers.restore(steps_ago=steps_ago)\n",
            "",
            "training/step/test_nonfinite_report.py::test_a_skipped_step_leaves_no_trace_and_training_goes_on",
        ),
    ],
    "training/step/optimizer_step.py": [
        Mutant(
            "numbers of the task may come and go",
            "if len(forms | self._forms) > 1 or",
            "if",
            "training/test_items.py",
        ),
        Mutant(
            "a step that is computed again reads its micro-batches again",
            "step_batch = step_batch._replace(micro_batches=[*step_batch.micro_batches])",
            "pass",
            "training/step/test_step_check.py::test_checked_steps_leave_the_same_bytes",
        ),
        Mutant(
            "a short last step is divided by the size of a full one",
            "self.strategy.gradient_factor / step_batch.num_samples",
            "self.strategy.gradient_factor / 16",
            "training/test_trainer.py::test_a_step_short_or_not_goes_down_the_mean_loss_of_its_samples",
        ),
        Mutant(
            "a hook of one step changes the gradients of the next",
            "gradient = torch.full_like(losses, factor)",
            "gradient = self.__dict__.setdefault(\n"
            '            f"{losses.shape}", torch.full_like(losses, factor)\n'
            "        )",
            "training/test_exactness.py",
        ),
        Mutant(
            "the outputs of a task are kept during the backward",
            "        del output  # so",
            "        pass  # so",
            "training/tasks/test_task_output.py",
        ),
        Mutant(
            "a number of items that is NaN is accepted",
            "not each.num_items >= 0",
            "each.num_items < 0",
            "training/tasks/test_task_output.py",
        ),
    ],
    "training/step/turns.py": [
        Mutant(
            "what has no turn requires gradients all the same",
            "        parameter.requires_grad = False\n",
            "        pass\n",
            "training/step/test_turns.py",
        ),
    ],
    "training/strategy/base.py": [
        Mutant(
            "the loss is divided by the items of this process only",
            "self.accelerator.reduce(sums.num_items)",
            "sums.num_items",
            "training/test_items.py",
        ),
        Mutant(
            "gradients are scaled as for one process",
            "self.gradient_factor = self.accelerator.num_processes",
            "self.gradient_factor = 1",
            "optim/test_muon.py::test_two_processes_train_the_model_that_one_does",
        ),
        Mutant(
            "the items of a step are those of its first micro-batch",
            "add(torch.stack(counts)) if counts else None",
            "counts[0] if counts else None",
            "training/strategy/test_data_parallel.py",
        ),
    ],
    "training/strategy/data_parallel.py": [
        Mutant(
            "a parameter that one process leaves out of a step is not noticed",
            "        if self._ddp is None:\n",
            "        if True:\n",
            "training/strategy/test_data_parallel.py training/test_exactness.py",
        ),
    ],
    "training/strategy/exact.py": [
        Mutant(
            "exact: processes add up by a float all-reduce",
            "lambda flat: sum_pairwise(flat, self.accelerator)",
            'lambda flat: self.accelerator.reduce(flat, reduction="sum")',
            "training/strategy/test_exact.py::test_a_run_leaves_the_same_bytes_on_1_2_and_4_processes",
        ),
        Mutant(
            "exact: dropout is seeded by the process",
            "fold_in(self.seed, 0)",
            "fold_in(self.seed, self.accelerator.process_index)",
            "training/strategy/test_exact.py::test_a_run_leaves_the_same_bytes_on_1_2_and_4_processes",
        ),
        Mutant(
            "exact: the logged sums are those of each process",
            "[*totals, *numbers], lambda",
            "totals, lambda",
            "training/strategy/test_exact.py::test_a_run_leaves_the_same_bytes_on_1_2_and_4_processes",
        ),
        Mutant(
            "a parameter that no micro-batch reaches has a gradient of zeros",
            "gradient if has_one else None",
            "gradient",
            "training/strategy/test_exact.py::test_a_parameter_that_no_micro_batch_reaches_has_no_gradient",
        ),
    ],
    "training/strategy/sharded.py": [
        Mutant(
            "shards are gathered for checkpoints of shards too",
            "pieces if fsdp.saves_shards(self.accelerator) else ",
            "",
            "training/strategy/test_sharded.py",
        ),
    ],
    "training/tasks/task_output.py": [
        Mutant(
            "a loss without a graph is accepted",
            "if has_graph and not losses.requires_grad:",
            "if False:",
            "training/tasks/test_task_output.py",
        ),
        Mutant(
            "the mean over a batch of one sample is taken for its loss",
            "losses.shape != (num_samples,):",
            "losses.numel() != num_samples:",
            "training/tasks/test_task_output.py",
        ),
    ],
    "training/tasks/tasks.py": [
        Mutant(
            "balanced weights ignore the number of classes",
            "class_counts.sum() / (num_classes * class_counts.clamp_min(1))",
            "class_counts.sum() / class_counts.clamp_min(1)",
            "vision/test_order.py",
        ),
    ],
    "training/trainer.py": [
        Mutant(
            "the progress of a trunk depends on its length",
            "if self._decay is not None:",
            "if self._decay is not None and self._decay.start < self._decay.end:",
            "training/test_position.py",
        ),
        Mutant(
            "a step that is skipped moves the average",
            "if self._average is not None and not was_skipped:",
            "if self._average is not None:",
            "training/step/test_mixed_precision.py::test_an_overflow_skips_the_update_and_average_and_halves_the_scale",
        ),
        Mutant(
            "an evaluation within an epoch that a signal stopped is left out",
            "elif self._is_evaluation_due:  # perhaps a stop came before it, or during it",
            "elif False:",
            "run/test_own_evaluation.py"
            "::test_a_signal_ends_an_evaluation_and_a_resume_evaluates_again",
        ),
        Mutant(
            "a run evaluates a step again that its checkpoint has as evaluated",
            "and not self._progress.is_evaluated\n        )",
            ")",
            "training/evaluation/test_evaluation_interval.py",
        ),
        Mutant(
            "a stop that an evaluation asks for comes a step late",
            "return self._progress.end_reason is None and not self._stop_flag.agreed",
            "return not self._stop_flag.agreed",
            "training/evaluation/test_evaluation_interval.py",
        ),
        Mutant(
            "the best evaluation within an epoch is not saved at once",
            "if self._is_save_due and self._goes_on:",
            "if False:",
            "training/evaluation/test_evaluation_interval.py",
        ),
        Mutant(
            "an evaluation of a run of some steps is in no checkpoint",
            "is_best or self._config.num_steps is not None",
            "is_best",
            "training/test_steps.py",
        ),
        Mutant(
            "the progress of a batch forgets the steps of its epoch",
            "epochs = epoch + step_in_epoch / steps_per_epoch",
            "epochs = float(epoch)",
            "training/test_position.py",
        ),
        Mutant(
            "a run that was stopped early is tested",
            'if result.state == "done" and TEST in self._evaluations:',
            "if TEST in self._evaluations:",
            "run/test_final_test.py",
        ),
        Mutant(
            "once a save was asked for, every step saves",
            "        self._stop_flag.is_save_agreed = False\n",
            "",
            "faults/test_save_signals.py::test_usr2_saves_once_and_the_run_ends_with_the_same_bytes",
        ),
        Mutant(
            "a metric that failed on one process saves on that process only",
            "isinstance(error, PartFailed) or",
            'isinstance(error, PartFailed) and type(error).__name__ != "PeerFailed" or',
            "faults/test_user_code.py",
        ),
        Mutant(
            "the search for a NaN does not know where the training stands",
            "StepBatch(micro_batches, step_batch.num_samples, self.position, step.turn)",
            "StepBatch(micro_batches, step_batch.num_samples, turn=step.turn)",
            "training/step/test_nonfinite_report.py::test_a_loss_that_depends_on_the_position_is_blamed_on_its_sample",
        ),
        Mutant(
            "the state of a subclass of the trainer is not looked for",
            "return {name: value for name, value in vars(self).items() if name not in known}",
            "return {}",
            "checks/test_hidden_state.py",
        ),
    ],
    "vision/augment/batch.py": [
        Mutant(
            "mixing shares leave the range from 0 to 1",
            ".clamp(0, 1)",
            "",
            "vision/test_augment.py",
        ),
        Mutant(
            "the target of a pasted box follows the draw and not the pixels",
            "return weights, weights.mean((1, 2, 3))",
            "return weights, weight",
            "vision/test_augment.py",
        ),
    ],
    "vision/augment/mix.py": [
        Mutant(
            "an image may be mixed with one that is left out",
            "return torch.cat([drawn, self._kept[places]])",
            "return torch.cat([drawn, places])",
            "vision/test_order.py",
        ),
    ],
    "vision/augment/photo.py": [
        Mutant(
            "photos are augmented the same in all epochs",
            "key = fold_in(self._seed, self._epoch)",
            "key = fold_in(self._seed, 0)",
            "vision/test_photo_augment.py::test_draws_for_a_sample_do_not_depend_on_its_batch",
        ),
    ],
    "vision/data/cache.py": [
        Mutant(
            "a continued build of the cache trusts what it finds",
            'if hashlib.sha256(data).hexdigest() != row["sha256"]:',
            'if len(data) != (row["stop"] - row["start"] - len(row["left_out"])) * '
            "math.prod(shape):",
            "vision/test_cache.py",
        ),
    ],
    "vision/data/photo_decode.py": [
        Mutant(
            "a photo may claim any number of pixels",
            "if header.height * header.width > MAX_PIXELS:",
            "if header.height * header.width < 0:",
            "vision/test_photo_decode.py::test_a_decompression_bomb_is_refused_by_its_header",
        ),
        Mutant(
            "EXIF data after a fill byte is not found",
            "if data[place + 1] == 0xFF:",
            "if not data:",
            "vision/test_one_decoder.py",
        ),
        Mutant(
            "the transparent shade of a 16-bit photo stays as it is",
            'grey[stored == image.info.get("transparency", -1)] = 255',
            "pass",
            "vision/test_one_decoder.py",
        ),
    ],
    "vision/data/photo_reader.py": [
        Mutant(
            "a batch of photos is used before its threads are done",
            "    for task in tasks:",
            "    for task in tasks[:1]:",
            "vision/test_photo_reader.py::test_a_photo_that_cannot_be_decoded_is_named_and_the_threads_end",
        ),
    ],
    "vision/data/pixel_range.py": [
        Mutant(
            "a dark class is hidden by the others",
            "if not found or not (is_usual or dark_classes):",
            "if len(found) < total:",
            "vision/test_one_decoder.py",
        ),
        Mutant(
            "photos that are almost black are not said",
            "self.high - self.low < _NARROW",
            "self.high < self.low",
            "vision/test_one_decoder.py",
        ),
    ],
    "vision/mistakes.py": [
        Mutant(
            "the least sure mistakes are stored first",
            "argsort(descending=True, stable=True)",
            "argsort(stable=True)",
            "vision/test_mistakes.py",
        ),
    ],
    "vision/models/resnet.py": [
        Mutant(
            "the ResNet never applies its dropout",
            "self.fc(self.dropout(x.mean((2, 3))))",
            "self.fc(x.mean((2, 3)))",
            "vision/test_zoo.py::test_dropout_drops_its_fraction_only_in_training",
        ),
    ],
    "vision/models/zoo.py": [
        Mutant(
            "the stem for large images begins where the longer side is large",
            "min(image_size) >= _LARGE_IMAGES",
            "max(image_size) >= _LARGE_IMAGES",
            "vision/test_zoo.py",
        ),
    ],
    "vision/rules.py": [
        Mutant(
            "a run that continues chooses its open settings again",
            "stored=_stored_settings(config, recipe)",
            "stored={}",
            "vision/test_rules.py::test_a_killed_run_keeps_its_settings_though_the_rules_change",
        ),
        Mutant(
            "a rule overrides what a user gave",
            "        if attrgetter(name)(config) is not None:\n            continue\n",
            "",
            "vision/test_rules.py::test_a_flag_wins_and_the_rest_follows_it",
        ),
        Mutant(
            "weights are trained at the learning rate of a net from scratch",
            "peaks[facts.is_pretrained]",
            "peaks[False]",
            "vision/test_rules.py::test_photos_and_weights_decide_the_settings",
        ),
    ],
    "vision/sources/held_out.py": [
        Mutant(
            "the names of a file are set aside one by one",
            "is_val = is_val[first_rows(columns.images)]",
            "pass",
            "vision/sources/test_links.py",
        ),
    ],
    "vision/sources/label_columns.py": [
        Mutant(
            "the class of metadata is any column of its type",
            "if any(map(is_label_name, features)):",
            "if features:",
            "vision/sources/test_label_choice.py",
        ),
    ],
    "vision/sources/photo_columns.py": [
        Mutant(
            "a packed photo is not compared with its hash",
            "if checksum not in (None, hashlib.sha256(encoded).hexdigest()):",
            "if False:",
            "cli/test_pack.py::test_a_photo_that_changed_after_a_pack_is_named_when_it_is_read",
        ),
        Mutant(
            "a selection of photos is read from its first row on",
            "return index if self._rows is None else int(self._rows[index])",
            "return index",
            "vision/test_photos.py::test_a_selection_of_a_dataset_keeps_its_order",
        ),
        Mutant(
            "photos are set aside by where their folder is",
            "names = pc.if_else(pc.starts_with(paths, self._prefix), below, paths)",
            "names = paths",
            "vision/test_photos.py::test_a_fraction_is_set_aside_by_name",
        ),
    ],
}


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


def try_mutant(mutant: Mutant, path: Path, repository: Path) -> str:
    """Return the outcome of the mutant's tests."""
    source = path.read_text()
    if source.count(mutant.old) != 1:
        return f"GONE: {path.name} has its text {source.count(mutant.old)} times"
    path.write_text(source.replace(mutant.old, mutant.new))
    try:
        tests = [f"tests/{name}" for name in mutant.tests.split()]
        return outcome_of(tests, repository, "--whole-runs")
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
    left = [
        (mutant, path)
        for path, mutants in MUTANTS.items()
        for mutant in mutants
        if f"red  {mutant.name}" not in results and (options.only or "") in mutant.name
    ]
    has_survivors = False
    with tempfile.TemporaryDirectory() as folder:
        copy_repository(Path(folder))
        for mutant, path in left:
            result = try_mutant(mutant, Path(folder, "accel_trainer", path), Path(folder))
            has_survivors |= result != "red"
            print(line := f"{result}  {mutant.name}", flush=True)
            if options.log is not None:
                with options.log.open("a") as log:
                    log.write(f"{line}\n")
    sys.exit(has_survivors)


if __name__ == "__main__":
    main()
