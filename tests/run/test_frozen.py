"""Runs with frozen parameters: resumed, damaged, changed by hand, and with an average."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from accel_trainer import Callback, StepReport, read_history
from accel_trainer.checkpoint.format import FROZEN_FILE, decode_files, list_checkpoints, read_files
from accel_trainer.core.errors import CheckpointError
from accel_trainer.optim.ema import Ema
from accel_trainer.training.callback import TrainerView

from .. import workload
from ..training.test_exactness import final_files

STEPS = 6


class WithBase(nn.Module):
    """A small net of which only the head is trained."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = workload.SmallNet(norm="group")
        self.net.requires_grad_(False)
        self.net.layers[-1].requires_grad_(True)

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    @property
    def base(self) -> nn.Parameter:
        return self.net.layers[0].weight


class Teacher(Callback):
    """Changes a parameter that no optimizer steps, as a momentum teacher does, from a step on."""

    def __init__(self, first_step: int, change: Callable[[Tensor], object]) -> None:
        self._first_step = first_step
        self._change = change

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        if report.optimizer_step >= self._first_step:
            with torch.no_grad():
                self._change(trainer.model.base)


def train(
    folder: Path,
    *,
    max_steps: int = STEPS,
    net: Callable[[], nn.Module] = WithBase,
    callbacks: tuple[Callback, ...] = (),
    init_from: Path | None = None,
    states: Mapping[str, object] = MappingProxyType({}),
    is_first_best: bool = False,
) -> None:
    config = workload.make_config(folder)
    config = replace(config, run=replace(config.run, init_from=init_from))
    decided: dict[str, Any] = (
        {"monitor": "eval/loss", "monitor_mode": "max"} if is_first_best else {}
    )
    config = replace(config, trainer=replace(config.trainer, max_steps=max_steps, **decided))
    workload.train(config, net=net, callbacks=callbacks, states=states)


def in_two_parts(folder: Path, **options: Callable[[], nn.Module] | tuple[Callback, ...]) -> None:
    train(folder, max_steps=3, **options)  # type: ignore[arg-type]
    train(folder, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train(folder)
    return folder


def test_a_run_that_continues_ends_with_the_same_files_and_shares_one(
    tmp_path: Path, whole: Path
) -> None:
    in_two_parts(tmp_path)
    assert final_files(tmp_path) == final_files(whole)
    shared = [path / FROZEN_FILE for path in list_checkpoints(tmp_path / "checkpoints")]
    assert len({path.stat().st_ino for path in shared}) == 1
    newest = shared[-1].parent
    names = {name for name, _ in WithBase().named_parameters() if "layers.9" not in name}
    assert load_file(newest / FROZEN_FILE).keys() == names
    for piece in ("model", "ema"):
        assert not names & load_file(newest / f"{piece}.safetensors").keys()


@pytest.mark.parametrize("is_deleted", [False, True])
def test_what_is_damaged_is_taken_from_the_model_as_it_was_built(
    tmp_path: Path, whole: Path, is_deleted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, max_steps=3)
    newest = list_checkpoints(tmp_path / "checkpoints")[-1]
    for path in list_checkpoints(tmp_path / "checkpoints"):
        (path / FROZEN_FILE).unlink() if is_deleted else None
    if not is_deleted:
        (newest / FROZEN_FILE).write_bytes(b"\xff" * (newest / FROZEN_FILE).stat().st_size)
    with caplog.at_level(logging.WARNING):
        train(tmp_path)
    told = [each.getMessage() for each in caplog.records if FROZEN_FILE in each.getMessage()]
    assert newest.name in told[-1]
    assert "skipping" not in told[-1]
    assert final_files(tmp_path) == final_files(whole)
    path = list_checkpoints(tmp_path / "checkpoints")[-1]
    decode_files(read_files(path), path)


def test_damage_that_the_model_cannot_repair_is_refused(tmp_path: Path) -> None:
    train(tmp_path, max_steps=3)
    newest = list_checkpoints(tmp_path / "checkpoints")[-1]
    (newest / FROZEN_FILE).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"CKPT_DAMAGED.*{FROZEN_FILE}"):
        train(tmp_path, net=lambda: WithBase(seed=1))


