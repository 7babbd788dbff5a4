"""`--reduce exact`: the same bits on any number of processes, and what it refuses."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn

from accel_trainer import (
    Batch,
    BatchConfig,
    Callback,
    ClassificationTask,
    ConfigError,
    OptimizerConfig,
    RecipeConfig,
    StepOutput,
)
from accel_trainer.core.batch_plan import BatchPlan
from accel_trainer.core.buffers import StepBuffers
from accel_trainer.core.digest import digest_of
from accel_trainer.core.pairwise import PairwiseSum
from accel_trainer.distributed.collectives import sum_pairwise
from accel_trainer.training.strategy.base import StepSums
from accel_trainer.training.strategy.data_parallel import DataParallelStrategy
from accel_trainer.training.strategy.exact import ExactStrategy

from ... import processes, workload
from ...changing_net import NETS, ChangingNet
from ...joined import FSDP, joined_processes
from ...variants import slow_but
from ..test_exactness import final_files, history

PROCESSES = (1, 2, 4)
# 71 samples, 16 a step: the last step of an epoch has 7 samples for 8 micro-batches, so that one is
# empty.
NUM_TRAIN = 71
MICRO = 2
GLOBAL = 16

# --- sums ---


def in_pairs(values: Sequence[float]) -> Tensor:
    """Return the sum by the definition: of the sums of both halves."""
    half = len(values) // 2
    return (
        torch.tensor(values[0]) if half == 0 else in_pairs(values[:half]) + in_pairs(values[half:])
    )


@pytest.mark.parametrize("number", [1, 2, 4, 8, 64])
def test_a_process_adds_up_in_pairs_with_one_partial_sum_for_each_level(number: int) -> None:
    values = (torch.randn(number, generator=torch.Generator().manual_seed(number)) * 1e3).tolist()
    tree = PairwiseSum()
    for value in values:
        tree.add([torch.tensor(value), torch.tensor([value, -value])])
        assert len(tree._partial) <= number.bit_length()
    one, two = tree.total()
    assert torch.equal(one, in_pairs(values))
    assert torch.equal(two, torch.stack([one, -one]))


@pytest.mark.parametrize("num_processes", [2, 4])
def test_processes_add_up_in_the_same_pairs_at_any_length(
    tmp_path: Path, num_processes: int
) -> None:
    processes.run(add_up, num_processes=num_processes, folder=tmp_path)


def add_up() -> None:
    with joined_processes() as accelerator:
        for length in (1, 3, 35, 600_001):
            generator = torch.Generator().manual_seed(5)
            rows = torch.randn(accelerator.num_processes, length, generator=generator) * 1e3
            summed = rows[accelerator.process_index].clone()
            sum_pairwise(summed, accelerator)
            for position in range(0, length, 1 + length // 2000):
                assert summed[position] == in_pairs(rows[:, position].tolist()), (length, position)


def test_torch_does_not_warn_of_the_strides_of_filters_with_one_channel(tmp_path: Path) -> None:
    job = processes.run(reduce_filters, num_processes=2, folder=tmp_path)
    assert "Grad strides" not in job.output(0) + job.output(1)


def reduce_filters() -> None:
    """Reduce gradients with innermost channels: depthwise and 1x1 convolutions of [2, 8, 6, 6]."""
    with joined_processes() as accelerator:
        net = nn.Sequential(nn.Conv2d(8, 16, 3, groups=8), nn.Conv2d(16, 4, 1))
        strides = [tensor.stride() for tensor in net.parameters()]
        model = DataParallelStrategy(accelerator, seed=0).prepare(
            net, {"": torch.optim.SGD(net.parameters(), lr=0.1)}
        )
        images = torch.randn(2, 8, 6, 6).contiguous(memory_format=torch.channels_last)
        model(images).square().sum().backward()
        assert [tensor.grad.stride() for tensor in net.parameters()] == strides


# --- trainings ---


class Counting(ClassificationTask):
    """Divides by items, of which samples have 1 to 4."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return super().step(model, batch)._replace(num_items=batch.sample_ids % 4 + 1)


def config_of(folder: Path, options: Mapping[str, Any]) -> RecipeConfig:
    batch = BatchConfig(
        per_device_batch_size=MICRO,
        global_batch_size=GLOBAL,
        eval_batch_size=4,
        reduce=options.get("reduce", "exact"),
    )
    config = workload.make_config(
        folder,
        batch=batch,
        optimizer=OptimizerConfig(name=options.get("optimizer", "sgd"), learning_rate=0.02),
    )
    trainer = replace(
        config.trainer, max_grad_norm=options.get("clip"), max_steps=options.get("max_steps")
    )
    runtime = replace(config.runtime, mixed_precision=options.get("precision"), num_threads=None)
    return replace(config, trainer=trainer, runtime=runtime)


