"""The shape of the package, from its syntax trees: who imports whom, what happens in which room."""

from __future__ import annotations

import ast
import functools
import io
import subprocess
import sys
import tokenize
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

import accel_trainer.commands
import accel_trainer.vision

ROOT = Path(__file__).parents[1]
PACKAGE = "accel_trainer"
# All read the same syntax trees, which takes longer than most tests.
pytestmark = pytest.mark.xdist_group("architecture")

# In this order, each may import those before it. The two after the engine know it; it does not know
# them.
ENGINE = (
    "names",
    "core",
    "distributed",
    "data",
    "optim",
    "checkpoint",
    "fault_tolerance",
    "training",
    "callbacks",
    "checks",
    "run",
    "own_loop",
)
ORDER = (
    *ENGINE,
    "removed",
    "public_names",
    "vision",
    "cli",
    "api",
    "commands",
    "__init__",
    "lab",
    "__main__",
    "recipes",
)


@dataclass(frozen=True)
class Module:
    """A source file: `name` is dotted, without the package."""

    name: str
    tree: ast.Module

    @property
    def folder(self) -> str:
        return self.name.partition(".")[0]

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of its tree. To walk it takes longer than most rules."""
        return list(ast.walk(self.tree))


@functools.cache
def read_modules() -> list[Module]:
    files = {path: path.relative_to(ROOT / PACKAGE) for path in (ROOT / PACKAGE).rglob("*.py")}
    files |= {path: path.relative_to(ROOT) for path in (ROOT / "recipes").rglob("*.py")}
    return [
        Module(".".join(name.with_suffix("").parts), ast.parse(path.read_text()))
        for path, name in files.items()
    ]


def module(name: str, source: str) -> Module:
    return Module(name, ast.parse(source))


# --- imports ---


def imported_packages(source: Module) -> set[str]:
    """Return the folders of the package that a module imports, for types as well."""
    names: list[list[str]] = []
    for node in source.nodes:
        if isinstance(node, ast.Import):
            names += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [[*absolute(source, node), alias.name] for alias in node.names]
    # `from accel_trainer import Trainer` names no folder: it is the package itself that is
    # imported.
    return {name[1] if name[1] in ORDER else "__init__" for name in names if name[0] == PACKAGE}


def absolute(source: Module, node: ast.ImportFrom) -> list[str]:
    """Return the parts of the module that an import names, dots resolved."""
    named = node.module.split(".") if node.module else []
    package = [PACKAGE, *source.name.split(".")][: -node.level] if node.level else []
    return package + named


def wrong_imports(modules: Iterable[Module]) -> list[str]:
    """Return a line for each import that does not go left and each module in no ordered folder."""
    wrong = []
    for source in modules:
        if source.folder not in ORDER:
            wrong.append(f"{source.name}: put {source.folder} into the order")
            continue
        for folder in sorted(imported_packages(source) - {source.folder}):
            if ORDER.index(folder) > ORDER.index(source.folder):
                wrong.append(f"{source.name} imports {folder}")
    return wrong


def test_imports_go_left_only() -> None:
    assert wrong_imports(read_modules()) == []


@pytest.mark.parametrize(
    ("name", "source", "wrong"),
    [
        ("optim.ema", "from ..core.errors import ConfigError", []),
        ("optim.ema", "from .muon import Muon", []),
        ("optim.ema", "from ..training.trainer import Trainer", ["optim.ema imports training"]),
        ("optim.ema", "from .. import training", ["optim.ema imports training"]),
        ("optim.ema", "import accel_trainer.training.trainer", ["optim.ema imports training"]),
        ("optim.ema", "from accel_trainer import Trainer", ["optim.ema imports __init__"]),
        (
            "optim.ema",
            "def f():\n    from ..run.build import build_trainer",
            ["optim.ema imports run"],
        ),
        (
            "optim.ema",
            "if TYPE_CHECKING:\n    from ..training.trainer import Trainer",
            ["optim.ema imports training"],
        ),
        ("callbacks.trackers", "from ..training.config import TrainerConfig", []),
        ("run.build", "from ..vision import build_model", ["run.build imports vision"]),
        ("vision.pretrained", "from ..cli.doctor import main", ["vision.pretrained imports cli"]),
        ("cli.predict", "from ..vision.models.zoo import build_model", []),
        (
            "recipes.cifar",
            "from accel_trainer import Trainer\nfrom accel_trainer.vision import zoo",
            [],
        ),
        ("surprise.room", "", ["surprise.room: put surprise into the order"]),
    ],
)
def test_an_import_that_does_not_go_left_is_found(name: str, source: str, wrong: list[str]) -> None:
    assert wrong_imports([module(name, source)]) == wrong


def private_imports(modules: Iterable[Module]) -> list[str]:
    """Return a line for each import of `lab` that a user's own command could not have."""
    public = {
        PACKAGE: accel_trainer.__all__,
        f"{PACKAGE}.commands": accel_trainer.commands.__all__,
        f"{PACKAGE}.vision": accel_trainer.vision.__all__,
    }
    wrong = []
    for source in modules:
        for node in source.nodes if source.folder == "lab" else ():
            named: list[tuple[str, str]] = []
            if isinstance(node, ast.Import):
                named = [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                home = ".".join(absolute(source, node))
                named = [(home, alias.name) for alias in node.names]
            wrong += [
                f"{source.name} imports {home} {name}".rstrip()
                for home, name in named
                if home.split(".")[0] == PACKAGE
                and not home.startswith(f"{PACKAGE}.lab")
                and name not in public.get(home, ())
            ]
    return wrong


def test_the_lab_imports_only_what_users_have() -> None:
    assert private_imports(read_modules()) == []


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("from accel_trainer import Trainer\nfrom accel_trainer.commands import read_run", []),
        ("from .proof import Proof\nfrom ..rows import shared\nimport torch", []),
        ("from accel_trainer.lab.chaos.faults import Fault", []),
        ("from ...core.errors import ConfigError", ["accel_trainer.core.errors ConfigError"]),
        ("from accel_trainer import core", ["accel_trainer core"]),
        ("from accel_trainer.commands import Run", ["accel_trainer.commands Run"]),
        ("def f():\n    import accel_trainer.run", ["accel_trainer.run"]),
    ],
)
def test_a_private_import_of_the_lab_is_found(source: str, wrong: list[str]) -> None:
    found = private_imports([module("lab.replay.at", source)])
    assert found == [f"lab.replay.at imports {line}" for line in wrong]
    assert private_imports([module("cli.lr_find", source)]) == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    modules = {source.name: source for source in read_modules()}
    left = {name: imported_modules(source, modules) - {name} for name, source in modules.items()}
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    assert left == {}


