"""Checkpoints of shards: each process writes its own, and any number of processes resumes from
them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from accel_trainer import CheckpointError
from accel_trainer.checkpoint.format import decode_files, read_files
from accel_trainer.checkpoint.loading import load_checkpoint
from accel_trainer.checkpoint.sharded import StoredTensor, load_whole, stored_tensors
from accel_trainer.cli.main import main
from tests import processes
from tests.checkpoint.sharded_run import flat, newest, run, stored_bytes, train
from tests.variants import slow

Shown = pytest.CaptureFixture[str]
READS_ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that was stopped after its second step."""
    folder = tmp_path_factory.mktemp("two") / "run"
    run(folder, 2, steps=2)
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, to its end."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run(folder, 2)
    return folder


@pytest.fixture
def stopped(run_of_two: Path, tmp_path: Path) -> Path:
    """A copy of that run, to change."""
    return Path(shutil.copytree(run_of_two, tmp_path / "run"))


# --- what is saved is what is loaded ---


SHORT_CHAIN = [(2, "sharded"), (3, "sharded"), (1, "whole")]
SHARDED_CHAIN = [(4, "sharded"), (2, "sharded"), (3, "sharded"), (1, "whole")]
MIXED_CHAIN = [
    (1, "whole"),
    (3, "sharded"),
    (2, "gathered"),
    (2, "sharded"),
    (2, "whole"),
    (4, "sharded"),
]


@pytest.mark.parametrize("chain", [SHORT_CHAIN, *slow([(SHARDED_CHAIN,), (MIXED_CHAIN,)])])
def test_tensors_are_the_same_on_any_number_of_processes_sharded_or_whole(
    tmp_path: Path, chain: list[tuple[int, str]]
) -> None:
    """Fault (Sharded checkpoints): a resume on a different number of processes, without sharding,
    or sharded from an unsharded checkpoint -> every tensor has the same bits
    """
    for step, (num_processes, kind) in enumerate(chain, start=1):
        output = run(tmp_path / "run", num_processes, kind, steps=step)
        assert step == 1 or f"resumed at step {step - 1} with the same" in output
        checkpoint = newest(tmp_path / "run")
        assert (checkpoint / "model.safetensors").exists() == (kind != "sharded")
        assert len(list(checkpoint.glob("model/*"))) == (num_processes if kind == "sharded" else 0)


def test_the_export_of_shards_is_whole(run_of_two: Path) -> None:
    exported = load_file(run_of_two / "export" / "model.safetensors")
    loaded = load_checkpoint(run_of_two / "checkpoints")
    assert loaded is not None
    assert flat(exported) == flat(loaded.pieces["ema"])


@READS_ALONE
@pytest.mark.parametrize("piece", ["model", "ema", "optimizer"])
def test_the_reader_of_torch_reads_the_same_tensors(run_of_two: Path, piece: str) -> None:
    tensors = load_whole_piece(newest(run_of_two), piece)
    state = {
        key: torch.full(tensor.shape, 7, dtype=tensor.dtype) for key, tensor in tensors.items()
    }
    reader = dcp.HuggingFaceStorageReader(str(newest(run_of_two) / piece))
    assert reader.read_metadata().state_dict_metadata.keys() == tensors.keys()
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert flat(state) == flat(tensors)


def load_whole_piece(checkpoint: Path, piece: str) -> dict[str, Tensor]:
    """Return the tensors of a piece by their names in its files."""
    slices = decode_files(read_files(checkpoint), checkpoint).slices
    tensors = stored_tensors([each for each in slices if each.path.parent.name == piece])
    return {key: load_whole(tensor) for key, tensor in tensors.items()}


# --- damage ---


def verify(checkpoint: Path) -> None:
    for stored in decode_files(read_files(checkpoint), checkpoint).slices:
        stored.read()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def link_elsewhere(checkpoint: Path) -> None:
    (checkpoint / "ema").rename(checkpoint.parent / "elsewhere")
    (checkpoint / "ema").symlink_to(checkpoint.parent / "elsewhere")


def swap(checkpoint: Path) -> None:
    first, second = (checkpoint / "model" / f"r0000{index}.safetensors" for index in (0, 1))
    first.rename(checkpoint / "aside")
    second.rename(first)
    (checkpoint / "aside").rename(second)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a byte of a slice": (
        lambda c: flip(c / "model/r00001.safetensors", -3),
        "the sha256 of layers.*is not the one",
    ),
    "a byte of a header": (
        lambda c: flip(c / "model/r00001.safetensors", 20),
        "the sha256 of its header is not",
    ),
    "swapped": (swap, "model/r00000.safetensors: the sha256 of its header is not"),
    "link": (link_elsewhere, "ema: it is a link"),
    "missing": (
        lambda c: (c / "ema/r00001.safetensors").unlink(),
        "ema/r00001.safetensors: No such file",
    ),
    "cut short": (
        lambda c: (c / "ema/r00001.safetensors").write_bytes(b""),
        "ema/r00001.safetensors: it ends after 0 bytes",
    ),
    "of another piece": (
        lambda c: shutil.copy(c / "ema/r00000.safetensors", c / "model/r00000.safetensors"),
        "the sha256 of its header is not the one in the manifest",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_what_was_saved_is_named(stopped: Path, damage: str, capsys: Shown) -> None:
    """Fault (Sharded checkpoints): a file of shards is missing, truncated, or swapped with that of
    a different process or part of the state -> this counts as damage: a warning names the file,
    and the previous checkpoint is used
    """
    act, message = DAMAGES[damage]
    checkpoint, older = newest(stopped), min((stopped / "checkpoints").glob("step-*"))
    act(checkpoint)
    assert main(["inspect", str(checkpoint)]) == 74
    assert "DAMAGED" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=rf"CKPT_DAMAGED.*{message}"):
        verify(checkpoint)
    loaded = load_checkpoint(stopped / "checkpoints")
    assert loaded is not None
    assert loaded.name == older.name


