"""The order of an epoch: a pure function of seed and epoch, on any split into steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import Subset, TensorDataset

from accel_trainer.core.batch_plan import BatchConfig
from accel_trainer.core.errors import ConfigError
from accel_trainer.core.rng import epoch_permutation
from accel_trainer.data.loader import DatasetOptions, build_train_loader
from accel_trainer.data.order import (
    SampleOrder,
    choose_order,
    labels_of,
    to_tensor,
)

LABELS = torch.tensor([0] * 40 + [1] * 7 + [2] * 3)
SIZE = len(LABELS)


def balanced(labels: torch.Tensor = LABELS) -> SampleOrder:
    return choose_order(BatchConfig(order="balanced"), len(labels), labels=labels)


def ids_of(order: SampleOrder, epoch: int, *, seed: int = 0) -> list[int]:
    return (to_tensor(order.draw(seed=seed, epoch=epoch)) % SIZE).tolist()


def test_the_uniform_order_is_the_permutation_of_the_epoch() -> None:
    order = choose_order(BatchConfig(), SIZE)
    assert torch.equal(order.draw(seed=3, epoch=2), epoch_permutation(SIZE, seed=3, epoch=2))


def test_the_stored_order_is_that_of_the_dataset_in_each_epoch() -> None:
    order = choose_order(BatchConfig(order="stored"), SIZE)
    assert ids_of(order, 0) == ids_of(order, 5) == list(range(SIZE))


def test_a_balanced_epoch_has_the_same_number_of_each_class() -> None:
    order = balanced()
    assert order.num_samples == 48
    for epoch in range(4):
        counts = Counter(LABELS[ids_of(order, epoch)].tolist())
        assert counts == {0: 16, 1: 16, 2: 16}


def test_balance_draws_each_sample_of_a_class_equally_often() -> None:
    order = balanced()
    # 5 epochs draw 80 samples of the class of 40, and 7 epochs 112 of the class of 7.
    counts = Counter(sample for epoch in range(5) for sample in ids_of(order, epoch))
    assert {counts[sample] for sample in range(40)} == {2}
    counts = Counter(sample for epoch in range(7) for sample in ids_of(order, epoch))
    assert {counts[sample] for sample in range(40, 47)} == {16}


def test_samples_without_a_label_are_no_class_to_balance() -> None:
    labels = torch.where(torch.arange(SIZE) % 5 == 0, -100, LABELS)
    order = balanced(labels)
    counts = Counter(labels[ids_of(order, 0)].tolist())
    assert counts == dict.fromkeys((0, 1, 2), order.num_samples // 3)


def test_balanced_epochs_differ_in_their_order() -> None:
    order = balanced()
    assert ids_of(order, 0) != ids_of(order, 1)
    assert ids_of(order, 0) != ids_of(order, 0, seed=1)
    assert ids_of(order, 1) == ids_of(balanced(), 1)
    labels = LABELS[ids_of(order, 0)].tolist()
    assert labels != sorted(labels)


def test_a_weighted_order_draws_by_weight_and_never_a_weight_of_zero() -> None:
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0])
    order = choose_order(BatchConfig(), 4, weights=weights)
    drawn = torch.cat([order.draw(seed=0, epoch=epoch) % 4 for epoch in range(2500)])
    counts = drawn.bincount(minlength=4)
    assert counts[0] == counts[3] == 0
    assert 0.74 < counts[2] / len(drawn) < 0.76


def test_rounding_at_the_end_of_the_weights_draws_no_weight_of_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = choose_order(BatchConfig(), 3, weights=[1.0, 1.0, 0.0])
    monkeypatch.setattr(torch, "rand", lambda size, **_: torch.ones(size, dtype=torch.float64))
    assert (order.draw(seed=0, epoch=0) % 3).tolist() == [1, 1, 1]


@pytest.mark.parametrize("order", [balanced(), choose_order(BatchConfig(), 50, weights=LABELS + 1)])
def test_a_repeated_sample_has_another_drawn_id_each_time(order: SampleOrder) -> None:
    drawn = order.draw(seed=1, epoch=1)
    assert len(drawn.unique()) == len(drawn) == order.num_samples
    # The first time it is the id itself, then one size of the dataset more for each time.
    seen: Counter[int] = Counter()
    for number in drawn.tolist():
        sample = number % SIZE
        assert number == sample + SIZE * seen[sample]
        seen[sample] += 1
    assert max(seen.values()) > 1


def test_samples_of_a_list_are_left_out_of_every_order(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_text("3\n0  # blurred\n\n# a comment\n41\n")
    for name in ("uniform", "stored", "balanced"):
        order = choose_order(BatchConfig(order=name, leave_out=path), SIZE, labels=LABELS)  # type: ignore[arg-type]
        drawn = {sample for epoch in range(20) for sample in ids_of(order, epoch)}
        assert drawn == set(range(SIZE)) - {0, 3, 41}
    weighted = choose_order(BatchConfig(leave_out=path), SIZE, weights=[1.0] * SIZE)
    assert not {0, 3, 41} & set(ids_of(weighted, 0))


def test_the_fingerprint_changes_with_the_list_the_weights_and_the_labels(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_text("3\n")
    orders = [
        choose_order(BatchConfig(), SIZE),
        choose_order(BatchConfig(leave_out=path), SIZE),
        choose_order(BatchConfig(), SIZE, weights=[1.0] * SIZE),
        choose_order(BatchConfig(), SIZE, weights=[2.0] * SIZE),
        balanced(),
        balanced(LABELS.flip(0)),
    ]
    assert len({order.fingerprint for order in orders}) == len(orders)
    assert balanced().fingerprint == balanced().fingerprint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("50\n", r"--leave-out .* lists sample 50, the ids are 0 to 49: correct the file"),
        ("-1\n", "lists sample -1"),
        ("cat.jpg\n", r"cannot be read .*: give a file with one sample id in each line"),
        ("\n".join(map(str, range(50))), "lists all samples: shorten it"),
    ],
)
def test_a_list_that_cannot_be_left_out_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        choose_order(BatchConfig(leave_out=path), SIZE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("order", "options", "said"),
    [
        ("balanced", {}, "--batch.order balanced finds no classes: give the labels"),
        ("balanced", {"labels": [-100] * SIZE}, "--batch.order balanced finds no label from 0 on"),
        ("balanced", {"labels": [0, 1]}, r"labels= has the shape \[2\] for 50 samples"),
        ("balanced", {"labels": LABELS / 2}, "labels= are float32: give the labels"),
        ("balanced", {"labels": [[0], [1, 2]]}, r"labels= cannot be read \(.*\): give the labels"),
        ("uniform", {"weights": [[1.0], [2.0, 3.0]]}, r"weights= cannot be read \(.*\): give num"),
        ("uniform", {"weights": ["a"] * SIZE}, "weights= are <U1: give numbers"),
        ("stored", {"weights": [1.0] * SIZE}, "--batch.order stored and weights= both set"),
        ("uniform", {"weights": [1.0]}, r"weights= has the shape \[1\]: .*|weights= has the shape"),
        ("uniform", {"weights": [-1.0] * SIZE}, "weights= must be 0 or more, and not all 0"),
        ("uniform", {"weights": [0.0] * SIZE}, "weights= must be 0 or more, and not all 0"),
        ("uniform", {"weights": [float("nan")] * SIZE}, "weights= must be 0 or more"),
    ],
)
def test_an_order_that_cannot_be_had_is_one_line(
    order: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        choose_order(BatchConfig(order=order), SIZE, **options)
    assert "\n" not in str(caught.value)


def test_labels_are_found_without_a_read_of_the_samples() -> None:
    class Own:
        targets = (2, 1, 0)

        def __getitem__(self, index: int) -> None:
            raise AssertionError("a sample was read")

    dataset = TensorDataset(torch.zeros(50, 2), LABELS)
    assert labels_of(dataset) is LABELS
    assert labels_of(Subset(dataset, [49, 0])).tolist() == [2, 0]
    assert labels_of(Own()) == (2, 1, 0)
    table: Any = {"text": ["a", "b"], "stars": [4, 5]}
    assert labels_of(table, ("text", "stars")) == [4, 5]
    assert labels_of(Subset(table, [1]), ("text", "stars")).tolist() == [5]
    assert labels_of([(torch.zeros(2), 1)]) is None


def test_texts_as_the_labels_of_a_subset_are_one_line() -> None:
    class Named:
        targets = ("cat", "dog")

    labels = labels_of(Subset(Named(), [1, 0]))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="labels= are <U3: give the labels"):
        choose_order(BatchConfig(order="balanced"), 2, labels=labels)


class Labelled:
    """A dataset that changes the labels that it has at hand, as a `target_transform` does."""

    def __init__(self, change: Callable[[int, int], Any]) -> None:
        self.targets = LABELS.tolist()
        self.change = change

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any]:
        return torch.zeros(2), self.change(self.targets[index], index)


@pytest.mark.parametrize(
    ("change", "is_fine"),
    [
        (lambda label, index: label, True),
        (lambda label, index: 10 - label, True),
        (lambda label, index: torch.eye(3)[label], True),
        (lambda label, index: -1.0 * label, True),
        (lambda label, index: str(label), True),
        (lambda label, index: int(label > 0), False),
        (lambda label, index: index % 3, False),
        (lambda label, index: index // 10, False),
        (lambda label, index: 0, False),
    ],
)
@pytest.mark.parametrize("is_subset", [False, True])
def test_labels_at_hand_that_are_not_those_of_the_samples_are_refused(
    change: Callable[[int, int], Any], is_fine: bool, is_subset: bool
) -> None:
    dataset: Any = Labelled(change)
    dataset = Subset(dataset, range(2, SIZE)) if is_subset else dataset

    def build(labels: Any, order: Any = "balanced") -> None:
        batch = BatchConfig(order=order, global_batch_size=4)
        options = DatasetOptions(labels=labels)
        build_train_loader(
            dataset, batch, seed=0, accelerator=Accelerator(cpu=True), options=options
        )

    build(None, "uniform")
    build(LABELS[len(LABELS) - len(dataset) :])
    with nullcontext() if is_fine else pytest.raises(ConfigError, match="have different classes"):
        build(None)
