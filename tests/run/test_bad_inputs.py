"""What people get wrong is one line that names it, with an exit code that a scheduler can act
on."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from accel_trainer import main
from recipes import cifar

from .. import processes
from ..variants import slow

FILES = {
    "binary": b"\xff\xfe\x00\x80",
    "broken.yaml": b"trainer: {num_epochs: 3\n\tx",
    "junk.safetensors": b"\x08" * 64,
}
BASE = (
    "--dataset digits",
    "--model resnet8",
    "--augment.crop-padding 1",
    "--max-steps 1",
    "--cache-dir cache",
    "--quiet",
)
TWO = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}

# The flags, the exit code, and what the line must say, beside what the parser and the configs say.
BAD_FLAGS = [
    ("--epoch 3", 64, "unknown flag --epoch: did you mean --epochs?"),
    (
        "--optimizer.name lion",
        64,
        "--optimizer.name is lion, which does not exist: it is sgd, adamw, muon or",
    ),
    (
        "--optimizer.name rmsprop",
        64,
        "--optimizer.name is rmsprop, which does not exist: did you mean RMSprop?",
    ),
    (
        "--optimizer.name LBFGS",
        64,
        "--optimizer.name is LBFGS, but it needs several forwards for a step",
    ),
    ("--freeze [", 64, "--freeze is '[', which is not a regular expression"),
    (
        "--optimizer.weight-decays bias",
        64,
        "--optimizer.weight-decays has 'bias' (could not convert",
    ),
    (
        "--optimizer.learning-rate-scales [=1",
        64,
        "--optimizer.learning-rate-scales has '[=1' (unterminated",
    ),
    (
        "--optimizer.learning-rate-scales head=-1",
        64,
        "has 'head=-1' (a number from 0 is needed): write PATTERN=NUMBER",
    ),
    (
        "--optimizer.learning-rate-scales nothing=1",
        64,
        "has 'nothing', which matches no trained parameter (",
    ),
    ("--freeze nothing", 64, "--freeze 'nothing' matches none of the "),
    ("--schedule.warmup-epochs 1000", 64, "the warmup has"),
    ("--batch-size 99999999999", 64, "larger than the 1438 training samples"),
    ("--batch.num-workers -1", 64, "--batch.num-workers is -1: set it to at least 0"),
    (
        "--mixed-precision fp16",
        64,
        "--mixed-precision fp16 needs a GPU, and there is none: use bf16 or no",
    ),
    ("--model resnet9000", 64, "no model 'resnet9000': did you mean resnet9?"),
    (
        "--augment.crop-padding 1000000000",
        64,
        "--augment.crop-padding 1000000000 is too much for images of 16 pixels",
    ),
    (
        "--augment.crop-padding 1000000000 --augment.crop-mode zero",
        64,
        "images of 16 pixels: set it to 16 or less",
    ),
    ("--dataset digitz", 64, "no dataset or folder 'digitz': did you mean digits?"),
    ("--dataset cifar10", 65, "it cannot be loaded from the Hugging Face hub"),
    ("--dataset /dev/null", 65, "--dataset /dev/null is a file"),
    ("--dataset empty", 65, "no dataset in empty: expected train*.parquet"),
    ("--config broken.yaml", 64, "broken.yaml: line 2"),
    ("--resume /nowhere", 74, "--resume /nowhere is neither a checkpoint nor a run"),
    ("--init-from /nowhere", 74, "--init-from /nowhere does not exist"),
    ("--init-from junk.safetensors", 74, "--init-from junk.safetensors cannot be read"),
    ("--output-dir binary", 73, "(Not a directory): choose a different --output-dir"),
    ("--output-dir binary/below", 73, "(Not a directory): choose a different --output-dir"),
    (f"--output-dir {'x' * 300}", 73, "(File name too long): choose a different --output-dir"),
    ("--output-dir 'a\nb'", 73, "contains a control character"),
    ("--output-dir /proc/here", 73, "cannot write to /proc/here"),
    ("--cache-dir binary", 73, "cannot write the image cache"),
    ("--track nosuch", 64, "--track nosuch: accelerate has no such tracker"),
]

# Variables of the launch, and the same.
BAD_LAUNCHES = [
    (
        {"WORLD_SIZE": "2"},
        "",
        64,
        "WORLD_SIZE is 2 without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT",
    ),
    ({**TWO, "MASTER_PORT": "99999"}, "", 64, "MASTER_PORT is 99999, but must be below 65536"),
    ({"LOCAL_RANK": "0"}, "--local-rank=3", 64, "WORLD_SIZE is not set"),
    (TWO, "--local-rank=3", 64, "torch.distributed.launch passes it: start with torchrun instead"),
    ({}, "--runtime.backend nccl", 64, "--runtime.backend nccl needs GPUs, and there are none"),
    (TWO, "--runtime.backend nccl", 64, "--runtime.backend nccl needs GPUs, and there are none"),
    (
        {"ACCELERATE_MIXED_PRECISION": "fp8"},
        "",
        64,
        "accelerate rejects its settings (Using `fp8` precision requires",
    ),
    ({"OMP_NUM_THREADS": "1000000"}, "", 64, "OMP_NUM_THREADS is 1000000: set it to 1 to 1024"),
]

# What looks wrong, and works.
GOOD = [
    ({}, "--seed 99999999999999999999999"),
    ({"OMP_NUM_THREADS": "banana"}, ""),
    ({"LC_ALL": "C"}, "--output-dir ü"),
    *slow([({}, "--lr 0"), ({}, "--seed -1"), ({}, "--global-batch-size 7 --batch-size 2")]),
    *slow([({"OMP_NUM_THREADS": "0"}, ""), ({"CUDA_VISIBLE_DEVICES": "7"}, "")]),
]


CASES = [({}, *case) for case in BAD_FLAGS] + BAD_LAUNCHES


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files of all kinds, where a run works."""
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("place")
    (folder / "empty").mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    processes.run(start_recipe, folder, "", {}, folder=folder / "logs")
    return folder