def test_a_checkpoint_whose_own_file_is_good_is_preferred_to_repairs(
    tmp_path: Path, whole: Path
) -> None:
    """Fault (Corruption): the file of frozen parameters, which all checkpoints of a run share, is
    damaged or missing -> a resume prefers a checkpoint that has an intact file of its own. If
    there is none, it takes the frozen parameters from the newly built model, provided that they
    match the SHA-256 in the manifest, and says so; otherwise it ends with an error. So do
    `--init-from` and the export of the best checkpoint, and the next save repairs the file for
    all
    """
    train(tmp_path, max_steps=3)
    before, newest = list_checkpoints(tmp_path / "checkpoints")[-2:]
    own = (before / FROZEN_FILE).read_bytes()
    (before / FROZEN_FILE).unlink()
    (before / FROZEN_FILE).write_bytes(own)  # as a copy of the folder has it
    (newest / FROZEN_FILE).unlink()
    train(tmp_path, net=lambda: WithBase(seed=1))
    assert final_files(tmp_path) == final_files(whole)


def test_damage_is_repaired_by_the_weights_that_the_run_began_with(
    tmp_path: Path, whole: Path
) -> None:
    folder = tmp_path / "run"
    export = whole / "export" / "model.safetensors"
    train(folder, max_steps=3, init_from=export)
    for path in list_checkpoints(folder / "checkpoints"):
        (path / FROZEN_FILE).unlink()
    train(folder, net=lambda: WithBase(seed=1), init_from=export)
    train(tmp_path / "whole", init_from=export)
    assert final_files(folder) == final_files(tmp_path / "whole")


def averages(folder: Path) -> dict[str, Tensor]:
    path = list_checkpoints(folder / "checkpoints")[-1]
    found: dict[str, Tensor] = decode_files(read_files(path), path).pieces["ema"]
    return {name: tensor.clone() for name, tensor in found.items()}


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda base: base.mul_(0.9),
    "by data": lambda base: base.data.mul_(0.9),
    "by new data": lambda base: setattr(base, "data", base.data * 0.9),
}


@pytest.mark.parametrize("first_step", [1, 4])
@pytest.mark.parametrize("change", CHANGES)
def test_a_teacher_is_averaged_and_resumed_as_if_nothing_were_shared(
    tmp_path: Path, change: str, first_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = (Teacher(first_step, CHANGES[change]),)
    in_two_parts(tmp_path / "parts", callbacks=teacher)
    train(tmp_path / "whole", callbacks=teacher)
    assert final_files(tmp_path / "parts") == final_files(tmp_path / "whole")
    monkeypatch.setattr(Ema, "share", lambda self: None)
    train(tmp_path / "apart", callbacks=teacher)
    apart, shared = averages(tmp_path / "apart"), averages(tmp_path / "whole")
    assert all(torch.equal(apart[name], shared[name]) for name in apart)


class Thaw(Callback):
    """Lets a parameter that no optimizer steps require a gradient from a step on."""

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        trainer.model.base.requires_grad_(report.optimizer_step >= 3)


def norms(folder: Path) -> list[object]:
    rows = read_history(folder)
    return [row["optim/grad_norm"] for row in rows if "optim/grad_norm" in row]


def test_a_gradient_that_no_optimizer_steps_by_is_not_clipped(tmp_path: Path, whole: Path) -> None:
    """Nothing clears it: the norm would depend on the step at which the run resumed."""
    train(tmp_path, callbacks=(Thaw(),))
    assert norms(tmp_path) == norms(whole)
    assert len(norms(whole)) == 3
    assert final_files(tmp_path) == final_files(whole)


class Unfreeze(Callback):
    """Gives the optimizer a parameter more at a step."""

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        if report.optimizer_step == 4:
            base = trainer.model.base.requires_grad_(True)
            group = {"params": [base], "param_names": ["net.layers.0.weight"]}
            trainer.optimizer.add_param_group(group)


def test_a_parameter_that_begins_to_train_gets_an_average_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "shared", callbacks=(Unfreeze(),))
    monkeypatch.setattr(Ema, "share", lambda self: None)
    train(tmp_path / "apart", callbacks=(Unfreeze(),))
    apart, shared = averages(tmp_path / "apart"), averages(tmp_path / "shared")
    assert all(torch.equal(apart[name], shared[name]) for name in apart)
    path = list_checkpoints(tmp_path / "shared" / "checkpoints")[-1]
    weights = load_file(path / "model.safetensors")
    assert not torch.equal(weights["net.layers.0.weight"], WithBase().base)