def train(folder: Path, options: Mapping[str, Any], callbacks: tuple[Callback, ...] = ()) -> None:
    workload.train(
        config_of(folder, options),
        num_train=NUM_TRAIN,
        norm=options.get("norm", "batch"),
        dropout=options.get("dropout", 0.2),
        task=Counting() if options.get("items") else None,
        num_workers=options.get("num_workers"),
        callbacks=callbacks,
        net=NETS.get(options.get("net", "")),
    )


def train_columns(folder: Path, columns: Mapping[str, Mapping[str, Any]]) -> None:
    """Train all columns in turn in the same processes; store a hash of all that each run left."""
    hashes = {}
    for name, options in columns.items():
        train(folder / name, options)
        if os.environ.get("RANK", "0") == "0":
            files = {
                **final_files(folder / name),
                "export": (folder / name / "export/model.safetensors").read_bytes(),
            }
            hashes[name] = {file: hashlib.sha256(data).hexdigest() for file, data in files.items()}
    if hashes:
        (folder / "hashes.json").write_text(json.dumps(hashes))


def hashes_on(
    num_processes: int, columns: Mapping[str, Mapping[str, Any]], tmp_path: Path
) -> dict[str, Any]:
    folder = tmp_path / str(num_processes)
    processes.run(train_columns, folder, columns, num_processes=num_processes, folder=folder)
    return json.loads((folder / "hashes.json").read_text())


SHOWN = {  # of five steps in the first epoch
    "GroupNorm, AdamW, items": {
        "norm": "group",
        "clip": 0.5,
        "optimizer": "adamw",
        "items": True,
        "max_steps": 6,
    },
    "BatchNorm, Muon, bf16, a dataset": {
        "optimizer": "muon",
        "precision": "bf16",
        "num_workers": 0,
        "max_steps": 6,
    },
}
VARIATIONS = {
    "GroupNorm": {"norm": "group", "clip": 0.5, "max_steps": 6},
    "BatchNorm, AdamW, items": {"optimizer": "adamw", "items": True, "max_steps": 6},
    "an assigned buffer": {"net": "assigned", "max_steps": 6},
    "a counter of samples": {"net": "samples", "max_steps": 6},
    "a counter for each class": {"net": "usage", "max_steps": 6},
}


