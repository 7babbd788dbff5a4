"""A run folder that somebody else has filled with traps: every command that looks ends in one line,
and only looks."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accel_trainer.cli.flags.parser import save_config
from accel_trainer.cli.runs import run_reader
from accel_trainer.cli.runs.run_reader import read_run
from accel_trainer.cli.runs.status import read_status
from accel_trainer.core.batch_plan import BatchConfig
from accel_trainer.core.run_dir import is_locked, run_lock
from recipes import cifar
from tests import processes
from tests.cli.conftest import run_command
from tests.faults.mutations import rehash
from tests.faults.tiny_run import best_at, make, name_at, pieces_at, position_at

Trap = Callable[[Path], object]

_LIMIT_S = 60  # of a look that waits for a pipe or reads a file without end
_SECRET = "what-lies-elsewhere"
FILES = (
    "attempts.jsonl",
    "config.yaml",
    "environment.json",
    "metrics.jsonl",
    "result.json",
    "run.lock",
    "status.json",
)
ROW = {"event": "eval", "optimizer_step": 1, "epoch": 1, "eval/accuracy": 0.5}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run, as one of ours leaves it."""
    run = tmp_path_factory.mktemp("whole") / "run"
    run.mkdir()
    config = cifar.Config(batch=BatchConfig(global_batch_size=128))  # as a run fills it in
    (run / "config.yaml").write_text(save_config(config))
    (run / "status.json").write_text(json.dumps({"state": "running", "exit_code": None}))
    (run / "environment.json").write_text("{}")
    (run / "result.json").write_text(json.dumps({"state": "done", "metrics": {}}))
    for name in ("attempts.jsonl", "metrics.jsonl", "run.lock"):
        (run / name).touch()
    checkpointer = make(run / "checkpoints")
    for step in (1, 2):
        checkpointer.save(position_at(step), pieces_at(step), best=best_at(step))
    checkpointer.close()
    return run


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    def fail(*unused: object) -> None:
        raise AssertionError(f"it took more than {_LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(_LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def looks(run: Path, elsewhere: Path) -> dict[str, list[object]]:
    """Return the commands that only look, by name."""
    return {
        "report": ["report", run, "--to", elsewhere / "page.html"],
        "at": ["at", run, "--step", "1", "--to", elsewhere / "at"],
        "why": ["why", run, run],
        "runs": ["runs", run.parent],
        "inspect": ["inspect", run],
        "status": ["status", run],
        "plan": [
            "plan",
            "recipes/cifar.py",
            "--config",
            run / "config.yaml",
            "--num-samples",
            "1000",
        ],
        "doctor": ["doctor", run],
    }


def listing(folder: Path) -> dict[str, tuple[int, int, int]]:
    found = {str(path): path.lstat() for path in [folder, *folder.rglob("*")]}
    return {
        name: (status.st_mtime_ns, status.st_size, stat.S_IFMT(status.st_mode))
        for name, status in found.items()
    }


def put(name: str, data: bytes | str) -> Trap:
    """A file with this in it."""
    content = data if isinstance(data, bytes) else data.encode()
    return lambda run: (run / name).write_bytes(content)


def sparse(name: str, start: bytes = b"") -> Trap:
    """A file of a terabyte that takes no room."""

    def set_up(run: Path) -> None:
        (run / name).write_bytes(start)
        os.truncate(run / name, 2**40)

    return set_up


def fifo(name: str) -> Trap:
    def set_up(run: Path) -> None:
        (run / name).unlink()
        os.mkfifo(run / name)

    return set_up


def link(name: str, target: str) -> Trap:
    def set_up(run: Path) -> None:
        if (run / name).is_dir():
            shutil.rmtree(run / name)
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(target.format(run=run))

    return set_up


def sparse_checkpoint(run: Path) -> None:
    """Weights of a terabyte, to which size and hash of the manifest agree as far as anyone can tell
    unread."""
    folder = run / "checkpoints" / name_at(2)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}

    def enlarge(manifest: dict[str, object]) -> None:
        manifest["files"]["model.safetensors"]["bytes"] = 2**40  # type: ignore[index]

    rehash(files, enlarge)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    os.truncate(folder / "model.safetensors", 2**40)


