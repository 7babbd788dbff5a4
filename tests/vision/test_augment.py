from __future__ import annotations

import pytest
import torch
from torch import Tensor

from accel_trainer.core.errors import ConfigError
from accel_trainer.core.types import Batch
from accel_trainer.vision.augment.batch import (
    AugmentConfig,
    cut_out,
    draw_mix,
    draw_partners,
    draw_placement,
)
from accel_trainer.vision.augment.batch import _draw_beta as draw_beta
from accel_trainer.vision.augment.mix import Mixer

IDS = torch.arange(20_000)


def test_draws_for_a_sample_do_not_depend_on_its_batch() -> None:
    config, some = AugmentConfig(mixup=0.3, cutmix=1.0), torch.tensor([17, 3, 3, 19_999])
    everyone, few = (draw_placement(config, ids, seed=5, epoch=2) for ids in (IDS, some))
    assert torch.equal(everyone.rows[some], few.rows)
    assert torch.equal(everyone.columns[some], few.columns)
    assert everyone.flips is not None
    assert few.flips is not None
    assert torch.equal(everyone.flips[some], few.flips)
    all_weights, weights = (
        draw_mix(config, ids, height=8, width=8, seed=5, epoch=2)[0] for ids in (IDS, some)
    )
    assert torch.equal(all_weights[some], weights)


@pytest.mark.parametrize("alpha", [0.1, 0.3, 1.0])
def test_mixes_are_the_same_to_the_last_bit_in_batches_of_any_size(alpha: float) -> None:
    config = AugmentConfig(mixup=alpha, cutmix=alpha)
    whole = draw_mix(config, IDS, height=4, width=4, seed=5, epoch=2)
    for size in (7, 33):
        parts = [
            draw_mix(config, ids, height=4, width=4, seed=5, epoch=2)
            for ids in IDS[:4000].split(size)
        ]
        for all_values, values in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(all_values[:4000], torch.cat(values))


@pytest.mark.parametrize("changed", [{"seed": 1, "epoch": 0}, {"seed": 0, "epoch": 1}])
def test_another_epoch_or_seed_gives_other_draws(changed: dict[str, int]) -> None:
    first = draw_placement(AugmentConfig(), IDS, seed=0, epoch=0)
    second = draw_placement(AugmentConfig(), IDS, **changed)
    same = (first.rows == second.rows).double().mean()
    assert 0.09 < same < 0.13  # 1 in 9 by chance


def test_crops_cover_all_positions_evenly_and_independently() -> None:
    placement = draw_placement(AugmentConfig(crop_padding=4), IDS, seed=0, epoch=0)
    counts = torch.bincount(placement.rows * 9 + placement.columns, minlength=81)
    assert counts.shape == (81,)
    expected = len(IDS) / 81
    # chi square with 80 degrees, p = 0.001
    assert ((counts - expected) ** 2 / expected).sum() < 124.8


def test_alternating_flips_show_both_sides_of_an_image_in_any_two_epochs() -> None:
    flips = [
        draw_placement(AugmentConfig(flip="alternating"), IDS, seed=0, epoch=e).flips
        for e in range(4)
    ]
    assert all(flip is not None for flip in flips)
    for earlier, later in zip(flips, flips[1:], strict=False):
        assert torch.equal(earlier, ~later)  # type: ignore[operator, arg-type]
    assert 0.48 < flips[0].double().mean() < 0.52  # type: ignore[union-attr]


def test_random_flips_are_a_fair_coin_each_epoch() -> None:
    flips = [
        draw_placement(AugmentConfig(flip="random"), IDS, seed=0, epoch=e).flips for e in range(2)
    ]
    assert 0.48 < flips[0].double().mean() < 0.52  # type: ignore[union-attr]
    assert 0.48 < (flips[0] == flips[1]).double().mean() < 0.52  # type: ignore[union-attr]


