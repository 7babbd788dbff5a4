"""`accel-trainer chaos --script` on small programs: what they do wrong when they resume is seen."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from accel_trainer import ConfigError
from accel_trainer.core.filesystem import write_file_atomic
from accel_trainer.lab.chaos import script
from accel_trainer.lab.chaos.outputs import differences
from accel_trainer.lab.chaos.script import Kill, Script, Trial, draw_kills, run_script
from tests.cli.conftest import run_command
from tests.faults.signals import is_alive

PROGRAM = Path(__file__).with_name("any_script.py")
# without site-packages, which it does not use
COMMAND = shlex.join([sys.executable, "-I", "-S", str(PROGRAM)]) + " {out}"
FILES = "{out}/*.json"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes")


@pytest.fixture(autouse=True)
def counted_saves(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Tell the program how many of its saves were counted, unless it is to be killed after them."""
    told = tmp_path_factory.mktemp("told") / "counted"
    begin, update = script._Saves.__init__, script._Saves.update

    def begin_again(self: script._Saves, *arguments: Any) -> None:
        begin(self, *arguments)
        write_file_atomic(told, b"0")

    def tell_and_update(self: script._Saves) -> None:
        write_file_atomic(told, b"%d" % self.count)
        update(self)

    monkeypatch.setattr(script._Saves, "__init__", begin_again)
    monkeypatch.setattr(script._Saves, "update", tell_and_update)
    monkeypatch.setenv("COUNTED", str(told))


def words(wrong: str, *options: str) -> list[str]:
    program = ("--script", f"{COMMAND} --wrong {wrong}", "--resume=--resume {newest}")
    return ["chaos", *program, "--saves", FILES, "--compare", FILES, "--runs", "1", *options]


def chaos(capsys: pytest.CaptureFixture[str], wrong: str) -> tuple[int, dict[str, Any]]:
    code, out, err = run_command(capsys, words(wrong, "--json"))
    assert err == ""
    return code, json.loads(out)


def test_a_program_that_resumes_right_survives_two_kills_in_one_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, found = chaos(capsys, "nothing")
    assert (code, found["survived"]) == (0, True), found
    assert [len(run["kills"]) for run in found["runs"]] == [0, 2]
    assert found["runs"][1]["resumed"] == [False, True, True]


@pytest.mark.slow
def test_what_is_wrong_only_after_the_second_resume_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, found = chaos(capsys, "counter")
    assert (code, found["survived"], found["survives_one_kill"]) == (1, False, True)


