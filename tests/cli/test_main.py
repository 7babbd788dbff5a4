from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from accel_trainer.cli.main import find_commands, grouped, main
from accel_trainer.core.errors import ExitCode


def test_without_a_command_each_is_listed_once_with_its_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    bare = capsys.readouterr().out
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert shown == bare
    lines = [line.split() for line in shown.splitlines() if line.startswith("  ")]
    names = [words[0] for words in lines if words[0] in find_commands()]
    assert sorted(names) == list(find_commands())
    for name, (_, _, text) in find_commands().items():
        assert f"{name} {text}" in " ".join(shown.split()), "no sentence is cut"


def test_a_command_in_no_group_is_listed_under_debugging() -> None:
    groups = grouped([*find_commands(), "brand-new"])
    (debugging,) = (names for group, names in groups.items() if group.startswith("Debug"))
    assert "brand-new" in debugging
    assert set().union(*groups.values()) == {*find_commands(), "brand-new"}, "no group is outdated"


def test_a_run_in_the_place_of_a_recipe_or_of_photos_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, photos = tmp_path / "run", tmp_path / "photos"
    (run / "export").mkdir(parents=True)
    photos.mkdir()
    (run / "config.yaml").touch()
    for words, fact in (
        (["compare", str(run), str(run)], "for two runs: accel-trainer report"),
        (["predict", str(photos), str(run)], "run is a run: give it first"),
    ):
        assert main(words) == ExitCode.USAGE
        assert fact in capsys.readouterr().err


