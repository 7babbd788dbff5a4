from __future__ import annotations

import random

import numpy as np
import torch

from accel_trainer.core.rng import epoch_permutation, fold_in, seed_generators

CPU = torch.device("cpu")


def test_the_streams_of_numbers_never_change() -> None:
    """A change here changes every augmentation and every order: a resumed run would not be the same
    run."""
    assert [fold_in(), fold_in(0), fold_in(0, 0), fold_in(3, 7)] == [
        2654435769,
        83415710,
        2158448160,
        2778894728,
    ]
    assert [fold_in(2**32), fold_in(2**63 - 1, 5)] == [2504614470, 3970784627]
    assert epoch_permutation(10, seed=0, epoch=0).tolist() == [1, 9, 8, 3, 2, 0, 4, 7, 5, 6]
    assert epoch_permutation(10, seed=0, epoch=1).tolist() == [1, 9, 5, 0, 6, 7, 4, 2, 8, 3]
    assert epoch_permutation(10, seed=1, epoch=0).tolist() == [2, 3, 8, 0, 7, 5, 9, 6, 1, 4]


def test_keys_do_not_collide() -> None:
    keys = {fold_in(seed, epoch) for seed in range(50) for epoch in range(50)}
    assert len(keys) == 2500
    assert len({fold_in(a, b, c) for a in range(8) for b in range(8) for c in range(8)}) == 512
    seeds = (0, 1, 1 << 32, 1 << 64)  # large ones too
    assert len({fold_in(seed, epoch) for seed in seeds for epoch in seeds}) == 16
    assert all(0 <= key < 2**32 for key in keys)


def test_a_key_can_be_folded_in_parts() -> None:
    assert fold_in(3, 4, start=fold_in(1, 2**40)) == fold_in(1, 2**40, 3, 4)


def test_the_order_of_an_epoch_is_a_permutation_of_its_own() -> None:
    orders = [
        epoch_permutation(1000, seed=seed, epoch=epoch)
        for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(1000))
    for one in range(4):
        for other in range(one):
            shared = int((orders[one] == orders[other]).sum())
            assert shared < 10  # about one place in a thousand agrees by chance


def test_nothing_is_drawn_from_the_global_streams() -> None:
    before = torch.get_rng_state()
    epoch_permutation(100, seed=0, epoch=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_forward_has_a_stream_of_its_own_that_can_be_drawn_again() -> None:
    def draw(**position: int) -> tuple[float, float, float]:
        torch.rand(17)  # whatever happened before
        origin = {"seed": 0, "optimizer_step": 5, "micro_batch": 1, "process_index": 2}
        where = {**origin, **position}
        process_key = fold_in(where["seed"], where["process_index"])
        key = fold_in(where["optimizer_step"], where["micro_batch"], start=process_key)
        seed_generators(key, CPU)
        return torch.rand(()).item(), float(np.random.rand()), random.random()

    assert draw() == draw()
    others = [draw(seed=1), draw(optimizer_step=6), draw(micro_batch=0), draw(process_index=3)]
    for of_one_generator in zip(draw(), *others, strict=True):
        assert len(set(of_one_generator)) == 5