def forged_optimizer(run: Path) -> None:
    folder = run / "checkpoints" / name_at(2)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files["optimizer.json"] = json.dumps(
        ["not", "an", "optimizer", {"$tensor": "optimizer.state[0].momentum_buffer"}]
    ).encode()
    rehash(files)
    for name, data in files.items():
        (folder / name).write_bytes(data)


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(20)
)
DEEP = "[" * 100_000
ODD = [
    "[]",
    "5",
    "null",
    '"x"',
    "",
    "\xff",
    "{",
    DEEP,
    "9" * 10_000,
    '{"state": 5, "exit_code": "x"}',
    '{"state": "done", "metrics": 5, "best": [], "optimizer_step": "x", "wall_s": {}}',
    '{"best": {"metric": []}}',
    '{"metrics": {"eval/confusion_matrix": 5}}',
    '{"state": "running", "exit_code": true, "error": {}}',
]
ODD_ROWS = [
    "5",
    "[]",
    '{"event": 5}',
    '{"event": "eval"}',
    DEEP,
    '{"event": "eval", "optimizer_step": -1, "epoch": 1}',
]
ODD_CONFIGS = [
    "trainer: 5",
    "trainer: {monitor: [], num_epochs: {}}",
    "dataset: [1]",
    "seed: x",
    "run: []",
    "? [a]\n: b",
    DEEP,
    "seed: 1\nseed: 2",
    "x: " + "9" * 5000,
    "x: " + "1:" * 100_000 + "1",
    "x: 2020-13-45",
    "!!python/object:os.x {}",
    "batch: {global_batch_size: x}",
    "augment: {crop_mode: unknown}\nschedule: {shape: unknown}\nmodel: {name: x}",
]
TRAPS: dict[str, Trap] = {
    "nothing odd": lambda run: None,
    **{f"fifo {name}": fifo(name) for name in FILES},
    **{f"link {name}": link(name, "{run}/../secret") for name in FILES},
    "link checkpoints to /": link("checkpoints", "/"),
    "link checkpoints to itself": link("checkpoints", "checkpoints"),
    "link export": link("export", "{run}/../elsewhere"),
    "link logs": link("logs", "/"),
    "alias bomb": put("config.yaml", BOMB),
    **{f"config {text[:20]!r}": put("config.yaml", text) for text in ODD_CONFIGS},
    **{f"result {text[:20]!r}": put("result.json", text) for text in ODD},
    "half a character": put("environment.json", json.dumps({"packages": {"\ud800": "\ud800"}})),
    "a best without a name": put("result.json", json.dumps({"best": {"metric": {}}})),
    **{f"status {text[:20]!r}": put("status.json", text) for text in ODD},
    **{f"environment {text[:20]!r}": put("environment.json", text) for text in ODD[:4]},
    **{f"row {text[:20]!r}": put("metrics.jsonl", text + "\n") for text in ODD_ROWS},
    **{f"attempt {text[:20]!r}": put("attempts.jsonl", text + "\n") for text in ODD_ROWS},
    **{f"sparse {name}": sparse(name) for name in FILES},
    "sparse checkpoint": sparse_checkpoint,
    "forged optimizer": forged_optimizer,
    "fifo in a checkpoint": fifo(f"checkpoints/{name_at(2)}/manifest.json"),
    "values of no use": put(
        "metrics.jsonl", json.dumps({**ROW, "eval/accuracy": "x", "eval/a$b$": 1, "y": []}) + "\n"
    ),
}


# The others vary the file or its content.
FEW = (
    "nothing odd",
    "fifo status.json",
    "link metrics.jsonl",
    "link checkpoints to /",
    "alias bomb",
    "row '5'",
    "half a character",
    "a best without a name",
    "sparse config.yaml",
    "sparse checkpoint",
    "forged optimizer",
    "values of no use",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in TRAPS]
)
def test_a_look_at_a_strangers_folder_is_one_line_and_changes_nothing(
    name: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jinja2")
    there, elsewhere = tmp_path / "there", tmp_path / "elsewhere"
    there.mkdir()
    elsewhere.mkdir()
    (there / "secret").write_text(f"{_SECRET}: 1\n")
    run = there / "run of $two$ dollars"
    shutil.copytree(whole, run)
    TRAPS[name](run)
    before = listing(there)
    problems = []
    for command, argv in looks(run, elsewhere).items():
        code, out, err = run_command(capsys, argv)
        if command == "runs":  # a table names each run that is not in it
            err = re.sub(r"^left out: .*\n", "", err)
        says_on_stdout = command in ("doctor", "inspect") and not err
        is_sound = code in (0, 64, 65, 73, 74) and err.count("\n") <= 1 and len(err) < 1000
        # a plan reads the very file that it is given
        is_sound &= command == "plan" or _SECRET not in out + err
        if code and not says_on_stdout:
            is_sound &= err.startswith("accel_trainer: error[")
        # No attempt of the small run has ended, which doctor takes for a kill.
        is_wrong = code and name == "nothing odd" and command != "doctor"
        if not is_sound or listing(there) != before or is_wrong:
            problems.append((command, code, out[-300:], err[-500:]))
    assert not problems


def test_checking_whether_a_run_is_alive_never_blocks_a_start(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    with run_lock(run / "run.lock"):
        processes.run(look_at_a_run_that_is_alive, run, folder=tmp_path / "logs")
    assert "state: killed" in run_command(capsys, ["status", run])[1]
    assert run_command(capsys, ["status", run, "--exit-code"])[0] == 70


def look_at_a_run_that_is_alive(run: Path) -> None:
    assert read_status(run)["state"] == "running"
    assert is_locked(run / "run.lock")


def test_metrics_of_any_length_are_read_line_by_line_into_little_memory(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    monkeypatch.setattr(run_reader, "_MAX_ROWS", 100)
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 10_001):
            file.write(
                json.dumps(
                    {"event": "train", "optimizer_step": step, "epoch": 1, "train/loss": step}
                )
                + "\n"
            )
            if step % 1000 == 0:
                file.write(json.dumps({**ROW, "optimizer_step": step, "eval/loss": "nan"}) + "\n")
    reader = read_run(run)
    assert 50 <= len(reader.rows) - 10 <= 101
    steps = [row["optimizer_step"] for row in reader.rows if row["event"] == "train"]
    assert (steps, steps[0], steps[-1]) == (sorted(steps), 1, 10_000)
    assert [row["optimizer_step"] for row in reader.evaluations()] == list(
        range(1000, 10_001, 1000)
    )


def test_the_best_of_any_number_of_evaluations_is_kept(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    monkeypatch.setattr(run_reader, "_MAX_ROWS", 100)
    (run / "result.json").unlink()
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 1001):
            row = {**ROW, "optimizer_step": step, "eval/accuracy": float(step == 778)}
            file.write(json.dumps(row) + "\n")
    reader = read_run(run)
    assert reader.best_evaluation()["optimizer_step"] == 778
    assert reader.rows[-1]["optimizer_step"] == 1000