@READS_ALONE
def test_the_reader_of_torch_takes_the_byte_that_ours_refuses(stopped: Path) -> None:
    folder = newest(stopped) / "model"
    before = load_whole_piece(newest(stopped), "model")
    flip(folder / "r00001.safetensors", -3)
    state = {key: torch.zeros_like(tensor) for key, tensor in before.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert flat(state) != flat(before)
    with pytest.raises(CheckpointError, match="CKPT_DAMAGED"):
        load_whole_piece(newest(stopped), "model")


def test_files_of_another_number_of_processes_are_ignored_or_refused(
    stopped: Path, tmp_path: Path
) -> None:
    """Fault (Sharded checkpoints): the folder contains files of a run with a different number of
    processes -> they are ignored, unless they replace a file of the checkpoint, which counts as
    damage
    """
    checkpoint = newest(stopped)
    run(tmp_path / "of-three", 3, steps=1)
    theirs = newest(tmp_path / "of-three")
    shutil.copy(theirs / "model" / "r00002.safetensors", checkpoint / "model")
    assert load_whole_piece(checkpoint, "model")
    shutil.copy(theirs / "model" / "r00001.safetensors", checkpoint / "model")
    with pytest.raises(CheckpointError, match=r"CKPT_DAMAGED.*model/r00001.safetensors"):
        read_files(checkpoint)


def test_all_processes_pass_over_a_checkpoint_with_a_damaged_slice(
    stopped: Path, undisturbed: Path
) -> None:
    """Fault (Sharded checkpoints): one byte of a slice has changed -> this counts as damage: a
    warning names the file, and the previous checkpoint is used; all processes fall back
    together. Torch's own reader would accept it
    """
    checkpoint = newest(stopped)
    flip(checkpoint / "optimizer" / "r00001.safetensors", -3)
    output = run(stopped, 2)
    assert "r00001.safetensors: the sha256 of optimizer.state" in output
    assert "resumed at step 1 with the same" in output
    assert list((stopped / "checkpoints").glob(f"*-{checkpoint.name}"))
    assert stored_bytes(newest(stopped)) == stored_bytes(newest(undisturbed))


def test_damaged_slices_in_all_checkpoints_end_the_run_and_rename_none(stopped: Path) -> None:
    checkpoints = sorted((stopped / "checkpoints").glob("step-*"))
    for checkpoint in checkpoints:
        flip(checkpoint / "optimizer" / "r00001.safetensors", -3)
    job = processes.run(
        train, stopped, "sharded", None, "adamw", folder=stopped.with_name("failed"), codes=[1, 1]
    )
    assert "CKPT_NONE_VALID" in job.output()
    assert sorted((stopped / "checkpoints").glob("*step-*")) == checkpoints


def test_inspect_lists_the_files_of_all_processes(run_of_two: Path, capsys: Shown) -> None:
    assert main(["inspect", str(run_of_two)]) == 0
    shown = capsys.readouterr().out
    assert all(f"model/r0000{rank}.safetensors" in shown for rank in (0, 1))


# --- memory ---


def test_a_part_of_a_tensor_is_read_only_from_the_slices_that_hold_it(run_of_two: Path) -> None:
    checkpoint = newest(run_of_two)
    stored = decode_files(read_files(checkpoint), checkpoint).pieces["model"]["layers.3.weight"]
    assert isinstance(stored, StoredTensor)
    whole = load_whole(stored)
    lost = StoredTensor(stored.shape, stored.dtype, [stored.slices[0]])
    assert torch.equal(lost.read([1, 0, 0, 0], [3, 8, 3, 3]), whole[1:4])
    assert torch.equal(stored.read([3, 2, 0, 1], [2, 4, 3, 2]), whole[3:5, 2:6, :, 1:])


def test_headers_say_what_any_reader_needs(run_of_two: Path) -> None:
    with safe_open(newest(run_of_two) / "model" / "r00001.safetensors", "pt") as file:
        metadata = file.metadata()
        assert json.loads(metadata["DCP_SHARDING_INFO"])["layers.3.weight"]["saved_offsets"] == [
            4,
            0,
            0,
            0,
        ]
        assert file.get_slice("layers.3.weight").get_shape() == [4, 8, 3, 3]
        assert "layers.1.running_mean" not in file.keys()  # noqa: SIM118  # no mapping
