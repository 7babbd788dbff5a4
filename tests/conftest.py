"""What all tests share."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: waiting threads sleep, for together there are more than cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

from . import reaper, selection
from .forked_python import forked_python
from .variants import NUM_THREADS
from .whole_runs import IN_MAKE_TEST, NOT_IN_MAKE_TEST

HAS_TIMEOUT = importlib.util.find_spec("pytest_timeout") is not None

# Before anything imports the libraries that read them: no test may reach the network.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_EVALUATE_OFFLINE="1")
# Each new interpreter has another order of sets, as on the machines of users.
os.environ.pop("PYTHONHASHSEED", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    # A machine without pytest-timeout (and without a network) can run the tests, too.
    if not HAS_TIMEOUT:
        parser.addini("timeout", "of pytest-timeout")
    parser.addoption(
        "--effort",
        type=int,
        default=1,
        help="multiplies the repetitions of crash, fuzz and signal tests",
    )
    parser.addoption(
        "--start-method",
        choices=multiprocessing.get_all_start_methods(),
        help="how Python starts processes where nothing else is chosen: data workers, for example",
    )
    parser.addoption(
        "--whole-runs", action="store_true", help="whole runs are not slow: see whole_runs.py"
    )
    parser.addoption(
        "--part", metavar="K/N", help="run one of N parts of the tests that are selected"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "xdist_group: of pytest-xdist")
    if not HAS_TIMEOUT:
        config.addinivalue_line("markers", "timeout: of pytest-timeout")
    if method := config.getoption("--start-method"):
        multiprocessing.set_start_method(method, force=True)
    if "PYTEST_XDIST_WORKER" not in os.environ:  # workers have the variable of the first process
        state = tempfile.mkdtemp(prefix="state-of-tests-")
        os.environ["XDG_STATE_HOME"] = state  # runs list their starts there, and not at home
        config.add_cleanup(lambda: shutil.rmtree(state, ignore_errors=True))
        if in_memory := _memory():
            # Read by pytest. Half of what many tests wait for is the disk, at each sync.
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", in_memory)
    reaper.start()
    del sys.argv[1:]  # a run looks there for the origins of its config


def _memory() -> str | None:
    """Return a folder in memory with room for what the tests write, or None: containers have 64 MB.

    pytest keeps the files of the last three runs, about 60 MB each.
    """
    folder = "/dev/shm"
    has_room = os.path.isdir(folder) and shutil.disk_usage(folder).free > 2**32
    return folder if has_room and os.access(folder, os.W_OK) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Skip tests that need a GPU, or the number that their marker names, where there are fewer."""
    if marker := item.get_closest_marker("gpu"):
        (needed,) = marker.args or (1,)
        item.add_marker(
            pytest.mark.skipif(torch.cuda.device_count() < needed, reason=f"needs {needed} GPU")
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Mark what runs in one process, and what only `make test-all` runs as slow.

    Keep one of N parts, for `--part K/N`, and what each of them has.
    """
    selection.mark_groups(items)
    if not config.getoption("--whole-runs"):
        selection.mark_slow(items, IN_MAKE_TEST, NOT_IN_MAKE_TEST)
    yield  # to -m and -k, and to pytest-xdist
    selection.name_groups(items)
    if part := config.getoption("--part"):
        selection.keep(config, items, lambda item: selection.is_of_today(item, part))


def pytest_collection_finish() -> None:
    """Let the garbage collector skip all modules and tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def effort(request: pytest.FixtureRequest) -> int:
    """How many times its usual repetitions a test is asked for."""
    return int(request.config.getoption("--effort"))


@pytest.fixture(scope="session")
def one_that_forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with forked_python(tmp_path_factory.mktemp("python")) as python:
        yield python


@pytest.fixture
def python_is_forked(one_that_forks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A started Python is there in 0.1 s, with torch imported: see `forked_python`."""
    for folder in (Path(sys.executable).parent, one_that_forks.parent):
        monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(sys, "executable", str(one_that_forks))


@pytest.fixture(autouse=True)
def same_torch_threads() -> None:
    """The number of threads changes the last bits of a sum, and tests compare bits."""
    torch.set_num_threads(NUM_THREADS)


@pytest.fixture(autouse=True)
def same_signal_handlers() -> Iterator[None]:
    """Restore the handlers: a recipe's `main` ignores late signals, because its process ends."""
    from accel_trainer.core.platform import RUN_SIGNALS

    for number in RUN_SIGNALS:
        if signal.getsignal(number) is signal.SIG_IGN:  # the tests themselves run under nohup
            signal.signal(number, signal.SIG_DFL)
    handlers = {number: signal.getsignal(number) for number in RUN_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def fresh_accelerator_state() -> Iterator[None]:
    """Accelerate keeps its state for the life of a process; each test starts as a new one would."""
    yield
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
