from __future__ import annotations

import copy
import inspect
import itertools
import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules._functions import SyncBatchNorm as FusedSyncBatchNorm

from accel_trainer import BatchConfig
from accel_trainer.core.errors import ConfigError
from accel_trainer.distributed.sync_batch_norm import convert_sync_batch_norm

from .. import processes, workload
from ..joined import joined_processes
from ..training.test_exactness import largest_difference

CPU = torch.device("cpu")
SHARES = [(4, 4), (1, 7), (0, 8), (3, 0, 5), (2, 2, 2), (0, 0, 2)]
SHAPES = [(), (5,), (4, 3), (2, 3, 2)]
OPTIONS = [(True, True, 0.1), (False, True, None), (True, False, 0.1)]  # affine, tracked, momentum
CHANNELS = 6


@pytest.mark.parametrize("num_processes", [2, 3])
def test_any_split_of_a_batch_is_normalised_like_the_whole_one(
    tmp_path: Path, num_processes: int
) -> None:
    processes.run(check_all_shares, num_processes=num_processes, folder=tmp_path)


def check_all_shares() -> None:
    with joined_processes() as accelerator:
        for shares in (shares for shares in SHARES if len(shares) == accelerator.num_processes):
            for shape, (affine, tracked, momentum) in itertools.product(SHAPES, OPTIONS):
                norm = native(
                    len(shape), affine=affine, track_running_stats=tracked, momentum=momentum
                )
                check_steps(norm, shares, shape, accelerator)


def native(spatial_dims: int, **options: object) -> nn.Module:
    kinds = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    norm = kinds[spatial_dims](CHANNELS, eps=1e-4, **options).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(CHANNELS, generator=generator, dtype=torch.float64))
    return norm


def check_steps(
    norm: nn.Module,
    shares: tuple[int, ...],
    shape: tuple[int, ...],
    accelerator: Accelerator,
) -> None:
    synced = convert_sync_batch_norm(copy.deepcopy(norm), device=CPU)
    assert type(synced) is type(norm)
    for step in range(2):
        for parameter in (*norm.parameters(), *synced.parameters()):
            parameter.grad = None
        generator = torch.Generator().manual_seed(step)
        whole = 5 + 3 * torch.randn(
            sum(shares), CHANNELS, *shape, generator=generator, dtype=torch.float64
        )
        loss_weights = torch.randn(whole.shape, generator=generator, dtype=torch.float64)
        mine = whole.split(shares)[accelerator.process_index].clone().requires_grad_()
        whole.requires_grad_()

        expected = norm(whole)
        (expected * loss_weights).sum().backward()
        output = synced(mine)
        (output * loss_weights.split(shares)[accelerator.process_index]).sum().backward()

        def my_share(of: Tensor) -> Tensor:
            return of.split(shares)[accelerator.process_index]

        assert_equal(output, my_share(expected))
        assert_equal(mine.grad, my_share(whole.grad))
        for own, theirs in zip(synced.parameters(), norm.parameters(), strict=True):
            assert_equal(accelerator.reduce(own.grad, reduction="sum"), theirs.grad)
        for own, theirs in zip(synced.buffers(), norm.buffers(), strict=True):
            assert_equal(own, theirs)


