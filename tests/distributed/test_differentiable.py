from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from accel_trainer import ConfigError, gather_with_gradient

from .. import processes
from ..joined import joined_processes

SHARES = [(4, 4), (1, 7), (0, 8), (2, 0), (2, 2, 2), (3, 3, 2, 2), (1, 1, 0, 0), (0, 0, 5, 1)]


@pytest.mark.parametrize("num_processes", [2, 3, 4])
def test_gathered_samples_have_the_gradient_of_the_whole_batch(
    tmp_path: Path, num_processes: int
) -> None:
    processes.run(check_all_shares, num_processes=num_processes, folder=tmp_path)


def check_all_shares() -> None:
    with joined_processes() as accelerator:
        for shares in (shares for shares in SHARES if len(shares) == accelerator.num_processes):
            check_shares(shares, accelerator)


def check_shares(shares: tuple[int, ...], accelerator: Accelerator) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(sum(shares), 3, 2, generator=generator, dtype=torch.float64)
    mine = whole.split(shares)[accelerator.process_index].clone().requires_grad_()
    whole.requires_grad_()
    everyone = gather_with_gradient(mine, accelerator)
    assert torch.equal(everyone, whole)

    pair_losses(whole, whole).sum().backward()
    pair_losses(mine, everyone).sum().backward()
    assert mine.grad is not None
    assert whole.grad is not None
    expected = whole.grad.split(shares)[accelerator.process_index]
    torch.testing.assert_close(mine.grad, expected, rtol=1e-12, atol=1e-12)


def pair_losses(mine: Tensor, everyone: Tensor) -> Tensor:
    """Return a loss for each of `mine` that depends on all samples: [b, ...] -> [b]."""
    return (mine.flatten(1) @ everyone.flatten(1).T).logsumexp(1)


def test_any_dtype_is_gathered_and_gradients_keep_theirs(tmp_path: Path) -> None:
    processes.run(check_dtypes, num_processes=2, folder=tmp_path)


def check_dtypes() -> None:
    with joined_processes() as accelerator:
        rank = accelerator.process_index
        for dtype in (torch.int64, torch.bool, torch.float32, torch.float16, torch.bfloat16):
            mine = torch.full((1 + rank, 2), rank, dtype=dtype)
            everyone = gather_with_gradient(mine, accelerator)
            assert everyone.dtype == dtype
            assert everyone.tolist() == [[0, 0], [1, 1], [1, 1]]
        inputs = torch.ones(2 - rank, 4)
        weights = torch.ones(4, 3, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            embeddings = inputs @ weights
            everyone = gather_with_gradient(embeddings, accelerator)
            (everyone * (rank + 1)).sum().backward()
        assert everyone.dtype == torch.bfloat16
        assert weights.grad is not None
        assert weights.grad.tolist() == [[3.0 * len(inputs)] * 3] * 4  # 1 + 2 for each sample


def test_samples_of_different_shapes_are_refused_by_all(tmp_path: Path) -> None:
    processes.run(check_shapes, num_processes=2, folder=tmp_path)


def check_shapes() -> None:
    with joined_processes() as accelerator:
        mine = torch.zeros(2, 3 + accelerator.process_index)
        with pytest.raises(ConfigError, match="different shape: pad them to the same") as caught:
            gather_with_gradient(mine, accelerator)
        assert "\n" not in str(caught.value)


def test_a_single_process_gets_its_own_tensor() -> None:
    mine = torch.zeros(2, 3, requires_grad=True)
    assert gather_with_gradient(mine, Accelerator(cpu=True)) is mine