def test_what_only_reads_runs_imports_no_torch(runs: Path) -> None:
    probe = f"""if True:
        import sys
        from accel_trainer.cli.main import main
        for words in (["--help"], ["runs", {str(runs)!r}], ["status", {str(runs / "fast")!r}]):
            main(words)
            print([name for name in ("torch", "accelerate", "numpy") if name in sys.modules])
    """
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert [line for line in run.stdout.splitlines() if line[:1] == "["] == ["[]"] * 3


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("inspct", "did you mean inspect?"),
        ("lunch", "did you mean launch?"),
        ("zzz", "choose one of "),
    ],
)
def test_an_unknown_command_is_one_line_that_names_the_nearest(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([typed]) == 64
    error = capsys.readouterr().err
    assert error.startswith(f"accel_trainer: error[USAGE]: {typed!r} is not a command: {said}")
    assert error.count("\n") == 1


@pytest.mark.usefixtures("python_is_forked")
def test_only_the_command_that_is_called_is_imported() -> None:
    probe = (
        "import sys; from accel_trainer.cli.main import main; main(['status', '/nowhere'])\n"
        "print([name for name, module in sys.modules.items() if "
        "name.startswith('accel_trainer.cli.')"
        # The packages of commands are empty, and the package itself exports the command line of
        # recipes.
        " and not hasattr(module, '__path__') and name.split('.')[2] not in ('flags', 'recipe')])"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    loaded = [
        f"accel_trainer.cli.{name}"
        for name in ("common.output", "main", "common.parser", "runs.status")
    ]
    assert run.stdout.strip() == str(loaded)


@pytest.mark.parametrize("name", sorted(find_commands()))
def test_the_help_of_a_command_has_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"accel-trainer {name} " in shown.partition("example")[2]


def test_the_help_of_the_doctor_is_its_own_and_keeps_its_paragraphs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["doctor", "recipes/cifar.py", "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: accel-trainer doctor [RECIPE.py | RUN] [-h] [--json]\n")
    assert "\n\nGiven a run, it explains" in shown
    assert "--dry-run`. To check" in shown, "no line ends within a flag"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["probe", "runs/first"], "required: callbacks: see accel-trainer probe --help"),
        (["plan", "--seconds", "x"], "'x': see accel-trainer plan --help"),
        (["predict", "m", "i", "--top", "0"], "it is 0, and must be 1 or more: see accel-trainer"),
        (["why", "r", "--until", "0"], "--until: it is 0, and must be 1 or more"),
        (["verify", "r", "--tolerance", "-1"], "--tolerance: it is -1, and must be 0 or more"),
        (["verify", "r", "--tolerance", "x"], "--tolerance: invalid float value: 'x'"),
        (["probe", "r", "nope.py"], "nope.py is not a file: give the path of a Python file"),
        (["status", "nope"], "nope is not a run (there is no status.json): give the folder"),
        (["runs", "--sotr", "best"], "unrecognized arguments: --sotr: did you mean --sort?"),
        (
            ["chaos", "--script", "python a.py {out}", "--resume", "--init=resume"],
            "give it; if its value starts with dashes, write --resume=VALUE",
        ),
        (["runs", "--sort", "bset"], "see accel-trainer runs --help"),
        (["replay", "runs/first"], "the following arguments are required: --step"),
        (["sweep", "recipes/minimal.py", "--vlues", "x"], "unknown flag --vlues"),
        (["train"], "run a recipe, such as python recipes/images.py"),
    ],
)
def test_a_misspelt_flag_is_one_line_that_names_the_nearest(
    typed: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    assert main(typed) == 64
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "typed",
    [
        "inspect loop",
        "report loop",
        "sweep recipes/minimal.py --seed 0 1 --output-dir loop",
    ],
)
def test_a_loop_of_links_is_one_line(
    typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    (tmp_path / "loop").symlink_to("loop")
    words = [word if word != "loop" else str(tmp_path / word) for word in typed.split()]
    assert main(words) in (ExitCode.USAGE, ExitCode.OUTPUT, ExitCode.CHECKPOINT)
    assert capsys.readouterr().err.count("\n") == 1


VISION, REPORT = ("pip install 'accel-trainer[vision]'", "pip install 'accel-trainer[report]'")


@pytest.mark.usefixtures("python_is_forked")
@pytest.mark.parametrize(
    ("command", "package", "said"),
    [
        ("data {photos}", "datasets", f"photos need datasets: {VISION}"),
        ("predict {run} {photos}", "PIL", f"this command needs PIL: {VISION}"),
        (
            "lr-find recipes/minimal.py --steps 10",
            "matplotlib",
            f"this command needs matplotlib: {REPORT}",
        ),
    ],
)
def test_a_command_without_its_package_is_one_line_before_any_work(
    command: str, package: str, said: str, runs: Path, tmp_path: Path
) -> None:
    program = (
        "from accel_trainer.cli import lr_find\n"
        "lr_find._measure = None\n"
        "from accel_trainer.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    (tmp_path / "1.jpg").touch()
    words = command.format(photos=tmp_path, run=runs / "fast").split()
    run = without(package, program, words)
    assert (run.returncode, run.stderr) == (64, f"accel_trainer: error[PACKAGE]: {said}\n")


@pytest.mark.usefixtures("python_is_forked")
def test_a_recipe_without_its_package_is_one_line_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    recipe = Path(__file__).parents[2] / "recipes" / "images.py"
    program = f"import runpy\nrunpy.run_path({str(recipe)!r}, run_name='__main__')\n"
    folders = ["--dataset", str(tmp_path / "photos"), "--output-dir", str(tmp_path / "run")]
    run = without("datasets", program, folders)
    said = f"photos need datasets: {VISION}"
    assert (run.returncode, run.stderr) == (64, f"accel_trainer: error[PACKAGE]: {said}\n")
    assert not (tmp_path / "run").exists()


def without(package: str, program: str, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program where a package is not installed."""
    hidden = (
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "def hide(name, *rest):\n"
        f"    return None if name.partition('.')[0] == '{package}' else find(name, *rest)\n"
        "PathFinder.find_spec = staticmethod(hide)\n"
        "for name in [*sys.modules]:  # a forked Python has some already\n"
        f"    if name.partition('.')[0] == '{package}':\n"
        "        del sys.modules[name]\n"
    )
    return subprocess.run(
        [sys.executable, "-c", hidden + program, *words],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.usefixtures("python_is_forked")
def test_the_package_is_a_program_too() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "accel_trainer", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.startswith("usage: accel-trainer COMMAND ...")


@pytest.mark.parametrize(
    ("command", "place"),
    [
        ("data {photos}", "data.describe.examine_photo"),  # in a thread
        ("pack {photos} {new}", "data.pack.reencode"),
        ("report {run}", "report.report.render"),
        ("predict {run} {photos}", "share.predict.read_image"),
        ("evaluate {run}", "share.evaluate.load_eval_data"),
        ("export {run} --to {new}", "share.export.write_card"),
        ("inspect {run}", "runs.inspect.decode_files"),
    ],
)
def test_ctrl_c_ends_a_command_in_one_line(
    command: str,
    place: str,
    photo_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, _, name = f"accel_trainer.cli.{place}".rpartition(".")
    step = getattr(importlib.import_module(module), name)

    def press_and_go_on(*args: object, **options: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return step(*args, **options)

    monkeypatch.setattr(f"{module}.{name}", press_and_go_on)
    words = command.format(
        photos=photo_run.parent / "photos", run=photo_run, new=tmp_path / "new"
    ).split()
    caches = (
        ["--cache-dir", str(tmp_path / "cache")] if words[0] in ("data", "pack", "evaluate") else []
    )
    # a run in this process has set another
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = main([*words, *caches])
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 130
    assert re.sub(r"[^\n]*\r", "", capsys.readouterr().err).endswith("accel_trainer: interrupted\n")