WRONG = {"loader": "weight", "schedule": "weight", "average": "average"}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_resume_forgets_is_seen(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = chaos(capsys, wrong)
    assert (code, found["survives_one_kill"]) == (1, False)
    assert found["runs"][-1]["differences"] == [f"last.json: value.{WRONG[wrong]}"]


def test_a_program_that_does_not_repeat_itself_is_not_killed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, found = chaos(capsys, "seed")
    assert (code, [run["outcome"] for run in found["runs"]]) == (1, ["DIFFERENT"])


def test_a_resume_that_fails_is_shown_with_what_it_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, found = chaos(capsys, "fails")
    assert (code, found["runs"][1]["outcome"]) == (1, "FAILED")
    assert "no such checkpoint" in found["runs"][1]["problem"]


def test_an_interrupt_ends_the_program_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("INTERRUPTED", str(os.getpid()))
    code, _, err = run_command(capsys, words("interrupt"))
    assert (code, err) == (130, "accel_trainer: interrupted\n")
    assert list(tmp_path.iterdir()) == []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended, or is a zombie
            assert str(PROGRAM) not in child.cmdline()


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        ([], 64, "give either the path of a recipe, or a command with --script"),
        ([PROGRAM, "--resume", "a"], 64, "--resume has no effect without --script"),
        (["--script", "a {out}", "--steps", "8"], 64, "--steps has no effect without a recipe"),
        (["--script", "train.py"], 64, "does not contain {out}"),
        (["--script", "train.py '{out}"], 64, "No closing quotation"),
        (["--script", "no-such-program {out}"], 64, "no-such-program"),
        (["--script", "true {out}"], 64, "matches --compare"),
        (["--script", "touch {out}/a.pt"], 64, "matches --saves"),
    ],
)
def test_a_wrong_command_is_one_line(
    options: Sequence[object], code: int, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, err = run_command(capsys, ["chaos", *options])
    assert (found, out, len(err.splitlines())) == (code, "", 1), err
    assert named in err


def test_a_program_that_fails_by_itself_has_its_own_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run_command(capsys, ["chaos", "--script", "sh -c 'echo {out} gone; exit 7'"])
    assert code == 7
    assert "gone" in out


def test_files_are_compared_by_parts_the_earliest_first(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    numbers = torch.arange(4.0)
    for folder, change in ((one, 0.0), (other, 1.0)):
        folder.mkdir()
        save_file({"a": numbers, "b": numbers + change}, folder / "model.safetensors")
        torch.save(
            {"step": 3 + change, "sum": [numbers, numbers + change]}, folder / "optimizer.pt"
        )
        torch.save({"step": 3 + change}, folder / "scheduler.pt")
        (folder / "cut.safetensors").write_bytes(b"8" + bytes(int(change)))
        order = {"b": 1, "a": 2} if change else {"a": 2, "b": 1}
        (folder / "same.json").write_text(json.dumps(order))
    (one / "gone.pt").touch()
    (other / "new.pt").touch()
    files = [{path.name: path for path in folder.iterdir()} for folder in (one, other)]
    for path in chain.from_iterable(map(Path.iterdir, (one, other))):
        os.utime(path, (5, 5))
    os.utime(one / "optimizer.pt", (4, 4))
    assert differences(*files) == [
        "optimizer.pt: tensor 1",
        "cut.safetensors: its bytes",
        "gone.pt: only in the first run",
        "model.safetensors: b",
        "new.pt: not in the first run",
        "scheduler.pt: the values beside its tensors",
    ]


def test_a_checkpoint_that_a_kill_cut_off_is_not_resumed(tmp_path: Path) -> None:
    program = """
import os, sys, time
out, late, *resumed = sys.argv[1:]
if resumed:
    raise SystemExit(os.path.basename(resumed[0]))
for name in ("step_1", "step_2"):
    os.mkdir(f"{out}/{name}")
    open(f"{out}/{name}/model", "w").write("whole")
    if late == "no" or name == "step_1":
        open(f"{out}/{name}/optimizer", "w").write("whole")
while late != "no":
    if late == "empty":
        open(f"{out}/step_2/optimizer", "w").close()
    time.sleep(0.01)
"""
    whole = None
    for late in ("no", "empty", "missing"):
        first = [sys.executable, "-I", "-S", "-c", program, "{out}", late]
        cut_off = Script(first, ["{newest}"], ["{out}/step_*"], tmp_path)
        kills = [Kill(seconds=1 + 10 * whole.seconds)] if whole else []
        trial = run_script(cut_off, kills, name=late, stops=[], whole=whole)
        whole = whole or trial
        assert trial.resumed == [False, True][: 1 + len(kills)]
        assert not kills or str(trial.problem).endswith(": step_1"), late


def test_kills_come_after_saves_and_at_moments_in_turn() -> None:
    reference = Trial((), Path(), num_saves=9, seconds=50)
    plans = draw_kills(40, reference, seed=3)
    assert plans == draw_kills(40, reference, seed=3)
    assert plans != draw_kills(40, reference, seed=4)
    for after_saves, at_moments in zip(plans[::2], plans[1::2], strict=True):
        assert all(kill.saves for kill in after_saves)
        assert sum(kill.saves for kill in after_saves) < 9
        assert not any(kill.saves for kill in at_moments)
        assert sum(kill.seconds for kill in at_moments) < 50
    assert str(Kill(saves=2)) == "after save 2"


# --- programs that change their folder while it is watched ---

KEEPS_ONE = """
import os, pathlib, shutil, sys, time
out = pathlib.Path(sys.argv[1])
begin = time.monotonic()
for n in range(10**6):
    for shard in range(30):
        (out / f"step_{n}.tmp" / "deep" / str(shard)).mkdir(parents=True)
        (out / f"step_{n}.tmp" / "deep" / str(shard) / "a.pt").write_text("x")
    (out / f"step_{n}.tmp").rename(out / f"step_{n}")
    for old in os.listdir(out):
        if old.startswith("step_") and old != f"step_{n}":
            shutil.rmtree(out / old)
    if time.monotonic() - begin > 1.5:
        break
(out / "final.pt").write_text("done")
time.sleep(0.3)
"""
DETACHES = """
import os, pathlib, sys, time
out = pathlib.Path(sys.argv[1])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        pathlib.Path(sys.argv[2]).write_text(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
os.wait()
other = pathlib.Path(sys.argv[2])
while not (other.exists() and other.read_text()):
    time.sleep(0.01)
(out / "final.pt").write_text("done")
"""
LINKS = """
import os, sys
os.rmdir(sys.argv[1])
os.mkdir(sys.argv[2])
os.symlink(sys.argv[2], sys.argv[1])
"""


def watch(source: str, folder: Path) -> Trial:
    command = [sys.executable, "-I", "-S", "-c", source, "{out}", str(folder / "other")]
    watched = Script(command, (), ["{out}/step_*"], folder)
    return run_script(watched, (), name="reference", stops=())


def test_a_program_may_delete_its_checkpoints_while_it_is_watched(tmp_path: Path) -> None:
    assert watch(KEEPS_ONE, tmp_path).problem is None


def test_a_process_that_has_detached_itself_is_not_left_running(tmp_path: Path) -> None:
    assert watch(DETACHES, tmp_path).problem is None
    pid = int((tmp_path / "other").read_text())
    assert not is_alive(pid)


def test_a_link_in_place_of_the_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="removed the folder {out}, or put a link in its place"):
        watch(LINKS, tmp_path)
    assert (tmp_path / "other").is_dir()