@pytest.mark.parametrize(
    "columns", slow_but([SHOWN], [SHOWN, VARIATIONS]), ids=["shown", "variations"]
)
def test_a_run_leaves_the_same_bytes_on_1_2_and_4_processes(
    columns: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    one, two, four = (hashes_on(number, columns, tmp_path) for number in PROCESSES)
    assert one == two
    assert one == four


def test_a_counter_of_samples_counts_those_of_all_processes(tmp_path: Path) -> None:
    # An epoch, whose last step has 7 samples.
    train(tmp_path / "run", {"net": "samples", "max_steps": 5})
    assert exported(tmp_path / "run", "samples") == NUM_TRAIN


def test_a_counter_of_forwards_counts_steps_on_any_number_of_processes(tmp_path: Path) -> None:
    processes.run(
        train,
        tmp_path / "run",
        {"net": "assigned", "max_steps": 5},
        num_processes=2,
        folder=tmp_path,
    )
    assert (
        exported(tmp_path / "run", "calls")
        == exported(tmp_path / "run", "layers.1.num_batches_tracked")
        == 5
    )


def exported(folder: Path, name: str) -> Tensor:
    return load_file(max((folder / "checkpoints").glob("step-*")) / "model.safetensors")[name]


MATRIX = {
    ", ".join(map(str, values)): dict(
        zip(("optimizer", "norm", "dropout", "clip", "precision"), values, strict=True)
    )
    for values in itertools.product(
        ("sgd", "adamw", "muon"), ("group", "batch"), (0.0, 0.3), (None, 0.5), (None, "bf16")
    )
}


@pytest.mark.slow
def test_exact_runs_of_every_kind_have_one_hash_on_any_processes(tmp_path: Path) -> None:
    one, two, four = (hashes_on(number, MATRIX, tmp_path) for number in PROCESSES)
    different = [name for name in MATRIX if not one[name] == two[name] == four[name]]
    assert (len(one), different) == (48, [])


@pytest.mark.slow
def test_without_it_the_bits_depend_on_the_number(tmp_path: Path) -> None:
    columns = {"float": {"reduce": "float", "norm": "group", "dropout": 0.0}}
    hashes = [hashes_on(number, columns, tmp_path)["float"]["export"] for number in PROCESSES]
    assert len(set(hashes)) == 3


class KillAllAfter(Callback):
    """Kills every process after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, trainer: Any, report: Any) -> None:
        if report.optimizer_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until(folder: Path, options: Mapping[str, Any], step: int | None) -> None:
    train(folder, options, callbacks=() if step is None else (KillAllAfter(step),))


# Each attempt ends two steps after a save or later: the first of these saves is then complete.
ATTEMPTS = {"2, 1": ((2, 4), (1, None)), "4, 2, 1, 4": ((4, 3), (2, 5), (1, 7), (4, None))}


@pytest.mark.parametrize("numbers", slow_but(["2, 1"], ATTEMPTS))
def test_an_exact_run_killed_and_resumed_elsewhere_has_the_same_bytes(
    tmp_path: Path, numbers: str
) -> None:
    """Fault (Resume): a different number of processes with `--reduce exact`, killed on 4, 2 and 1
    processes in turn -> weights, averages, optimizer state and metrics are the same, byte for
    byte, as those of an uninterrupted run on one process
    """
    options = {"clip": 0.5}
    processes.run(train, tmp_path / "whole", options, folder=tmp_path / "log")
    for attempt, (number, step) in enumerate(ATTEMPTS[numbers]):
        arguments = (tmp_path / "parts", options, step)
        job = processes.start(
            train_until, *arguments, num_processes=number, folder=tmp_path / f"log {attempt}"
        )
        codes = job.wait()
        assert (0 if step is None else -signal.SIGKILL) in codes, job.output()
        assert attempt == 0 or "continuing after step" in job.output()
        assert "may differ in the last bits" not in job.output()
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert (whole / "export/model.safetensors").read_bytes() == (
        parts / "export/model.safetensors"
    ).read_bytes()
    assert final_files(whole) == final_files(parts)
    assert manifest(whole) == manifest(parts)
    assert history(whole) == history(parts)


def manifest(folder: Path) -> dict[str, Any]:
    """Return the newest manifest without the number of processes and the size of the times' log."""
    newest = max((folder / "checkpoints").glob("step-*"))
    values = json.loads((newest / "manifest.json").read_text())
    del values["num_processes"], values["files"]["trainer.json"]
    return values


# --- what is refused ---


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"global_batch_size": 48, "per_device_batch_size": 8}, "global batch 48 / --batch-size 8"),
        ({"global_batch_size": 16, "per_device_batch_size": 32}, "global batch 16 / --batch-size"),
        (
            {"global_batch_size": 48, "per_device_batch_size": 12, "num_processes": 3},
            "there are 3: launch 2",
        ),
        (
            {"global_batch_size": 64, "per_device_batch_size": 16, "num_processes": 8},
            "there are 8: launch 4",
        ),
    ],
)
def test_numbers_that_are_not_powers_of_two_are_refused(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BatchPlan(num_samples=100, reduce="exact", **sizes)


@pytest.mark.parametrize("option", [{"accumulation_steps": 2}])
def test_what_changes_the_micro_batches_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="changes the micro-batches: leave it out"):
        BatchConfig(reduce="exact", **option)


def test_too_many_processes_are_refused_before_any_work(tmp_path: Path) -> None:
    job = processes.run(
        train, tmp_path / "run", {"clip": 1.0}, folder=tmp_path / "log", codes=[1, 1, 1]
    )
    assert "there are 3: launch 2" in job.output()
    assert not (tmp_path / "run").exists()


def test_fp16_with_loss_scaling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reduce='exact' does not work with mixed_precision"):
        workload.train(config_of(tmp_path, {}), scaler=torch.amp.GradScaler("cpu"))


def test_a_model_that_normalises_over_processes_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    strategy = ExactStrategy(Accelerator(cpu=True), seed=0, num_micro_batches=2)
    with pytest.raises(ConfigError, match="the model has a SyncBatchNorm: use BatchNorm instead"):
        strategy.prepare(model, {"": torch.optim.SGD(model.parameters(), lr=0.1)})


