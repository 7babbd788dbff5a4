"""Every fenced block of README and docs is run, or checked if it cannot run: see `pages.Block`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_trainer import load_config
from recipes import cifar
from tests.variants import slow

from .commands import check, check_imports
from .pages import PAGES, ROOT, Block, blocks_of, page_name

LONG = (
    "callbacks.md",
    "checkpoints.md",
    "commands.md",
    "data.md",
    "datasets.md",
    "exactness.md",
    "photos.md",
    "step.md",
    "own_model.md",
)
LANGUAGES = {"bash", "diff", "python", "text", "yaml"}
ALL = [block for page in PAGES for block in blocks_of(page)]
FILES = {block.file_name: block.text for block in ALL if block.file_name}
NOT_RUN = [block for block in ALL if block.mark == "not run"]
PAGES_TO_RUN = [page for page in PAGES if any(block.mark != "not run" for block in blocks_of(page))]

# What differs between machines and runs: numbers, durations, and which run is marked as the best.
_NUMBER = re.compile(r"^\* |(\d+ min )?\d[\d.,:-]*(e-?\d+)?(\+c(pu|u\d+))?")
# With a different number, what is counted has a different ending: 1 epoch, 10 epochs.
_COUNTED = re.compile(r"(# (?:epoch|process|sample|step|thread))(?:es|s)?\b")


def test_each_block_is_of_a_kind_that_is_tested() -> None:
    for block in ALL:
        assert block.language in LANGUAGES, str(block)
        if block.mark == "not run":
            assert block.argument, f"{block}: say why it is not run"
            assert block.language in {"bash", "python"}, f"{block}: could not run anyway"


def test_what_is_not_run_exists_with_all_its_flags() -> None:
    pytest.importorskip("sklearn")
    wrong = []
    for block in NOT_RUN:
        try:
            if block.language == "python":
                check_imports(block.text)
            else:
                for command in block.commands:
                    check(command)
        except (AssertionError, ImportError, ValueError) as error:
            wrong.append(f"{block}: {error}")
    assert wrong == []


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("python recipes/cifar.py --epoch 3", "unknown flag --epoch"),
        ("python recipes/cifar.py --model resnet18 --lr fast", "expected a number"),
        ("python recipes/sifar.py", "there is no recipes/sifar.py"),
        (
            "accelerate launch --config_file accelerate_configs/none.yaml recipes/cifar.py",
            "there is no accel",
        ),
        ("torchrun --nproc_per_node 2 recipes/cifar.py --lrr 1", "unknown flag --lrr"),
        ("accel-trainer doctor recipes/cifar.py --batch-sizes 3", "doctor knows no --batch-sizes"),
        ("A=b make trian", "make has no"),
        ("pip install -e '.[visions]'", "there is no extra"),
        ("rm -rf /", "no rule says how to check 'rm'"),
    ],
)
def test_a_wrong_command_is_found_without_running_it(command: str, fault: str) -> None:
    with pytest.raises((AssertionError, ValueError), match=re.escape(fault)):
        check(command)


class Session:
    """A reader who follows a page: a copy of the repository, and the last output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.printed = ""
        self._module = types.ModuleType("__docs__")
        self._files_not_run: set[str] = set()
        sys.modules[self._module.__name__] = self._module  # where dataclasses look up their types
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(
            listed, cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, folder / name)
        # As `make setup` would create it, with the same Python and commands as the other blocks.
        venv = folder / ".venv"
        venv.mkdir()
        (venv / "bin").symlink_to(Path(sys.executable).parent)
        (venv / ".installed").touch()
        (venv / ".trainable").touch()

    def run(self, block: Block) -> None:
        if block.file_name:
            (self.folder / block.file_name).write_text(block.text)
            self._files_not_run.add(block.file_name)
        else:
            runners: dict[str, Callable[[Block], None]] = {
                "bash": self._run_bash,
                "python": self._run_python,
                "yaml": self._read_yaml,
                "text": self._compare,
                "diff": lambda block: None,
            }
            runners[block.language](block)

    def _run_bash(self, block: Block) -> None:
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.folder),
            "OMP_NUM_THREADS": "1",
            # Not those of the `make test` that runs this.
            "ARGS": block.argument,
            "MAKEFLAGS": "",
        }
        for name in re.findall(r"\b\w+\.py\b", block.text):
            if name in FILES and not (self.folder / name).exists():  # another page shows it
                (self.folder / name).write_text(FILES[name])
        recipe = re.compile(r"^(?!accel-trainer|make).*\b\w+\.py\b")
        commands = [
            f"{line} {block.argument}" if recipe.match(line) else line for line in block.commands
        ]
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", "\n".join(commands)],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, (
            f"{block} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
        self.printed = (done.stdout + done.stderr).replace(f"{self.folder}/", "")
        self._files_not_run -= {name for name in self._files_not_run if name in block.text}

    def _run_python(self, block: Block) -> None:
        code = compile("\n" * block.line + block.text, str(block.page), "exec")
        before = self._pictures()
        exec(code, self._module.__dict__)
        after = self._pictures()
        changed = [path for path, content in before.items() if after.get(path) != content]
        assert not changed, f"{block} overwrites the reader's files: {changed[:3]}"

    def _pictures(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.folder.glob("*/*/*/*.png")}

    def _read_yaml(self, block: Block) -> None:
        load_config(cifar.Config, block.text, source=str(block))

    def _compare(self, block: Block) -> None:
        if block.mark == "output":
            printed = {_masked(line) for line in self.printed.splitlines()}
            shown = [line for line in block.text.splitlines() if line.strip() and line != "..."]
            missing = [line for line in shown if _masked(line) not in printed]
            assert not missing, f"{block} was not printed: {missing}, but\n{self.printed}"
        elif block.mark == "files":
            folder = min(self.folder.glob(block.argument))
            names = re.findall(r"^ +([\w./*<> -]*?[\w>/])(?:  .*)?$", block.text, re.MULTILINE)
            missing = [
                name
                for name in names
                if not list(folder.rglob(re.sub(r"<.*?>", "*", name).strip("/")))
            ]
            assert not missing, f"{block}: {missing} not in {sorted(folder.rglob('*'))}"

    def end(self) -> None:
        for path in self.folder.glob("*.py"):
            sys.modules.pop(path.stem, None)
        assert not self._files_not_run, f"{self._files_not_run} is shown, but no command runs it"


def _masked(line: str) -> str:
    words = " ".join(_NUMBER.sub(" # ", line).split())
    return _COUNTED.sub(r"\1", words).strip(" #")


@pytest.mark.usefixtures("python_is_forked")
@pytest.mark.parametrize(
    "page",
    [slow([page])[0] if page.name in LONG else page for page in PAGES_TO_RUN],
    ids=page_name,
)
def test_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("onnxscript")
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    session = Session(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # Otherwise matplotlib rebuilds its fonts in every HOME, which takes seconds.
    fonts = Path.home() / ".cache" / "matplotlib"
    monkeypatch.setenv("MPLCONFIGDIR", os.environ.get("MPLCONFIGDIR", str(fonts)))
    monkeypatch.setenv("HOME", str(tmp_path))
    for block in blocks_of(page):
        if block.mark != "not run":
            session.run(block)
    session.end()
