"""Which file is run when a run is trained again: the user's own, and a stranger's only by name."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from accel_trainer import RecipeConfig
from accel_trainer.cli.common.unknown_recipe import UnknownRecipeError
from accel_trainer.cli.main import find_commands
from accel_trainer.cli.runs.recorded_start import NOT_FROM_THE_RUN, recorded_recipes
from accel_trainer.cli.runs.run_reader import read_run
from accel_trainer.core.config import config_values
from accel_trainer.core.errors import OutputError
from accel_trainer.run.known_recipes import remember_start, started_folder
from recipes import cifar, images
from tests.cli.conftest import run_command
from tests.docs.commands import command_help
from tests.lab.replay.conftest import NAMED, RECIPE

ID = "0123456789abcdef" * 2
EVIL = "import pathlib\npathlib.Path({ran!r}).touch()\nraise SystemExit(65)\n"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project that the user is in: a recipe, and an archive of a stranger."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    # The workers of xdist have no file, as a notebook has none. A process that is started from here
    # runs it.
    empty = str(Path(__file__).with_name("__init__.py"))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", empty, raising=False)
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    (project / "mine.py").write_text("raise SystemExit(5)\n")
    (project / "sent" / "b").mkdir(parents=True)
    (project / "sent" / "b" / "recipe.py").write_text(EVIL.format(ran=str(tmp_path / "ran")))
    return project


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_run(folder: Path, recipe: object, name: object = ID, sha256: str | None = None) -> Path:
    """A run folder as far as it says what started it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("seed: 1\n")
    code = {"recipe": str(recipe), "sha256": sha256, "git_commit": None}
    recorded = {"id": name, "code": code, "command": {"arguments": [str(recipe)]}}
    (folder / "environment.json").write_text(json.dumps(recorded))
    return folder


def started_here(project: Path) -> Path:
    """A run that the user has started with `mine.py`."""
    mine = project / "mine.py"
    run = make_run(project / "runs" / "own", mine, sha256=sha256_of(mine))
    remember_start(json.loads((run / "environment.json").read_text()))
    return run


def chosen_for(*runs: Path) -> list[Path]:
    return recorded_recipes([read_run(run) for run in runs], [None] * len(runs))


def test_a_run_that_the_user_started_needs_no_recipe(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started_here(home)
    assert (started_folder().stat().st_mode & 0o777) == 0o700
    assert ((started_folder() / f"{ID}.json").stat().st_mode & 0o777) == 0o600
    monkeypatch.chdir("/")  # the folder that one is in decides nothing
    assert chosen_for(run) == [home / "mine.py"]
    assert capsys.readouterr().err == ""
    copy = shutil.copytree(run, home / "copy")
    assert chosen_for(run, copy) == [home / "mine.py"] * 2
    (home / "mine.py").write_text("changed\n")
    assert chosen_for(run) == [home / "mine.py"]
    assert "mine.py has changed since the run" in capsys.readouterr().err


def test_no_way_to_name_a_recipe_or_an_id_runs_a_strangers_file(home: Path) -> None:
    """Each spelling of the file beside the run, with each id that a stranger may give.

    Fault (Malice): a run refers to somebody else's recipe, in any spelling, with a forged id or the
    id of one of your runs -> no command runs it; each ends with exit code 64 and the command to
    copy. Without `--recipe`, a command only runs the recipe with which you started that run on this
    machine, and prints its path first
    """
    started_here(home)
    evil = home / "sent" / "b" / "recipe.py"
    link, folder = home / "link.py", home / "folder"
    link.symlink_to(evil)
    folder.symlink_to(evil.parent)
    spellings = [
        evil,
        "/proc/self/cwd/sent/b/recipe.py",
        home / "sent" / "a" / ".." / "b" / "recipe.py",
        home / "runs" / ".." / "sent" / "b" / "recipe.py",
        f"//{evil}",
        link,
        folder / "recipe.py",
        "sent/b/recipe.py",
        "../b/recipe.py",
        "~/recipe.py",
        home / "mine.py" / ".." / "sent" / "b" / "recipe.py",
        f"{home / 'mine.py'}\0",
    ]
    entry = json.dumps({"recipe": str(evil), "sha256": sha256_of(evil)})
    forged = home / "sent" / "forged.json"
    forged.write_text(entry)
    forged.chmod(0o600)
    ids = [
        None,
        "",
        ID,
        "f" * 32,
        ID.upper(),
        f"{ID}\n",
        str(forged.with_suffix("")),
        os.path.relpath(forged.with_suffix(""), started_folder()),
        "/proc/self/cwd/sent/forged",
        [ID],
        {"id": ID},
        5,
    ]
    ran = []
    for spelled, name in itertools.product(spellings, ids):
        run = make_run(home / "sent" / "a", spelled, name, sha256_of(evil))
        with suppress(UnknownRecipeError, OutputError):
            ran.append((spelled, name, chosen_for(run)))
    assert ran == []


def no_change(entry: Path) -> None:
    """An entry as a start leaves it."""


def of_another_user(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, 12345, -1)


def linked(path: Path) -> None:
    place = path.rename(path.with_name("elsewhere"))
    path.symlink_to(place)


def write(text: str) -> Callable[[Path], object]:
    return lambda entry: entry.write_text(text)


SPOILED: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "a folder that the group can read": lambda entry: entry.parent.chmod(0o750),
    "a folder that all can write": lambda entry: entry.parent.chmod(0o777),
    "an entry that others can read": lambda entry: entry.chmod(0o644),
    "an entry that the group can write": lambda entry: entry.chmod(0o660),
    "an entry of another user": of_another_user,
    "a folder of another user": lambda entry: of_another_user(entry.parent),
    "a link to the entry": linked,
    "a link to the folder": lambda entry: linked(entry.parent),
    "a pipe": lambda entry: (entry.unlink(), os.mkfifo(entry, 0o600)),
    "a folder in its place": lambda entry: (entry.unlink(), entry.mkdir(0o600)),
    **{f"{text!r}": write(text) for text in ("", "{", "[]", "{}", '{"recipe": 5}', "\xff")},
    "the recipe of another run": write(json.dumps({"recipe": "/x.py", "sha256": "0"})),
}