@pytest.fixture(scope="module")
def outcomes(place: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """Return, for each case, the exit code and what is said."""
    folder = tmp_path_factory.mktemp("outcomes")
    processes.run(start_all, place, folder, folder=folder / "logs")
    codes = map(int, (folder / "codes").read_text().split())
    return [(code, (folder / f"{index}.log").read_text()) for index, code in enumerate(codes)]


def start_all(place: Path, folder: Path) -> None:
    """Start the recipe for each case: in this process, or with variables of a launch in one that is
    forked from it."""
    codes = []
    for index, (variables, flags, *_) in enumerate(CASES):
        log = os.open(folder / f"{index}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        os.close(log)
        start = start_in_a_fork if variables else start_here
        codes.append(start(place, flags, variables))
    (folder / "codes").write_text(" ".join(map(str, codes)))


def start_here(place: Path, flags: str, variables: dict[str, str]) -> int:
    with pytest.raises(SystemExit) as ended:
        start_recipe(place, flags, variables)
    # accelerate keeps it for the life of a process
    AcceleratorState._reset_state(reset_partial_state=True)
    assert isinstance(ended.value.code, int)
    return int(ended.value.code)


def start_in_a_fork(place: Path, flags: str, variables: dict[str, str]) -> int:
    if (pid := os.fork()) == 0:
        os._exit(start_here(place, flags, variables))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def start_recipe(folder: Path, flags: str, variables: dict[str, str]) -> None:
    """Be the recipe that is started in `folder`."""
    os.environ.update(variables)
    os.chdir(folder)
    base = [
        flag
        for flag in (*BASE, f"--output-dir run-{os.getpid()}")
        if flag.split()[0] not in flags.split()
    ]
    sys.argv = [cifar.__file__, *shlex.split(" ".join([flags, *base]))]
    main(cifar.train, cifar.Config, description="")


def test_a_mistake_is_one_line(outcomes: list[tuple[int, str]]) -> None:
    """One test for all cases, so that no other worker of the tests starts them again."""
    wrong = [
        (case, found, text)
        for case, (found, text) in zip(CASES, outcomes, strict=True)
        if not is_one_line(text, case[3]) or found != case[2]
    ]
    assert wrong == []


def is_one_line(text: str, message: str) -> bool:
    return text.count("\n") == 1 and text.startswith("accel_trainer: error[") and message in text


def test_nothing_is_left_of_a_run_that_did_not_start(
    place: Path, outcomes: list[tuple[int, str]]
) -> None:
    assert len(list(place.glob("run-*"))) == 1, "that of the run that works"


@pytest.mark.parametrize(("variables", "flags"), GOOD)
def test_what_only_looks_wrong_works(
    place: Path, tmp_path: Path, variables: dict[str, str], flags: str
) -> None:
    job = processes.run(start_recipe, place, flags, variables, folder=tmp_path)
    assert job.output() == ""