class NormAct(nn.BatchNorm2d):
    """A norm with an activation behind it, which calls `batch_norm` itself, as timm's norms do."""

    def forward(self, images: Tensor) -> Tensor:
        factor = self.momentum or 0.0
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        statistics = (
            (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        )
        normed = F.batch_norm(
            images,
            *statistics,
            self.weight,
            self.bias,
            self.training or statistics[0] is None,
            factor,
            self.eps,
        )
        return F.silu(normed)


class Doubled(nn.BatchNorm1d):
    """A norm that adds to what torch's own forward gives, by whatever number of arguments."""

    def forward(self, features: Tensor, scale: float = 2.0) -> Tensor:
        return super().forward(features) * scale


class Lower(nn.BatchNorm2d):
    """A norm that calls the function below `torch.nn`."""

    def forward(self, images: Tensor) -> Tensor:
        running = self.running_mean, self.running_var
        return torch.batch_norm(
            images, self.weight, self.bias, *running, self.training, 0.2, self.eps, False
        )


def test_a_subclass_of_batch_norm_keeps_its_forward_over_all_processes(tmp_path: Path) -> None:
    processes.run(check_subclasses, num_processes=2, folder=tmp_path)


def check_subclasses() -> None:
    with joined_processes() as accelerator:
        for shares in ((4, 4), (1, 7), (0, 8)):
            for kind, shape in ((NormAct, (4, 3)), (Doubled, (5,))):
                for affine, tracked, momentum in OPTIONS:
                    norm = kind(
                        CHANNELS, affine=affine, track_running_stats=tracked, momentum=momentum
                    ).double()
                    check_steps(norm, shares, shape, accelerator)
        evaluated = convert_sync_batch_norm(NormAct(CHANNELS), device=CPU).eval()
        # A collective here would wait for the other process in vain
        if accelerator.is_main_process:
            evaluated(torch.zeros(2, CHANNELS, 4, 4))


class ActNet(workload.SmallNet):
    """The small net with norms that have an activation of their own."""

    def __init__(self, *, norm: str, dropout: float = 0.0) -> None:
        super().__init__(norm=norm, dropout=dropout)
        self.layers[1] = NormAct(8)
        self.layers[4] = NormAct(8)


def train_act_net(folder: Path, num_processes: int) -> None:
    workload.SmallNet = ActNet  # type: ignore[misc]
    batch = BatchConfig(per_device_batch_size=24 // num_processes, eval_batch_size=10)
    config = workload.make_config(folder, batch=batch)
    workload.train(config, num_train=72, dtype=torch.float64)


def test_norms_of_another_library_train_the_same_on_one_and_two_processes(tmp_path: Path) -> None:
    results = []
    for num_processes in (1, 2):
        folder = tmp_path / str(num_processes)
        logs = tmp_path / f"logs-{num_processes}"
        processes.run(
            train_act_net, folder, num_processes, num_processes=num_processes, folder=logs
        )
        results.append(json.loads((folder / "result.json").read_text())["metrics"])
    assert largest_difference(tmp_path / "1", tmp_path / "2") <= 1e-12
    assert results[0]["eval/loss"] == pytest.approx(results[1]["eval/loss"], rel=1e-12)


class OwnMath(nn.BatchNorm2d):
    """A norm that torch's function has no part in."""

    def forward(self, images: Tensor) -> Tensor:
        return images - images.mean((0, 2, 3), keepdim=True)


def test_a_norm_that_cannot_span_processes_is_one_line_with_the_way_out(tmp_path: Path) -> None:
    processes.run(check_own_math, num_processes=2, folder=tmp_path)


def check_own_math() -> None:
    with joined_processes():
        images = torch.randn(2, CHANNELS, 4, 4)
        for kind in (OwnMath, Lower):
            norm = convert_sync_batch_norm(kind(CHANNELS), device=CPU)
            said = f"{kind.__name__} does not call F.batch_norm, .*--runtime.no-sync-batch-norm"
            with pytest.raises(ConfigError, match=said) as caught:
                norm(images)
            assert "\n" not in str(caught.value)
            norm.eval()(images)


@pytest.mark.slow
def test_a_net_with_norms_of_another_library_can_be_compiled(tmp_path: Path) -> None:
    processes.run(check_compiled, num_processes=2, folder=tmp_path)


def check_compiled() -> None:
    with joined_processes() as accelerator:
        norm = convert_sync_batch_norm(NormAct(CHANNELS), device=CPU)
        images = torch.randn(
            4, CHANNELS, 4, 4, generator=torch.Generator().manual_seed(accelerator.process_index)
        )
        model = nn.Sequential(nn.ReLU(), norm, nn.ReLU())
        compiled = torch.compile(model, backend="eager")
        assert torch.equal(compiled(images), model(images))


def test_a_copy_of_a_converted_norm_is_a_norm_of_its_own(tmp_path: Path) -> None:
    processes.run(check_copy, num_processes=2, folder=tmp_path)


def check_copy() -> None:
    with joined_processes():
        norm = convert_sync_batch_norm(NormAct(CHANNELS), device=CPU)
        copied = copy.deepcopy(norm)
        copied(torch.randn(4, CHANNELS, 4, 4))
        assert copied.running_mean.any()
        assert not norm.running_mean.any()


def test_what_a_norm_becomes_depends_on_its_class_and_the_device() -> None:
    def kinds(device: str) -> list[type]:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm2d(4), NormAct(4), nn.SyncBatchNorm(4))
        return [
            type(module) for module in convert_sync_batch_norm(model, device=torch.device(device))
        ]

    assert kinds("cpu") == [nn.BatchNorm1d, nn.BatchNorm2d, NormAct, nn.SyncBatchNorm]
    assert kinds("cuda") == [nn.SyncBatchNorm, nn.SyncBatchNorm, NormAct, nn.SyncBatchNorm]


def test_the_fused_norm_of_torch_takes_what_it_is_given() -> None:
    """It only runs on GPUs: here its arguments are all that can be checked."""
    expected = (
        "self input weight bias running_mean running_var eps momentum process_group world_size"
    )
    assert list(inspect.signature(FusedSyncBatchNorm.forward).parameters) == expected.split()


def test_a_norm_without_a_bias_stays_without_one() -> None:
    norm = nn.BatchNorm2d(4)
    # What the argument `bias` does, which torch 2.13 has and 2.11 lacks.
    norm.register_parameter("bias", None)
    names = list(norm.state_dict())
    converted = convert_sync_batch_norm(norm, device=CPU)
    assert "bias" not in names
    assert list(converted.state_dict()) == names


def assert_equal(mine: Tensor | None, theirs: Tensor | None) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_half_precision_is_normalised_in_float32_and_keeps_its_dtype(tmp_path: Path) -> None:
    processes.run(check_half_precision, num_processes=2, folder=tmp_path)


def check_half_precision() -> None:
    with joined_processes() as accelerator:
        norm = nn.BatchNorm2d(CHANNELS)
        synced = convert_sync_batch_norm(copy.deepcopy(norm), device=CPU)
        generator = torch.Generator().manual_seed(0)
        whole = (40 + torch.randn(64, CHANNELS, 4, 4, generator=generator)).bfloat16()
        output = synced(whole.chunk(2)[accelerator.process_index])
        expected = norm(whole).chunk(2)[accelerator.process_index]
        assert output.dtype == expected.dtype == torch.bfloat16
        # The two round the same numbers to bfloat16; a few fall on the other side of a tie.
        torch.testing.assert_close(output, expected, rtol=2**-7, atol=2**-7)
        torch.testing.assert_close(synced.running_var, norm.running_var, rtol=1e-5, atol=1e-5)


def test_evaluation_needs_no_other_process(tmp_path: Path) -> None:
    processes.run(evaluate_on_one_alone, num_processes=2, folder=tmp_path)


def evaluate_on_one_alone() -> None:
    with joined_processes() as accelerator:
        norm = native(2)
        norm(torch.randn(8, CHANNELS, 4, 3, dtype=torch.float64))
        synced = convert_sync_batch_norm(copy.deepcopy(norm), device=CPU).eval()
        # A collective here would wait for the other process in vain
        if accelerator.is_main_process:
            images = torch.randn(8, CHANNELS, 4, 3, dtype=torch.float64)
            assert torch.equal(synced(images), norm.eval()(images))
            assert torch.equal(synced(images[:0]), images[:0])


def test_without_other_processes_it_is_the_native_norm() -> None:
    norm = native(2)
    synced = convert_sync_batch_norm(copy.deepcopy(norm), device=CPU)
    images = torch.randn(8, CHANNELS, 4, 3, dtype=torch.float64)
    assert torch.equal(synced(images), norm(images))
    assert torch.equal(synced.running_var, norm.running_var)
    theirs = convert_sync_batch_norm(nn.SyncBatchNorm(CHANNELS).double(), device=CPU)
    assert torch.equal(theirs(images), nn.BatchNorm2d(CHANNELS).double()(images))


def test_conversion_keeps_names_tensors_modes_and_other_modules() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, eps=1e-3, momentum=0.2),
        nn.Sequential(
            nn.BatchNorm1d(5, affine=False), nn.BatchNorm3d(5, track_running_stats=False)
        ),
        nn.BatchNorm2d(4).bfloat16(),
        nn.InstanceNorm2d(4),
    )
    model[1].bias.requires_grad_(False)
    model[2][0].eval()
    before = dict(model.state_dict(keep_vars=True))
    converted = convert_sync_batch_norm(model, device=CPU)
    assert converted is model
    after = dict(converted.state_dict(keep_vars=True))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)  # an optimizer over them stays right
    spans = [
        "forward" in vars(module) for module in (model[0], model[1], *model[2], model[3], model[4])
    ]
    assert spans == [False, True, True, True, True, False]
    assert (model[1].eps, model[1].momentum, model[1].training) == (1e-3, 0.2, True)
    assert not model[2][0].training
    assert model[2][1].running_mean is None


def test_batch_norms_take_a_short_step_with_unequal_micro_batches(tmp_path: Path) -> None:
    processes.run(train_uneven_steps, tmp_path / "run", num_processes=2, folder=tmp_path / "logs")


def train_uneven_steps(folder: Path) -> None:
    """29 samples are left for the last step batch: 14 and 1 for one process, 14 for the other."""
    batch = BatchConfig(per_device_batch_size=14, accumulation_steps=2, eval_batch_size=10)
    result = workload.train(
        workload.make_config(folder, batch=batch), num_train=56 + 29, norm="batch"
    )
    assert result.position.samples_seen == 2 * 85