def imported_modules(source: Module, modules: Collection[str]) -> set[str]:
    found = set()
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom):
            base = absolute(source, node)[1:]
            for names in ([*base, alias.name] for alias in node.names):
                options = [".".join(names), ".".join(names[:-1])]
                found |= {
                    option for option in options if option in modules and option != "__init__"
                }
    return found


# --- size of the house ---


def test_the_name_of_a_test_is_shorter_than_70_characters() -> None:
    names = [
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert [name for name in names if len(name) >= 70] == []


# --- one room per side effect ---


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` for a name or an attribute, without what is before: `f().item` is `.item`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def calls(*names: str) -> Callable[[ast.AST], bool]:
    """Match calls of a full name (`os.open`) or of a method (`.item`), except of `filesystem`."""

    def matches(node: ast.AST) -> bool:
        name = dotted(node.func) if isinstance(node, ast.Call) else ""
        is_method = not name.startswith("filesystem.")
        return any(
            is_method and name.endswith(want) if want[0] == "." else name == want for want in names
        )

    return matches


def mentions(*names: str) -> Callable[[ast.AST], bool]:
    return lambda node: isinstance(node, ast.Attribute | ast.Name) and dotted(node) in names


def imports(*names: str) -> Callable[[ast.AST], bool]:
    def matches(node: ast.AST) -> bool:
        if isinstance(node, ast.ImportFrom):
            return not node.level and (node.module or "").split(".")[0] in names
        return isinstance(node, ast.Import) and any(
            alias.name.split(".")[0] in names for alias in node.names
        )

    return matches


def passes(keyword: str) -> Callable[[ast.AST], bool]:
    """Match a call that sets a keyword to anything but False."""

    def matches(node: ast.AST) -> bool:
        is_off = isinstance(node, ast.keyword) and getattr(node.value, "value", None) is False
        return isinstance(node, ast.keyword) and node.arg == keyword and not is_off

    return matches


def any_of(*matchers: Callable[[ast.AST], bool]) -> Callable[[ast.AST], bool]:
    return lambda node: any(matches(node) for matches in matchers)


def reads_item(name: str) -> Callable[[ast.AST], bool]:
    """Match `values[name]` and `values.get(name, ...)`."""

    def matches(node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and dotted(node.func).endswith(".get") and node.args:
            key: ast.AST = node.args[0]
        elif isinstance(node, ast.Subscript):
            key = node.slice
        else:
            return False
        return isinstance(key, ast.Constant) and key.value == name

    return matches


def guesses_an_encoding(node: ast.AST) -> bool:
    """Match text that is read or written in the encoding of the user's locale.

    A linter finds only files whose type it can infer.
    """
    if not isinstance(node, ast.Call):
        return False
    named = {keyword.arg: keyword.value for keyword in node.keywords}
    name = dotted(node.func)
    if "encoding" in named:
        return False
    if name.endswith((".read_text", ".write_text")):
        return True
    modes = [each.value for each in (*node.args, *named.values()) if isinstance(each, ast.Constant)]
    is_text = not any(isinstance(mode, str) and "b" in mode for mode in modes)
    others = ("os.", "Image.", "webbrowser.", "filesystem.", "tarfile.")
    if name == "open" or (name.endswith(".open") and not name.startswith(others)):
        return is_text
    return isinstance(text := named.get("text"), ast.Constant) and text.value is True


def is_object_collective(node: ast.AST) -> bool:
    name = dotted(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    return name in {"gather_object", "broadcast_object_list", "scatter_object_list"} or (
        name.endswith("_object")
        and name.startswith(("all_gather", "send", "recv", "gather", "broadcast"))
    )


def draws_without_generator(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or any(
        keyword.arg == "generator" for keyword in node.keywords
    ):
        return False
    module_name, _, function = dotted(node.func).rpartition(".")
    draws = {
        "bernoulli",
        "manual_seed",
        "multinomial",
        "normal",
        "rand",
        "randint",
        "randn",
        "randperm",
        "seed",
    }
    generators = {"random", "np.random", "numpy.random", "torch.default_generator"}
    return module_name in generators or module_name == "torch" and function in draws


def decodes_a_picture(node: ast.AST) -> bool:
    """Match what opens a picture, or a column type of `datasets` that would when a row is read."""
    if not isinstance(node, ast.Call):
        return False
    name = dotted(node.func)
    is_off = any(
        keyword.arg == "decode" and getattr(keyword.value, "value", 0) is False
        for keyword in node.keywords
    )
    opens = (".imread", ".decode_example", ".decode_image", ".decode_png", ".read_image")
    return name.endswith(("Image.open", *opens)) or (
        name in ("Image", "datasets.Image") and not is_off
    )


@dataclass(frozen=True)
class Rule:
    """A kind of line and where it may be: whole rooms, or single modules by their dotted name."""

    is_such_a_line: Callable[[ast.AST], bool]
    rooms: Collection[str]
    example: str

    def places(self, modules: Iterable[Module]) -> list[tuple[Module, int]]:
        """Return the modules and numbers of all such lines."""
        return [
            (source, getattr(node, "lineno", 0))
            for source in modules
            for node in source.nodes
            if self.is_such_a_line(node)
        ]

    def broken_by(self, places: Iterable[tuple[Module, int]]) -> list[str]:
        return [
            f"{source.name}:{line}"
            for source, line in places
            if not {source.folder, source.name} & set(self.rooms)
        ]


RULES = {
    "trains": Rule(
        calls(
            ".backward",
            ".zero_grad",
            ".no_sync",
            ".clip_grad_norm_",
            ".optimizer.step",
            "optimizer.step",
            "scaler.step",
            ".scaler.step",
        ),
        {
            "training.step.backward",
            "training.step.nonfinite_check",  # applies an update, or does not
            "training.step.optimizer_step",
            "training.step.plain_step",
            "training.step.step_check",
            "training.strategy.data_parallel",  # a backward that trains nothing
        },
        "self.optimizer.step()",
    ),
    "reads a tensor on the host": Rule(
        calls(".item", ".tolist", ".cpu"),
        {
            "callbacks.metric_logger",
            "core.digest",  # for a row, in the first two steps, and for what processes save
            "training.evaluation.evaluator",
            "checks.evaluation_trial",  # before the first step
            "training.step.targets",  # looks at labels on the CPU only
            "training.evaluation.metrics",  # computes from merged sums, which are on the host
            "training.plain_values",  # likewise
            "distributed.collectives",  # sizes, numbers and messages, never in a step
            "distributed.differentiable",  # sizes, only in the step of a task that asks for them
            "fault_tolerance.preemption",  # the codes of a stop or a save, which are on the host
            "training.step.nonfinite_report",  # once it has found one
            "training.strategy.exact",  # only in a step that leaves parameters out
            "distributed.fsdp",  # the copy that a checkpoint is written from
            "checkpoint.frozen",  # if a file is damaged
            "own_loop.means",  # for a row
            # Index lists and images, which are on the host.
            "data",
            "vision",
            "cli",
            "lab",
            "recipes",
        },
        "loss.item()",
    ),
    "touches randomness": Rule(
        draws_without_generator,
        {
            "core.rng",
            "vision.sources.digits",  # splits once, with a generator of its own
            "lab.chaos.faults",  # draws them by a seed
            "lab.chaos.runs",  # which byte is flipped
            "lab.chaos.script",  # when it is killed
            # These draw in a step and in hooks, where the generators are those of the step.
            "recipes.byol",
            "recipes.diffusion",
            "recipes.gan",
        },
        "torch.randperm(8)",
    ),
    "changes files": Rule(
        any_of(
            calls(
                "os.rename",
                "os.replace",
                "os.unlink",
                "os.remove",
                "os.rmdir",
                "os.mkdir",
                "os.makedirs",
                ".write_text",
                ".write_bytes",
                ".unlink",
                ".rename",
                ".rmdir",
                ".mkdir",
                ".touch",
            ),
            calls(
                "shutil.copy",
                "shutil.copyfile",
                "shutil.copytree",
                "shutil.move",
                "shutil.rmtree",
                "shutil.unpack_archive",
                ".extract",
                ".extractall",
            ),
            imports("tempfile"),
        ),
        {
            "core.filesystem",
            "run.known_recipes",  # a list in the user's home, which stops no run
            "vision.data.cache",  # makes the folder that users name
            "recipes.search",  # the same
            # These work in a temporary folder.
            "cli.common.scratch",
            "lab.chaos.disk",  # half of what it stands in for
            "lab.chaos.runs",
            "lab.chaos.script",
            "cli.recipe.forks",  # asks for its path
            "cli.recipe.dry_run",
            "cli.lr_find",
            "cli.plan.measure",
            "lab.replay.command",
            "lab.silent",
            "cli.share.best_so_far",
            "cli.share.verify",
            "recipes.features",  # the folder of what it keeps
            "cli.new",  # a project is its user's: the modes are those of the umask
        },
        "Path('x').write_text('')",
    ),
    "removes a folder with all that is in it": Rule(
        calls(
            "shutil.rmtree",
            ".rmtree",
            ".remove_tree",
            "filesystem.disk.remove_tree",
            "os.removedirs",
        ),
        {
            "core.filesystem",  # its temporaries, and what `remove_own` was told to be our own
            "cli.common.scratch",  # by a mark in the folder
            "lab.chaos.disk",  # half of what it stands in for
        },
        "filesystem.disk.remove_tree(folder)",
    ),
    "opens files": Rule(
        calls("open", ".open", ".read_text", ".read_bytes"),
        {
            "core.filesystem",
            "names.unknown",  # its table
            "callbacks.console",  # where printing leads that fails
            "distributed.machine",  # what the kernel says
            "data.order",  # the ids to leave out
            "core.platform",  # directories, to sync them
            "checks.agreement",  # the sources, to hash them
            "run.folder",  # the config, to restore it
            "lab.chaos.command",  # a recipe, which may have a loop of its own
            "lab.chaos.outputs",  # files of any program, to compare them
            "lab.chaos.runs",  # what a run has said, and the byte that it flips
            "lab.chaos.script",  # what a program has said
            "lab.chaos.start",  # what a run says
            "cli.report.page",  # its script
            "cli.report.report",  # the browser
            "cli.watch.command",  # the browser
            "cli.watch.live_page",  # its script
            "cli.share.plain_evaluation",  # a script without this package
            "cli.sweep.sweep",  # logs of its own
            "vision",  # datasets
            "recipes.lora",  # a text
            "recipes.stream",  # tar files, in memory
        },
        "path.open()",
    ),
    "guesses an encoding": Rule(
        guesses_an_encoding,
        (),
        "resources.files('x').joinpath('y').read_text()",
    ),
    "decodes a picture": Rule(
        decodes_a_picture,
        {
            "vision.data.photo_decode",
            "cli.data.shards",  # the type that a packed column has for other programs
        },
        "Image.open(path)",
    ),
    "reads the environment": Rule(
        mentions("os.environ", "os.getenv", "os.putenv"),
        {
            "__init__",  # how OpenMP's threads wait
            "distributed",
            "cli.recipe.main",
            "cli.recipe.exit",
            "cli.recipe.start",
            "cli.flags.parser",  # a flag that repeats a variable
            "checks.boundaries",  # whether steps change it
            "run.provenance",  # records it
            "run.folder",  # which a command may replace
            "run.known_recipes",  # where the list of starts lies
            "run.extra_callbacks",  # no config may name a program
            "cli.launch",
            "cli.common.processes",
            "cli.doctor.findings",
            "cli.recipe.dry_run",  # hands it to the processes that it starts
            "cli.sweep.sweep",  # the same
            "lab.chaos.runs",  # the same
            "lab.chaos.script",  # the same
            "lab.chaos.start",
            "callbacks.trackers",  # theirs say where they store
        },
        "os.environ['RANK']",
    ),
    "reads the command line": Rule(
        mentions("sys.argv"),
        {
            "cli",
            "lab",
            "checks.agreement",  # which recipe runs, to hash it
            "checks.own_sources",  # the same
            "run.provenance",  # records it
        },
        "sys.argv[1:]",
    ),
    "reads which recipe a run has recorded": Rule(
        reads_item("recipe"),
        {
            "cli.runs.recorded_start",  # decides whether it may run
            "run.folder",  # copies it as the run records it
        },
        "environment['code']['recipe']",
    ),
    "installs a signal handler": Rule(
        calls("signal.signal", "signal.set_wakeup_fd", ".add_signal_handler"),
        {
            "core.platform",  # for whoever stops, or forwards, in a block
            "data.signals",  # those of data workers, and of a process that is done
        },
        "signal.signal(signal.SIGTERM, handle)",
    ),
    "prints": Rule(
        mentions("print", "sys.stdout.write", "sys.stderr.write"),
        {
            "cli.recipe.main",
            "cli.recipe.exit",
            "callbacks.console",
            "cli.main",
            "cli.launch",
            "cli.common.output",  # escapes control characters in names
            "cli.share.plain_evaluation",  # a script without this package
            "recipes.search",  # a program of several runs
        },
        "print('hello')",
    ),
    "runs data as code": Rule(
        any_of(
            imports("pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"),
            calls(
                "eval",
                "exec",
                "compile",
                "__import__",
                "os.system",
                "os.popen",
                "torch.load",
                "torch.save",
                "yaml.load",
                "yaml.unsafe_load",
                "yaml.full_load",
            ),
            is_object_collective,
            passes("allow_pickle"),
            passes("shell"),
        ),
        ("distributed.launch",),  # writes alone: the result that a process hands to its parent
        "eval('1')",
    ),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_line_stands_in_its_room(rule: Rule) -> None:
    """Fault (Malice): an old `.pt` or `.bin` -> refused: nothing in the package reads pickles

    Fault (Malice): an archive with `../` or a bomb -> no archive is ever unpacked: only folders,
    parquet and tars are read, and the members of a tar become rows of a table, whatever their names

    Fault (Malice): config text that reaches a shell, `eval` or an import -> impossible: the package
    has no such code

    Fault (Malice): a stranger at the rendezvous port -> processes exchange only tensors, no pickled
    objects; the port itself is torch's: keep it behind a firewall
    """
    places = rule.places(read_modules())
    assert rule.broken_by(places) == []
    assert {*rule.rooms} <= {name for source, _ in places for name in (source.folder, source.name)}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_line_in_another_room_is_found(rule: Rule) -> None:
    surprise = rule.places([module("surprise", f"def f():\n    {rule.example}")])
    assert rule.broken_by(surprise) == ["surprise:2"]
    allowed = rule.places([module(room, rule.example) for room in rule.rooms])
    assert rule.broken_by(allowed) == []


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("runs data as code", "from pickle import loads"),
        ("runs data as code", "torch.load(path)"),
        ("runs data as code", "torch.load(path, weights_only=True)"),
        ("runs data as code", "dist.broadcast_object_list(names)"),
        ("runs data as code", "dist.all_gather_object(names, name)"),
        ("runs data as code", "np.load(path, allow_pickle=True)"),
        ("runs data as code", "subprocess.run(command, shell=True)"),
        ("reads a tensor on the host", "(a + b).sum().item()"),
        ("decodes a picture", "PIL.Image.open(path)"),
        ("decodes a picture", "dataset.cast_column(column, Image())"),
        ("decodes a picture", "Image(decode=True)"),
        ("decodes a picture", "feature.decode_example(row)"),
        ("guesses an encoding", "path.write_text('x')"),
        ("guesses an encoding", "open(path, 'w')"),
        ("guesses an encoding", "path.open()"),
        ("guesses an encoding", "subprocess.run(command, text=True)"),
        ("changes files", "os.replace(a, b)"),
        ("changes files", "shutil.rmtree(path)"),
        ("removes a folder with all that is in it", "import shutil\nshutil.rmtree(path)"),
        ("removes a folder with all that is in it", "disk.remove_tree(path)"),
        ("changes files", "tarfile.open(path).extractall(folder)"),
        ("reads the environment", "os.getenv('RANK')"),
        ("touches randomness", "np.random.shuffle(ids)"),
        ("trains", "with accelerator.no_sync(model): pass"),
        ("trains", "loss.backward()"),
    ],
)
def test_each_spelling_is_found(kind: str, source: str) -> None:
    assert RULES[kind].places([module("surprise", source)])


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("runs data as code", "model.eval()"),
        ("runs data as code", "np.load(path, allow_pickle=False)"),
        ("runs data as code", "torch.compile(model)"),
        ("guesses an encoding", "path.read_text(encoding='utf-8')"),
        ("guesses an encoding", "open(path, 'rb')"),
        ("guesses an encoding", "os.open(path, flags)"),
        ("changes files", "text.replace('a', 'b')"),
        ("decodes a picture", "dataset.cast_column(column, Image(decode=False))"),
        ("changes files", "shutil.disk_usage(path)"),
        ("changes files", "filesystem.rename(a, b)"),
        ("touches randomness", "torch.randperm(8, generator=generator)"),
    ],
)
def test_a_harmless_line_is_left_alone(kind: str, source: str) -> None:
    assert RULES[kind].places([module("surprise", source)]) == []


# --- weight ---


def count_tokens(source: str) -> int:
    """Count the tokens of code: of neither blank lines, comments, docstrings nor imports.

    A bound on lines would be met by dense lines.
    """
    dropped: set[int] = set()
    skipped = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            is_text and isinstance(node.value.value, str)
        ):
            dropped |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        # An f-string counts once. Python 3.12 and later give its parts, between a start and an end.
        kind = tokenize.tok_name[token.type]
        depth += (kind == "FSTRING_START") - (kind == "FSTRING_END")
        count += not depth and token.type not in skipped and token.start[0] not in dropped
    return count


def test_tokens_of_code_are_counted() -> None:
    source = (
        '"""Doc.\n\nMore.\n"""\nimport os\n\n# comment\nx = 1\n\n\ndef f():\n    "Doc."\n    x\n'
        "    f\"{x:{x}} and {f'{x}'}\"\n"
    )
    counted = ["x", "=", "1", "def", "f", "(", ")", ":", "x", "the text"]
    assert count_tokens(source) == len(counted)


def count_tokens_in(*folders: str) -> int:
    paths = [path for folder in folders for path in (ROOT / PACKAGE / folder).rglob("*.py")]
    return sum(count_tokens(path.read_text()) for path in paths)


def test_the_engine_can_be_read_in_an_afternoon() -> None:
    assert count_tokens_in(*[folder for folder in ENGINE if folder != "checks"]) <= 97_495


def test_the_checks_are_smaller_than_what_they_watch() -> None:
    assert count_tokens_in("checks") <= 18_896


def test_the_commands_and_photos_stay_as_small_as_they_are() -> None:
    assert count_tokens_in("cli", "lab") <= 89_999
    assert count_tokens_in("vision") <= 42_593


def modules_after(*statements: str) -> list[set[str]]:
    """Return the package's modules loaded after each, without those its own import loads."""
    show = f"print([name for name in sys.modules if name.startswith('{PACKAGE}.')])"
    probe = "".join(f"{statement}\n{show}\n" for statement in statements)
    # The package itself imports all that it exports.
    bare = (
        "import sys, types\n"
        f"here = types.ModuleType('{PACKAGE}')\n"
        f"here.__path__ = ['{ROOT / PACKAGE}']\n"
        f"sys.modules['{PACKAGE}'] = here\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", bare + probe], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = map(ast.literal_eval, run.stdout.splitlines())
    return [{name.partition(".")[2] for name in line} for line in lines]


def test_a_trainer_and_a_plain_run_import_only_what_they_need() -> None:
    names, of_a_run = modules_after(
        "import accel_trainer.training.trainer",
        "import accel_trainer.cli.recipe.main, accel_trainer.run.build",
    )
    paths = [(ROOT / PACKAGE).joinpath(*name.split(".")).with_suffix(".py") for name in names]
    assert sum(count_tokens(path.read_text()) for path in paths if path.is_file()) <= 21_600
    assert not names & {
        "optim.muon",
        "optim.lr_scheduler",
        "training.evaluation.metric_adapters",
        "data.workers",
    }
    assert "training.strategy.data_parallel" in of_a_run
    exact_or_sharded = {"training.strategy.exact", "training.strategy.sharded", "distributed.fsdp"}
    assert not of_a_run & exact_or_sharded


def test_only_one_file_asks_whether_weights_are_sharded() -> None:
    asks = [
        source.name
        for source in read_modules()
        for node in source.nodes
        if isinstance(node, ast.Attribute) and dotted(node) == "DistributedType.FSDP"
    ]
    assert sorted(set(asks)) == [
        "distributed.accelerate_settings",
        "distributed.accelerator",
        "training.strategy.__init__",
    ]


def test_a_trainer_has_few_public_names() -> None:
    (source,) = (module for module in read_modules() if module.name == "training.trainer")
    (trainer,) = (
        node for node in source.nodes if isinstance(node, ast.ClassDef) and node.name == "Trainer"
    )
    names = {node.name for node in ast.walk(trainer) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(trainer):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and dotted(node.value) == "self"
        ):
            names.add(node.attr)
    assert len([name for name in names if not name.startswith("_")]) <= 28, sorted(names)


def test_importing_the_package_or_a_command_line_is_light() -> None:
    """The compiler takes a second or two, which `--help` and each refused flag would cost."""
    probe = (
        "import sys, accel_trainer, torch\n"
        "heavy = 'datasets evaluate matplotlib onnx onnxscript sklearn PIL"
        " tensorboard wandb transformers'.split()\n"
        "print([name for name in heavy if name in sys.modules], torch.cuda.is_initialized())\n"
        "import accel_trainer.cli.recipe.main\n"
        "print('torch._dynamo' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout == "[] False\nFalse\n"
