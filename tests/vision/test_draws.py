from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from accel_trainer.core.rng import fold_in
from accel_trainer.vision.augment.draws import random_bits, random_int, random_uniform

KEY = fold_in(3, 7)
IDS = torch.arange(65536)


def lowbias32(x: int) -> int:
    """The published hash, in Python's integers."""
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_the_numbers_of_a_sample_never_change() -> None:
    """A change here changes every augmentation: a resumed run would not be the same run."""
    ids = torch.tensor([0, 1, 2, 49_999, 2**31, 2**40 + 5])
    assert random_bits(KEY, ids, 0).tolist() == [
        601237586,
        2524849018,
        16622539,
        1407952801,
        3211651389,
        2882276530,
    ]
    assert random_bits(KEY, ids, 1).tolist() == [
        2225176927,
        2627871474,
        3295058755,
        39042423,
        1667103894,
        1683513718,
    ]
    assert random_int(KEY, ids, 1, high=9).tolist() == [4, 5, 6, 0, 3, 3]


def test_draws_are_the_published_hash_of_key_sample_and_stream() -> None:
    for sample, stream in ((0, 0), (1, 0), (1, 1), (2**31 + 5, 3), (2**32 - 1, 2)):
        expected = lowbias32((lowbias32(sample ^ KEY) + fold_in(KEY, stream)) % 2**32)
        assert random_bits(KEY, torch.tensor([sample]), stream).tolist() == [expected]


def test_a_draw_depends_only_on_its_own_sample() -> None:
    whole = random_bits(KEY, IDS, 2)
    order = torch.randperm(len(IDS), generator=torch.Generator().manual_seed(0))
    assert torch.equal(random_bits(KEY, IDS[order], 2), whole[order])
    for batch in IDS.tensor_split(7):
        assert torch.equal(random_bits(KEY, batch, 2), whole[batch])
    assert torch.equal(random_bits(KEY, IDS[:0], 2), whole[:0])


def chi_square(counts: Tensor) -> float:
    """The statistic of a uniform distribution, in standard deviations from its expectation."""
    expected = counts.sum() / len(counts)
    degrees = len(counts) - 1
    return (float(((counts - expected) ** 2 / expected).sum()) - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize("stream", range(6))
@pytest.mark.parametrize("epoch", [0, 1, 199])
def test_draws_of_consecutive_samples_are_uniform(stream: int, epoch: int) -> None:
    bits = random_bits(fold_in(0, epoch), IDS, stream)
    for shift in (0, 12, 24):
        assert abs(chi_square(torch.bincount(bits >> shift & 0xFF, minlength=256).double())) < 4
    assert (
        abs(chi_square(torch.bincount(random_int(fold_in(0, epoch), IDS, stream, high=9)).double()))
        < 4
    )
    uniform = random_uniform(fold_in(0, epoch), IDS, stream).double()
    assert abs(float(uniform.mean()) - 0.5) < 4 / math.sqrt(12 * len(IDS))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((KEY, IDS, 0), (KEY, IDS, 1)),  # streams of a sample
        ((KEY, IDS, 0), (KEY, IDS + 1, 0)),  # neighbouring samples
        ((fold_in(3, 7), IDS, 0), (fold_in(3, 8), IDS, 0)),  # epochs
        ((fold_in(3, 7), IDS, 0), (fold_in(4, 7), IDS, 0)),  # seeds
        ((KEY, IDS, 0), (KEY, IDS + 65536, 1)),
    ],
)
def test_random_draws_of_streams_samples_epochs_and_seeds_are_independent(
    one: tuple[int, Tensor, int], other: tuple[int, Tensor, int]
) -> None:
    mine, theirs = random_bits(*one), random_bits(*other)
    pairs = (mine >> 28) * 16 + (theirs >> 28)
    assert abs(chi_square(torch.bincount(pairs, minlength=256).double())) < 4
    # [65536], binomial(32, 1/2)
    flips = sum(((mine ^ theirs) >> bit & 1) for bit in range(32)).double()
    assert abs(float(flips.mean()) - 16) < 4 * math.sqrt(8 / len(IDS))


def test_uniform_draws_are_below_one_and_integers_below_their_bound() -> None:
    uniform = random_uniform(KEY, IDS, 0)
    assert uniform.dtype == torch.float32
    assert 0 <= float(uniform.min()) < 1e-3
    assert 1 - 1e-3 < float(uniform.max()) < 1
    assert torch.equal(uniform.double() * 2**24 % 1, torch.zeros(len(IDS), dtype=torch.float64))
    for high in (1, 2, 9, 50_000):
        draws = random_int(KEY, IDS, 0, high=high)
        assert draws.dtype == torch.int64
        assert int(draws.min()) == 0
        assert high - 3 <= int(draws.max()) < high


def test_nothing_is_drawn_from_the_global_stream() -> None:
    before = torch.get_rng_state()
    random_uniform(KEY, IDS, 0)
    assert torch.equal(torch.get_rng_state(), before)