@pytest.mark.parametrize("name", SPOILED)
def test_an_entry_that_others_could_have_written_is_none(home: Path, name: str) -> None:
    run = started_here(home)
    SPOILED[name](started_folder() / f"{ID}.json")
    with pytest.raises(UnknownRecipeError) as refused:
        chosen_for(run)
    assert refused.value.message.endswith(f": --recipe {home / 'mine.py'}")
    assert str(run) in refused.value.message


def test_a_recipe_that_became_a_link_is_not_the_one_that_was_started(home: Path) -> None:
    run = started_here(home)
    (home / "mine.py").unlink()
    (home / "mine.py").symlink_to(home / "sent" / "b" / "recipe.py")
    with pytest.raises(UnknownRecipeError):
        chosen_for(run)
    assert recorded_recipes([read_run(run)], [Path("mine.py")]) == [
        home / "sent" / "b" / "recipe.py"
    ]


@pytest.mark.parametrize("named", ["", "state", "./state"])
def test_a_state_folder_that_is_not_absolute_is_that_of_the_home_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", named)
    monkeypatch.setenv("HOME", str(home / "at home"))
    run = started_here(home)
    assert started_folder() == home / "at home" / ".local" / "state" / "accel_trainer" / "started"
    assert chosen_for(run) == [home / "mine.py"]


def test_a_list_that_cannot_be_written_stops_no_run(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "file").touch()
    for place in (home / "file", Path("/proc/none"), Path("/dev/full")):
        monkeypatch.setenv("XDG_STATE_HOME", str(place))
        run = started_here(home)
        with pytest.raises(UnknownRecipeError):
            chosen_for(run)


def test_the_list_keeps_the_newest_10_000_starts(home: Path) -> None:
    started_here(home)
    folder = started_folder()
    for number in range(10_002):
        path = folder / f"{number:032x}.json"
        path.touch()
        os.utime(path, ns=(number, number))
    started_here(home)
    names = {path.name for path in folder.iterdir()}
    assert len(names) == 10_000
    assert f"{ID}.json" in names
    assert f"{2:032x}.json" not in names
    assert f"{3:032x}.json" in names


def test_each_start_has_an_id_of_its_own(poisoned: Path) -> None:
    environment = json.loads((poisoned / "environment.json").read_text())
    assert len(environment["id"]) == 32
    assert environment["id"] != ID


# --- the commands ---

# What each command that trains a run again is given, in an archive of three runs.
COMMANDS = {
    "why": "why sent/a",
    "why (two)": "why sent/a sent/c",
    "at": "at sent/a --step 3 --to x3",
    "rerun": "rerun sent/a",
    "replay": "replay sent/a --step 2",
    "bisect": "bisect sent/a --where train/loss>0 --every-step",
    "finish": "finish sent/d --at 3",
    "probe": "probe sent/a callbacks.py",
}


def test_every_command_that_trains_a_run_again_is_tried_below() -> None:
    takes_one = {name for name in find_commands() if "--recipe" in command_help(name)}
    assert takes_one == {name.partition(" ")[0] for name in COMMANDS}


