"""The promises, each with a mistake that breaks it and the tests that must then fail.

    python -m tests.promises [--only WORDS] [--log promises.txt]

A mistake is the wrong body of one function, which is found by its name wherever it is: it survives
every move of the code. The mistakes are made one at a time, in a copy of the repository. The log
gets a line for each; the same command continues after the last one. The exit code is 1 if all tests
of a mistake pass, or if a function is gone.

    python -m tests.promises --page

prints the page docs/reference/promises.md.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from .mutants import copy_repository, outcome_of


@dataclass(frozen=True)
class Promise:
    """What users rely on: with `body` as that of `function`, one of `tests` must fail."""

    kept: str
    function: str
    body: str
    tests: str


KILLED = "a killed run resumes to the same bits"
PROCESSES = "any number of processes trains the same model"
COUNTED = "no metric counts a sample twice"
STORED = "no checkpoint is lost"
SAFE = "no checkpoint can run code or reach other files"
STOPPED = "a run that goes wrong stops, saves or reports it"
TOLD = "a resume with different settings, data or code is an error or a warning"
OWN = "a loop of your own resumes to the same bits, or names what does not"

EXACT = (
    "tests/training/strategy/test_exact.py::test_a_run_leaves_the_same_bytes_on_1_2_and_4_processes"
)
_OWN_LOOP = "tests/own_loop/test_exact_run.py"

PROMISES = [
    # --- a killed run resumes to the same bits ---
    Promise(
        KILLED,
        "epoch_permutation",
        "return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))",
        "tests/core/test_rng.py",
    ),
    Promise(
        KILLED,
        "seed_generators",
        "random.seed(key)\ntorch.default_generator.manual_seed(key)",
        "tests/training/test_exactness.py::test_a_task_may_draw_from_any_generator_and_change_gradients",
    ),
    Promise(
        KILLED,
        "Strategy.begin_forward",
        "seed_generators(index, self.accelerator.device)",
        "tests/training/strategy/test_data_parallel.py",
    ),
    Promise(
        KILLED,
        "_SeededSamples.__getitem__",
        "return key_and_id[1], self._dataset[key_and_id[1]]",
        "tests/data/test_workers.py",
    ),
    Promise(
        KILLED,
        "TrainState.after_epoch",
        "return self._replace(epoch=self.epoch + 1)",
        "tests/core/test_train_state.py",
    ),
    Promise(
        KILLED, "OptimizerState.load_state_dict", "pass", "tests/checkpoint/test_state_dict.py"
    ),
    Promise(KILLED, "OwnState.load_state_dict", "pass", "tests/checkpoint/test_state_dict.py"),
    Promise(KILLED, "UnlistedBuffers.load_state_dict", "pass", "tests/checkpoint"),
    Promise(KILLED, "CallbackRunner.load_state_dict", "pass", "tests/training/test_ends.py"),
    Promise(
        KILLED, "EarlyStopping.load_state_dict", "pass", "tests/callbacks/test_early_stopping.py"
    ),
    Promise(
        KILLED, "Meters.load_state_dict", "self._clear()", "tests/callbacks/test_metric_logger.py"
    ),
    Promise(KILLED, "MetricsFile.truncate", "pass", "tests/callbacks/test_metrics_file.py"),
    Promise(KILLED, "BufferCopy.put_back", "pass", "tests/core/test_buffers.py"),
    Promise(KILLED, "preserved_generators", "yield", "tests/core/test_rng.py tests/training"),
    Promise(KILLED, "Ema.settle", "pass", "tests/optim/test_ema.py"),
    Promise(
        KILLED,
        "Progress.load_state_dict",
        'self.state = TrainState.from_dict(state["position"])',
        "tests/training/test_progress.py tests/training/test_ends.py",
    ),
    # --- any number of processes trains the same model ---
    Promise(
        PROCESSES,
        "BatchPlan.steps_per_epoch",
        "return self.num_samples // self.global_batch_size",
        "tests/core/test_batch_plan.py",
    ),
    Promise(
        PROCESSES,
        "parts_of_process",
        """
        size = len(positions) // num_processes
        return [positions[process_index * size : (process_index + 1) * size]]
        """,
        "tests/core/test_batch_plan.py",
    ),
    Promise(
        PROCESSES,
        "Strategy.finish",
        """
        sums = micro_sums[0] if len(micro_sums) == 1 else add_up(micro_sums, torch.sum)
        return sums, sums.num_items
        """,
        "tests/training/step/test_targets.py tests/training/strategy/test_data_parallel.py",
    ),
    Promise(
        PROCESSES,
        "convert_sync_batch_norm",
        "return model",
        "tests/distributed/test_sync_batch_norm.py",
    ),
    Promise(
        PROCESSES,
        "_SumOverProcesses.backward",
        "return gradient",
        "tests/distributed/test_differentiable.py",
    ),
    Promise(PROCESSES, "broadcast_from_main", "pass", "tests/distributed/test_collectives.py"),
    Promise(
        PROCESSES,
        "differing_lines",
        "return {}",
        "tests/checks/test_rehearsal.py",
    ),
    Promise(
        PROCESSES,
        "ExactStrategy.begin_forward",
        "self._history.restore()\nsuper().begin_forward(optimizer_step, index)",
        EXACT,
    ),
    Promise(PROCESSES, "sum_pairwise", 'return accelerator.reduce(values, reduction="sum")', EXACT),
    Promise(
        PROCESSES,
        "PairwiseSum.add",
        """
        if self._partial:
            torch._foreach_add_(self._partial[0][1], tensors)
        else:
            self._partial.append((0, tensors))
        """,
        f"tests/core/test_pairwise.py {EXACT}",
    ),
    Promise(
        PROCESSES,
        "Assembly.set_training_mode",
        "self.step.wrapped_model.train()",
        "tests/run/test_modes.py",
    ),
    Promise(
        PROCESSES,
        "Ema.update",
        """
        averages, sources = zip(*self._averaged, strict=True)
        torch._foreach_lerp_(averages, sources, self.decay)
        """,
        "tests/optim/test_ema.py",
    ),
    Promise(
        PROCESSES,
        "set_learning_rate",
        """
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        """,
        "tests/core/test_learning_rate.py",
    ),
    # --- no metric counts a sample twice ---
    Promise(
        COUNTED,
        "gather_rows",
        """
        if accelerator.num_processes > 1:
            rows = accelerator.gather(accelerator.pad_across_processes(rows.to(accelerator.device)))
        return rows.cpu()
        """,
        "tests/distributed/test_collectives.py",
    ),
    Promise(
        COUNTED,
        "Evaluator._merge",
        "return [tensor.cpu() for tensor in tensors]",
        "tests/training/evaluation/test_evaluator.py",
    ),
    Promise(
        COUNTED,
        "split_evenly",
        """
        cuts = range(0, len(positions), batch_size)
        return [positions[cut : cut + batch_size] for cut in cuts]
        """,
        "tests/core/test_batch_plan.py",
    ),
    Promise(
        COUNTED,
        "SamplesSoFar.restore",
        "self._is_known = total is not None\nself._local = torch.tensor(total or 0)",
        "tests/callbacks/test_samples_so_far.py",
    ),
    Promise(
        COUNTED,
        "BestCheckpoint.weights",
        'return "model"',
        "tests/training/test_trainer.py tests/core/test_train_state.py",
    ),
    # --- no checkpoint is lost ---
    Promise(
        STORED,
        "create_file",
        """
        descriptor = disk.create(path)
        for chunk in chunks:
            disk.write(path, descriptor, chunk)
        os.close(descriptor)
        """,
        "tests/core/test_filesystem.py",
    ),
    Promise(
        STORED,
        "rename",
        "disk.rename(source, target)",
        "tests/core/test_filesystem.py",
    ),
    Promise(
        STORED,
        "publish",
        "rename(temporary, final)",
        "tests/core/test_filesystem.py",
    ),
    Promise(
        STORED,
        "replace_file",
        "path.unlink(missing_ok=True)\ncreate_file(path, chunks)",
        "tests/core/test_filesystem.py",
    ),
    Promise(
        STORED,
        "remove_own",
        """
        for path in paths:
            disk.remove_tree(path)
        """,
        "tests/core/test_filesystem.py",
    ),
    Promise(STORED, "check_readable", "return None", "tests/checkpoint/test_read_back.py"),
    Promise(STORED, "best_name", "return None", "tests/checkpoint/test_retention.py"),
    Promise(
        STORED,
        "update_best",
        "write_json(directory / BEST_FILE, asdict(best)) if best else None",
        "tests/checkpoint",
    ),
    Promise(
        STORED,
        "first_valid",
        "return next(map(load, names), None)",
        "tests/checkpoint/test_loading.py",
    ),
    Promise(
        STORED,
        "is_committed",
        "return (path / COMMIT).exists()",
        "tests/checkpoint/test_format.py tests/checkpoint/test_loading.py",
    ),
    Promise(
        STORED,
        "run_lock",
        "yield os.open(path, os.O_RDWR | os.O_CREAT)",
        "tests/core/test_run_dir.py",
    ),
    Promise(STORED, "check_not_moved", "pass", "tests/core/test_guards.py"),
    Promise(STORED, "refuse_strange_entries", "pass", "tests/core/test_run_dir.py"),
    Promise(
        STORED,
        "Peers.agree",
        "return [action()]",
        "tests/faults/test_sharded_faults.py tests/checkpoint/test_sharded.py",
    ),
    Promise(
        STORED,
        "first_nonfinite",
        "return None",
        "tests/checkpoint/test_serialization.py tests/checkpoint/test_manager.py",
    ),
    # --- no checkpoint can run code or reach other files ---
    Promise(
        SAFE,
        "read_listed_file",
        """
        if "header_bytes" in entry:
            return read_header(path, entry)
        return _read(path, max_bytes=entry["bytes"])
        """,
        "tests/checkpoint/test_loading.py tests/checkpoint/test_format.py",
    ),
    Promise(SAFE, "open_regular", "return os.open(path, flags)", "tests/core/test_filesystem.py"),
    Promise(
        SAFE,
        "StoredSlice.read",
        """
        data = _read(self.path, self.start, self.shape.numel() * self.dtype.itemsize)
        return data.view(self.dtype).reshape(self.shape)
        """,
        "tests/checkpoint/test_sharded.py",
    ),
    Promise(
        SAFE,
        "parse_json",
        "return json.loads(data.decode(), object_hook=object_hook)",
        "tests/core/test_json_files.py tests/checkpoint/test_serialization.py",
    ),
    # --- a run that goes wrong stops, saves or says so ---
    Promise(
        STOPPED,
        "NonfiniteCheck._is_skipped",
        "return False",
        "tests/training/step/test_nonfinite_report.py",
    ),
    Promise(
        STOPPED,
        "StopFlag.request",
        "self._wish = Stop(code)",
        "tests/fault_tolerance/test_preemption.py",
    ),
    Promise(
        STOPPED,
        "StopFlag._follow",
        "self._have_all_run_out = have_all_run_out",
        "tests/fault_tolerance/test_preemption.py",
    ),
    Promise(STOPPED, "ignore_signals", "pass", "tests/fault_tolerance/test_preemption.py"),
    Promise(
        STOPPED, "Watchdog._watch", "self._is_done.wait()", "tests/fault_tolerance/test_watchdog.py"
    ),
    Promise(
        STOPPED,
        "check_repeats",
        "return run()",
        "tests/training/step/test_step_check.py",
    ),
    Promise(STOPPED, "check_same_lines", "pass", "tests/checks/test_rehearsal_on_processes.py"),
    Promise(STOPPED, "check_same_parts", "pass", "tests/checks/test_same_everywhere.py"),
    Promise(STOPPED, "mark_unsaved", "return {}", "tests/checks/test_unsaved_state.py"),
    # --- a resume with different settings, data or code is an error or a warning ---
    Promise(
        TOLD,
        "is_same_data",
        "return True",
        "tests/data/test_fingerprint.py tests/run/test_resume.py",
    ),
    Promise(TOLD, "training_changes", "return []", "tests/run/test_config.py"),
    Promise(
        TOLD,
        "Resume.compare_settings",
        "pass",
        "tests/run/test_session.py tests/run/test_resume.py",
    ),
    Promise(TOLD, "CallbackRunner.warn_of_lost", "pass", "tests/training/test_callback_runner.py"),
    # --- a loop of your own resumes to the same bits, or names what does not ---
    Promise(OWN, "OrderedLoader._places", "yield from self.batches[first:]", _OWN_LOOP),
    Promise(OWN, "ExactRun._seed_round", "pass", _OWN_LOOP),
    Promise(OWN, "ExactRun.load_state_dict", "pass", _OWN_LOOP),
    Promise(OWN, "Attributes.restore", "pass", _OWN_LOOP),
    Promise(OWN, "ProcessBuffers.load_state_dict", "pass", _OWN_LOOP),
    Promise(OWN, "Updates.settle", "return bool(self.stepped), True", _OWN_LOOP),
    Promise(OWN, "check_same_run", "pass", _OWN_LOOP),
    Promise(OWN, "_check_orders", "pass", "tests/own_loop/test_places.py"),
    Promise(OWN, "loop_around", "return None", "tests/own_loop/test_carried_state.py"),
    Promise(OWN, "begun_anew", "yield from ()", "tests/own_loop/test_carried_state.py"),
    Promise(OWN, "_carried_by", "return set()", "tests/own_loop/test_carried_state.py"),
    Promise(OWN, "_acts", "return True", "tests/own_loop/test_carried_state.py"),
]


def find(function: str, root: Path) -> tuple[Path, ast.FunctionDef]:
    """Return where the function of that name is. Raises LookupError unless there is exactly one."""
    definition = f"def {function.rpartition('.')[2]}("
    sources = ((path, path.read_text()) for path in (root / "accel_trainer").rglob("*.py"))
    found = [
        (path, node)
        for path, source in sources
        if definition in source  # parsing takes much longer than reading
        for name, node in _functions(ast.parse(source).body)
        if name == function
    ]
    if len(found) != 1:
        raise LookupError(f"{len(found)} functions are called {function}")
    return found[0]


def _functions(nodes: list[ast.stmt]) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for name, method in _functions(node.body):
                yield f"{node.name}.{name}", method


def break_promise(promise: Promise, root: Path) -> None:
    """Replace the body of the function, from its first statement on."""
    path, node = find(promise.function, root)
    lines = path.read_text().splitlines(keepends=True)
    first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
    body = textwrap.indent(textwrap.dedent(promise.body).strip(), " " * first.col_offset)
    lines[first.lineno - 1 : node.end_lineno] = [body + "\n"]
    path.write_text("".join(lines))


def try_promise(promise: Promise, repository: Path) -> str:
    """Return the outcome of the promise's tests with its mistake: `red`, as it should be."""
    try:
        path, _ = find(promise.function, repository)
    except LookupError as error:
        return f"GONE: {error}"
    source = path.read_text()
    break_promise(promise, repository)
    try:
        return outcome_of(promise.tests.split(), repository)
    finally:
        path.write_text(source)