class Beside:
    """Keeps the frozen parameters of a module by their names."""

    def __init__(self, module: nn.Module) -> None:
        named = module.named_parameters()
        self.tensors = {name: each.detach() for name, each in named if not each.requires_grad}
        self.loaded: Mapping[str, object] = {}

    def state_dict(self) -> Mapping[str, object]:
        return self.tensors

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.loaded = state


class Counted(Beside):
    def state_dict(self) -> Mapping[str, object]:
        return {**self.tensors, "n": 3}


STATES: dict[str, Callable[[WithBase], Beside]] = {
    "kept": Beside,  # as a tensor of this piece has the model's name
    "net": lambda model: Counted(model.net),  # as its name and its key give the model's name
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_equals_frozen_parameters_resumes(
    tmp_path: Path, whole: Path, name: str
) -> None:
    for max_steps in (3, STEPS):
        net = WithBase()
        state = STATES[name](net)
        train(tmp_path, max_steps=max_steps, net=lambda net=net: net, states={name: state})
    assert state.loaded.keys() == state.state_dict().keys()
    exported = "export/model.safetensors"
    assert (tmp_path / exported).read_bytes() == (whole / exported).read_bytes()


def flip_a_bit(folder: Path) -> None:
    """Damage the file that all checkpoints share."""
    path = list_checkpoints(folder / "checkpoints")[-1] / FROZEN_FILE
    with path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))


def test_the_best_checkpoint_survives_a_bit_in_the_shared_file(tmp_path: Path) -> None:
    for name in ("whole", "damaged", "damaged late"):
        train(tmp_path / name, max_steps=7, is_first_best=True)
        flip_a_bit(tmp_path / name) if name == "damaged" else None
        late = (FlipsAtTheEnd(),) if name == "damaged late" else ()
        train(tmp_path / name, max_steps=9, is_first_best=True, callbacks=late)
    assert final_files(tmp_path / "damaged") == final_files(tmp_path / "whole")
    exported = "export/model.safetensors"
    for name in ("damaged", "damaged late"):
        assert (tmp_path / name / exported).read_bytes() == (
            tmp_path / "whole" / exported
        ).read_bytes()
        best = json.loads((tmp_path / name / "export/config.json").read_text())["weights"]
        assert "best checkpoint step-0000000005" in best
    for path in list_checkpoints(tmp_path / "damaged" / "checkpoints"):
        decode_files(read_files(path), path)  # all were written again


class FlipsAtTheEnd(Callback):
    """Damages the shared file after the last save, before the export."""

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        self.is_last = report.optimizer_step == 9

    def on_evaluate_end(self, trainer: TrainerView, metrics: Mapping[str, object]) -> None:
        if self.is_last:
            flip_a_bit(trainer.log.folder)


def test_weights_to_start_from_survive_a_bit_in_the_shared_file(tmp_path: Path) -> None:
    train(tmp_path / "run", max_steps=3)
    train(tmp_path / "before", max_steps=2, init_from=tmp_path / "run")
    flip_a_bit(tmp_path / "run")
    train(tmp_path / "after", max_steps=2, init_from=tmp_path / "run")
    exported = "export/model.safetensors"
    before = (tmp_path / "before" / exported).read_bytes()
    assert (tmp_path / "after" / exported).read_bytes() == before
    with pytest.raises(CheckpointError, match="CKPT_NONE_VALID"):
        train(tmp_path / "other", net=lambda: WithBase(seed=1), init_from=tmp_path / "run")