def test_no_command_runs_a_strangers_recipe_and_each_says_how_to(
    poisoned: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "callbacks.py").write_text(
        "from accel_trainer import Callback\n\n\nclass Mine(Callback):\n    pass\n"
    )
    evil = home / "sent" / "b" / "recipe.py"
    for name in "acd":
        run = shutil.copytree(poisoned, home / "sent" / name)
        path = run / "environment.json"
        environment = json.loads(path.read_text())
        recipe = f"/proc/self/cwd/{evil.relative_to(home)}"
        environment["code"] = {"recipe": recipe, "sha256": sha256_of(evil)}
        path.write_text(json.dumps(environment))
    changes = (
        ("c/config.yaml", "seed: 0", "seed: 1"),
        ("c/metrics.jsonl", "1", "2"),
        ("d/config.yaml", "shape: cosine", "shape: trunk"),
    )
    for name, old, new in changes:
        path = home / "sent" / name
        path.write_text(path.read_text().replace(old, new))
    before = {*home.rglob("*")}
    for words in COMMANDS.values():
        code, out, err = run_command(capsys, words.split())
        assert code == 64, (words, code, out, err)
        last = err.splitlines()[-1]
        assert last.endswith(f": accel-trainer {shlex.join(words.split())} --recipe {evil}"), (
            words,
            err,
        )
        assert not (tmp_path / "ran").exists(), words
    assert {*home.rglob("*")} == before


@pytest.mark.usefixtures("python_is_forked")
def test_what_only_the_user_decides_is_reset_also_for_an_own_run(
    poisoned: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault (Malice): a run of somebody else's: its config sets folders or trackers ->
    these settings are reset when the run is trained again
    """
    run = shutil.copytree(poisoned, tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    elsewhere = tmp_path / "elsewhere"
    config["run"] |= {
        "cache_dir": str(elsewhere / "cache"),
        "runs_dir": str(elsewhere / "runs"),
        "track": ["tensorboard", "wandb"],
        **dict.fromkeys(("onnx", "shared", "dry_run"), True),
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    recipe = ["--recipe", RECIPE]
    code, _, err = run_command(capsys, ["at", run, "--step", 3, "--to", home / "at", *recipe])
    assert (code, err.endswith(NAMED)) == (0, True), err
    made = yaml.safe_load((home / "at" / "config.yaml").read_text())
    defaults = config_values(RecipeConfig())
    for name in NOT_FROM_THE_RUN:
        assert made["run"][name.removeprefix("run.")] == plain(defaults[name]), name
    assert not elsewhere.exists()


def plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


# --- settings ---

# What a recorded config may decide although it is text. All other settings outside `run` are
# numbers, choices and switches of the training itself.
READ_AS_DATA = {
    "run.init_from": "weights, of which only numbers are read",
    "run.resume": "a checkpoint, of which only data is read",
    "batch.leave_out": "numbers of samples",
    "dataset": "what is trained on",
}
OF_THE_COMMAND = {
    "run.output_dir": "each command gives its own",
    "run.lock": "whether a folder without locks is refused",
    "run.quiet": "what is printed",
    "run.debug": "what is printed",
    "run.copy_recipe": "a file in the new folder",
    "run.allow_change": "names of settings",
    "run.init_skip": "names of tensors",
}
OF_THE_TRAINING = {
    "trainer.evaluate_every": "an interval",
    "trainer.monitor": "the name of a metric",
    "optimizer.name": "a class of torch or of this package",
    "optimizer.learning_rate_scales": "names of parameters, and numbers",
    "optimizer.weight_decays": "names of parameters, and numbers",
    "optimizer.freeze": "names of parameters",
    "model.name": "a class of this package or of timm",
    "model.keywords": "keywords of a timm model, not those with which it reads files",
    "photos.image_column": "the name of a column",
    "photos.label_column": "the name of a column",
}


def settings_of(config_class: Any, prefix: str = "") -> dict[str, Any]:
    """The type of each setting by its dotted name."""
    hints = get_type_hints(config_class)
    found: dict[str, Any] = {}
    for field in fields(config_class):
        kind = hints[field.name]
        if is_dataclass(kind):
            found |= settings_of(kind, f"{prefix}{field.name}.")
        else:
            found[f"{prefix}{field.name}"] = kind
    return found


@pytest.mark.parametrize("config_class", [RecipeConfig, cifar.Config, images.Config])
def test_each_setting_that_reaches_outside_of_the_run_is_classified(config_class: Any) -> None:
    known = {*NOT_FROM_THE_RUN, *READ_AS_DATA, *OF_THE_COMMAND, *OF_THE_TRAINING}
    settings = settings_of(config_class)
    assert settings.keys() == config_values(config_class()).keys()
    unclassified = [
        name
        for name, kind in settings.items()
        if (name.startswith("run.") or holds_text(kind)) and name not in known
    ]
    assert unclassified == []


def holds_text(kind: object) -> bool:
    """Whether a setting can name a path or an address."""
    return kind in (str, Path) or any(map(holds_text, get_args(kind)))