def page() -> str:
    """Return the page of promises: promise, the function that keeps it, what fails."""
    lines = [
        "# Promises and their tests",
        "",
        "<!-- generated by: python -m tests.promises --page -->",
        "`python -m tests.promises` breaks one of these functions after the other in a copy of the",
        "repository; each time, one of the tests next to it must fail.",
        "",
        "| promise | kept by, among others | fails if it is broken |",
        "|---|---|---|",
    ]
    for kept, promises in groupby(PROMISES, key=lambda promise: promise.kept):
        for number, promise in enumerate(promises):
            tests = ", ".join(f"`{test.removeprefix('tests/')}`" for test in promise.tests.split())
            lines.append(f"| {kept if number == 0 else ''} | `{promise.function}` | {tests} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="a part of the names of functions")
    parser.add_argument("--log", type=Path, help="the results, one line each; continues after them")
    parser.add_argument("--page", action="store_true", help="print the page of promises")
    options = parser.parse_args()
    if options.page:
        print(page(), end="")
        return
    done = options.log.read_text().splitlines() if options.log and options.log.exists() else []
    outcomes = dict(line.split(": ", 1) for line in done)
    with tempfile.TemporaryDirectory() as name:
        copy_repository(Path(name))
        for promise in PROMISES:
            if options.only not in promise.function or promise.function in outcomes:
                continue
            outcomes[promise.function] = try_promise(promise, Path(name))
            line = f"{promise.function}: {outcomes[promise.function]}"
            print(line, flush=True)
            if options.log:
                with options.log.open("a") as log:
                    log.write(line + "\n")
    wrong = [name for name, result in outcomes.items() if result != "red"]
    print(f"{len(outcomes) - len(wrong)} of {len(outcomes)} mistakes are seen")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