def test_cutout_blanks_one_square_that_may_cross_the_border() -> None:
    images = torch.ones(500, 3, 16, 16)
    cut = cut_out(AugmentConfig(cutout=6), images.clone(), torch.arange(500), seed=0, epoch=0) == 0
    areas = cut[:, 0].sum((1, 2))
    assert torch.equal(cut[:, 0], cut[:, 2])
    assert areas.max() == 36
    assert areas.min() >= 9
    rows, columns = cut[:, 0].any(2).sum(1), cut[:, 0].any(1).sum(1)
    assert torch.equal(areas, rows * columns)  # rectangles


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.5, 1.0, 2.0, 8.0])
def test_mixing_shares_have_the_moments_of_a_beta_distribution(alpha: float) -> None:
    shares = draw_beta(7, torch.arange(200_000), alpha=alpha).double()
    assert shares.min() >= 0
    assert shares.max() <= 1
    centred = shares - 0.5
    variance = 1 / (4 * (2 * alpha + 1))
    fourth = 3 / (16 * (2 * alpha + 1) * (2 * alpha + 3))
    assert abs(centred.mean()) < 4 * (variance / 200_000) ** 0.5
    assert (centred**2).mean() == pytest.approx(variance, rel=0.01)
    assert (centred**4).mean() == pytest.approx(fourth, rel=0.02)


def test_no_weight_is_negative_however_a_cpu_rounds_a_square_root(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rounded_down(number: Tensor) -> Tensor:
        return number**0.5 * (1 - 2**-23)

    monkeypatch.setattr(Tensor, "sqrt", rounded_down)
    for alpha in (0.01, 0.1, 1.0):
        shares = draw_beta(7, torch.arange(200_000), alpha=alpha)
        assert 0 <= shares.min() < 1e-3
        assert 1 - 1e-3 < shares.max() <= 1


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0.0), (0.0, 1.0), (0.4, 1.0)])
def test_targets_share_what_pixels_share(mixup: float, cutmix: float) -> None:
    config = AugmentConfig(mixup=mixup, cutmix=cutmix)
    pixels, shares = draw_mix(config, torch.arange(2000), height=8, width=8, seed=0, epoch=0)
    torch.testing.assert_close(pixels.mean((1, 2, 3)), shares)
    is_box = ((pixels == 0) | (pixels == 1)).flatten(1).all(1)
    expected = {(0.4, 0.0): 0.0, (0.0, 1.0): 1.0, (0.4, 1.0): 0.5}[mixup, cutmix]
    assert abs(is_box.double().mean() - expected) < 0.05


def test_partners_come_from_the_whole_training_set() -> None:
    partners = draw_partners(IDS, num_samples=len(IDS), seed=0, epoch=0)
    assert partners.min() >= 0
    assert partners.max() < len(IDS)
    assert 0.62 < len(partners.unique()) / len(IDS) < 0.645  # 1 - 1/e of them


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"crop_padding": -1}, "augment.crop_padding is -1: set it to at least 0"),
        ({"cutout": -2}, "augment.cutout is -2"),
        ({"mixup": -0.1}, "augment.mixup is -0.1"),
        ({"cutmix": float("nan")}, "augment.cutmix is nan"),
    ],
)
def test_values_out_of_range_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AugmentConfig(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0}])
def test_images_are_mixed_in_the_first_epochs_only(kind: dict[str, float]) -> None:
    ids = torch.arange(6)
    images = torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    for epochs in (0, 1, 3, None):
        mixer = Mixer(AugmentConfig(**kind, mix_epochs=epochs), kept=ids, num_classes=2, seed=0)  # type: ignore[arg-type]
        for epoch in range(5):
            drawn = mixer.with_partners(ids, epoch)
            mixed = mixer.mix(Batch(images[drawn], drawn % 2, drawn), epoch)
            is_mixed = mixed.targets.ndim == 2 and not torch.equal(mixed.inputs, images)
            assert is_mixed == (epochs is None or epoch < epochs), (epochs, epoch)
            assert is_mixed or torch.equal(mixed.targets, ids % 2)
