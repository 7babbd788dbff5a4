from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_trainer import BatchConfig
from accel_trainer.sync_batch_norm import CpuSyncBatchNorm, convert_sync_batch_norm

from . import processes, workload
from .joined import joined_processes

CPU = torch.device("cpu")
SHARES = [(4, 4), (1, 7), (0, 8), (3, 0, 5), (2, 2, 2), (0, 0, 2)]
SHAPES = [(), (5,), (4, 3), (2, 3, 2)]
OPTIONS = [(True, True, 0.1), (False, True, None), (True, False, 0.1)]  # affine, tracked, momentum
CHANNELS = 6


@pytest.mark.parametrize("num_processes", [2, 3])
def test_any_shares_of_a_batch_are_normalised_like_the_whole_one(tmp_path: Path, num_processes: int) -> None:
    processes.run(check_all_shares, num_processes=num_processes, folder=tmp_path)


def check_all_shares() -> None:
    with joined_processes() as accelerator:
        for shares in (shares for shares in SHARES if len(shares) == accelerator.num_processes):
            for shape, (affine, tracked, momentum) in itertools.product(SHAPES, OPTIONS):
                norm = native(len(shape), affine=affine, track_running_stats=tracked, momentum=momentum)
                check_steps(norm, shares, shape, accelerator)


def native(spatial_dims: int, **options: object) -> nn.Module:
    kinds = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    norm = kinds[spatial_dims](CHANNELS, eps=1e-4, **options).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(CHANNELS, generator=generator, dtype=torch.float64))
    return norm


def check_steps(norm: nn.Module, shares: tuple[int, ...], shape: tuple[int, ...], accelerator: Accelerator) -> None:
    synced = convert_sync_batch_norm(copy.deepcopy(norm), device=CPU)
    assert isinstance(synced, CpuSyncBatchNorm)
    for step in range(2):
        for parameter in (*norm.parameters(), *synced.parameters()):
            parameter.grad = None
        generator = torch.Generator().manual_seed(step)
        whole = 5 + 3 * torch.randn(sum(shares), CHANNELS, *shape, generator=generator, dtype=torch.float64)
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
        if accelerator.is_main_process:  # a collective here would wait for the other process in vain
            images = torch.randn(8, CHANNELS, 4, 3, dtype=torch.float64)
            assert torch.equal(synced(images), norm.eval()(images))
            assert torch.equal(synced(images[:0]), images[:0])


def test_without_other_processes_it_is_the_native_norm() -> None:
    norm = native(2)
    synced = convert_sync_batch_norm(copy.deepcopy(norm), device=CPU)
    images = torch.randn(8, CHANNELS, 4, 3, dtype=torch.float64)
    assert torch.equal(synced(images), norm(images))
    assert torch.equal(synced.running_var, norm.running_var)


def test_conversion_keeps_names_tensors_modes_and_other_modules() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, eps=1e-3, momentum=0.2),
        nn.Sequential(nn.BatchNorm1d(5, affine=False), nn.BatchNorm3d(5, track_running_stats=False)),
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
    kinds = [type(module).__name__ for module in (model[0], model[1], *model[2], model[3], model[4])]
    assert kinds == ["Conv2d", *["CpuSyncBatchNorm"] * 4, "InstanceNorm2d"]
    assert (model[1].eps, model[1].momentum, model[1].training) == (1e-3, 0.2, True)
    assert not model[2][0].training
    assert model[2][1].running_mean is None


def test_an_input_without_channels_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at least 2 dimensions, got 1"):
        CpuSyncBatchNorm(4)(torch.zeros(4))


def test_a_short_window_that_gives_one_process_a_micro_batch_more_is_trained(tmp_path: Path) -> None:
    processes.run(train_uneven_windows, tmp_path / "run", num_processes=2, folder=tmp_path / "logs")


def train_uneven_windows(folder: Path) -> None:
    """29 samples are left for the last window: 14 and 1 for one process, 14 for the other."""
    batch = BatchConfig(per_device_batch_size=14, accumulation_steps=2, eval_batch_size=10)
    result = workload.train(workload.make_config(folder, batch=batch), num_train=56 + 29, norm="batch")
    assert result.position.samples_seen == 2 * 85