def test_an_integer_buffer_that_depends_on_the_data_is_refused_on_all(tmp_path: Path) -> None:
    options = {"net": "usage, not declared"}
    job = processes.run(train, tmp_path / "run", options, folder=tmp_path / "log", codes=[1, 1])
    for rank in (0, 1):
        assert (
            "error[REDUCE]: the integer buffer usage changes by 0 in one micro-batch"
            in job.output(rank)
        )
        assert "set summed_buffers = ('usage',) on the model if the changes add up" in job.output(
            rank
        )


class Pointing(nn.Module):
    """A queue like MoCo's: its pointer moves by the samples of a batch and restarts at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("pointer", torch.tensor([6]))
        self.register_buffer("is_full", torch.tensor([False]))

    def forward(self, inputs: Tensor) -> Tensor:
        moved = self.pointer + len(inputs)
        self.is_full |= moved >= 8
        self.pointer = moved % 8
        return self.layer(inputs)


def test_a_pointer_moves_once_a_step_and_a_flag_is_kept() -> None:
    model = Pointing()
    strategy = ExactStrategy(Accelerator(cpu=True), seed=0, num_micro_batches=4)
    model = strategy.prepare(model, {"": torch.optim.SGD(model.parameters(), lr=0.1)})
    buffers = StepBuffers(model)
    for pointer, flag in ((1, True), (4, True), (7, True), (2, True)):
        strategy.begin(buffers)
        buffers.save()
        for index in range(4):
            strategy.begin_forward(0, index)
            model(torch.ones(3, 2)).sum().backward()
            strategy.end_backward(3)
        strategy.finish([StepSums(torch.zeros(()), {}, None)] * 4)
        assert (model.pointer.tolist(), model.is_full.tolist()) == ([pointer], [flag])


class Growing(nn.Module):
    """Remembers the means of all its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("means", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        self.means = torch.cat([self.means, inputs.mean()[None]])
        return self.layer(inputs)


def test_a_buffer_that_grows_is_refused_by_name() -> None:
    strategy = ExactStrategy(Accelerator(cpu=True), seed=0, num_micro_batches=2)
    model = Growing()
    model = strategy.prepare(model, {"": torch.optim.SGD(model.parameters(), lr=0.1)})
    strategy.begin(StepBuffers(model))
    for index in (0, 1):
        strategy.begin_forward(0, index)
        model(torch.ones(3, 2)).sum().backward()
        strategy.end_backward(3)
    with pytest.raises(ConfigError, match=r"the shape of the buffer means from \[1\] to \[2\]"):
        strategy.finish([StepSums(torch.zeros(()), {}, None)] * 2)


@pytest.mark.parametrize("name", ["used", "center"])
def test_a_name_that_is_no_integer_buffer_cannot_be_summed(name: str) -> None:
    model = ChangingNet("usage")
    model.summed_buffers = (name,)
    strategy = ExactStrategy(Accelerator(cpu=True), seed=0, num_micro_batches=2)
    with pytest.raises(
        ConfigError,
        match=f"summed_buffers contains {name}, which is not an integer buffer: list .*usage",
    ):
        strategy.prepare(model, {"": torch.optim.SGD(model.parameters(), lr=0.1)})


def test_a_loss_scale_is_refused() -> None:
    flag = "--mixed-precision fp16"
    strategy = ExactStrategy(Accelerator(cpu=True), seed=0, num_micro_batches=2)
    with pytest.raises(ConfigError, match=f"does not work with {flag}"):
        strategy.refuse(["--compile", flag])
    strategy.refuse(["--compile"])


def test_fsdp_is_refused(tmp_path: Path) -> None:
    job = processes.run(train_sharded, tmp_path / "run", folder=tmp_path / "log", codes=[1, 1])
    assert "error[FSDP]: reduce='exact' does not work with FSDP: leave it out" in job.output()


def train_sharded(folder: Path) -> None:
    os.environ.update(FSDP)
    config = config_of(folder, {})
    workload.train(replace(config, trainer=replace(config.trainer, ema_decay=None)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reduce": "float"}, "batch.reduce: exact -> float"),
        ({"batch_size": 4}, "batch.per_device_batch_size: 2 -> 4"),
        ({"num_threads": 2}, "runtime.num_threads: 1 -> 2"),
    ],
)
def test_a_run_is_not_continued_with_what_gives_other_bits(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    train(tmp_path, {"max_steps": 1})
    config = config_of(tmp_path, change)
    batch = replace(config.batch, per_device_batch_size=change.get("batch_size", MICRO))
    runtime = replace(config.runtime, num_threads=change.get("num_threads"))
    with pytest.raises(ConfigError, match=words):
        workload.train(replace(config, batch=batch, runtime=runtime), num_train=NUM_TRAIN)


class Teacher(nn.Linear):
    """Follows its own weights with a copy, in each forward."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.follower = nn.Linear(5, 3).requires_grad_(False)
        self.follower.load_state_dict(self.state_dict(), strict=False)

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            self.follower.weight.lerp_(self.weight, 0.1)
        return super().forward(input)


class Counted(nn.Linear):
    """Keeps the number of its forwards as extra state."""

    number = 0

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.number)

    def forward(self, input: Tensor) -> Tensor:
        self.number += 1
        return super().forward(input)


def take_steps(strategy: ExactStrategy, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    buffers = StepBuffers(model)
    for step in range(2):
        strategy.begin(buffers)
        buffers.save()
        strategy.begin_forward(step, 0)
        loss = model(torch.ones(2, 5)).sum()
        loss.backward()
        strategy.end_backward(2)
        strategy.finish([StepSums(loss.detach(), {}, None)])
        optimizer.step()


@pytest.mark.parametrize(
    ("model", "name"), [(Teacher(), "follower.weight"), (Counted(5, 3), "_extra_state")]
)
def test_what_a_forward_changes_besides_buffers_is_refused_by_name(
    model: nn.Module, name: str
) -> None:
    strategy = ExactStrategy(Accelerator(cpu=True), seed=0, num_micro_batches=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = strategy.prepare(model, {"": optimizer})
    with pytest.raises(ConfigError, match=f"a forward changes {name}, which is not a buffer"):
        take_steps(strategy, model, optimizer)


def take_turns(folder: Path) -> None:
    """Step parts of a net of which each micro-batch uses some, and write what they become."""
    with joined_processes() as accelerator:
        torch.manual_seed(0)
        net = nn.ModuleList([nn.Linear(3, 1) for _ in range(5)])
        strategy = ExactStrategy(accelerator, seed=0, num_micro_batches=4)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1, weight_decay=0.1)
        strategy.prepare(net, {"": optimizer})
        buffers = StepBuffers(net)
        num_local = 4 // accelerator.num_processes
        for step in range(12):
            draw = random.Random(step)
            used = [draw.sample(range(5), draw.randint(1, 2)) for _ in range(4)]
            strategy.begin(buffers)
            buffers.save()
            for index in range(num_local):
                strategy.begin_forward(step, index)
                place = accelerator.process_index * num_local + index
                inputs = torch.full((2, 3), place + step + 1.0)
                sum(net[part](inputs).sum() for part in used[place]).backward()
                strategy.end_backward(2)
            strategy.finish([StepSums(torch.zeros(()), {}, None)] * num_local)
            reached = {part for parts in used for part in parts}
            for part, layer in enumerate(net):
                assert (layer.weight.grad is None) == (part not in reached), (step, part)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.is_main_process:
            (folder / str(accelerator.num_processes)).write_text(digest_of(net.state_dict()))


def test_a_parameter_that_no_micro_batch_reaches_has_no_gradient(tmp_path: Path) -> None:
    for number in (1, 2, 4):
        processes.run(take_turns, tmp_path, num_processes=number, folder=tmp_path / f"log-{number}")
    assert len({(tmp_path / str(number)).read_text() for number in (1, 2, 4)}) == 1


class Seen(Pointing):
    """Notes in a flag whether it has seen a negative input."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.is_full |= (inputs < 0).any()
        return self.layer(inputs)


def test_the_changes_of_a_flag_do_not_add_up() -> None:
    strategy = ExactStrategy(Accelerator(cpu=True), seed=0, num_micro_batches=2)
    model = Seen()
    strategy.prepare(model, {"": torch.optim.SGD(model.parameters(), lr=0.1)})
    buffers = StepBuffers(model)
    strategy.begin(buffers)
    buffers.save()
    for index in (0, 1):
        strategy.begin_forward(0, index)
        model(torch.full((3, 2), 1.0 - 2 * index)).sum().backward()
        strategy.end_backward(3)
    with pytest.raises(ConfigError, match="the integer buffer is_full changes by 0") as caught:
        strategy.finish([StepSums(torch.zeros(()), {}, None)] * 2)
    assert "summed_buffers" not in str(caught.value)
    model.summed_buffers = ("is_full",)
    with pytest.raises(ConfigError, match="is_full, which is not an integer buffer"):
        strategy.prepare(model, {"": torch.optim.SGD(model.parameters(), lr=0.1)})
