from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from accel_trainer import (
    BatchConfig,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
    RuntimeConfig,
    TrainerConfig,
)
from accel_trainer.core.config import config_to_dict, config_values
from accel_trainer.core.errors import ConfigError
from accel_trainer.core.json_files import dump_json
from accel_trainer.run.config import (
    checked_config,
    decisive_values,
    describe_shared,
    training_changes,
    with_defaults,
)

CONFIG = RecipeConfig()
EXACT = replace(CONFIG, batch=BatchConfig(reduce="exact"))


def stored(config: RecipeConfig = CONFIG) -> dict[str, Any]:
    return config_to_dict(config)


def test_an_exact_run_depends_on_no_number_of_processes_or_threads() -> None:
    runtime = with_defaults(EXACT).runtime
    assert (runtime.sync_batch_norm, runtime.num_threads) == (False, 1)
    chosen = replace(EXACT, runtime=RuntimeConfig(num_threads=4))
    assert with_defaults(chosen).runtime.num_threads == 4
    assert with_defaults(CONFIG).runtime == CONFIG.runtime


def test_a_config_records_the_default_learning_rate_of_its_optimizer() -> None:
    config = with_defaults(replace(CONFIG, optimizer=OptimizerConfig(name="adamw")))
    assert config.optimizer.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("change", "changes"),
    [
        ({"seed": 4}, [("seed", 0, 4)]),
        ({"trainer": TrainerConfig(ema_decay=0.9)}, [("trainer.ema_decay", None, 0.9)]),
        ({"batch": BatchConfig(global_batch_size=64)}, [("batch.global_batch_size", None, 64)]),
        ({"batch": BatchConfig(per_device_batch_size=64, num_workers=2)}, []),
        ({"trainer": TrainerConfig(max_steps=5, on_nonfinite="skip")}, []),
        ({"run": RunConfig(quiet=True)}, []),
    ],
)
def test_a_change_of_the_config_matters_if_it_decides_what_is_trained(
    change: Any, changes: Any
) -> None:
    config = replace(CONFIG, **change)
    assert training_changes(stored(), config) == changes
    assert (decisive_values(config) == decisive_values(CONFIG)) == (not changes)


def test_how_an_exact_config_splits_its_batches_decides_what_is_trained() -> None:
    config = replace(EXACT, batch=replace(EXACT.batch, per_device_batch_size=64))
    assert training_changes(stored(EXACT), config) == [("batch.per_device_batch_size", 128, 64)]


def test_a_stored_config_of_an_earlier_version_is_no_change() -> None:
    earlier = stored()
    del earlier["trainer"]["patience"]
    earlier["trainer"] |= {"gone": 3}
    assert training_changes(earlier, CONFIG) == []


@dataclass(frozen=True, kw_only=True)
class Weighted(RecipeConfig):
    weights: Mapping[str, float] = field(default_factory=lambda: {"pixels": 1.0})


def test_a_new_key_of_a_dict_is_a_change() -> None:
    config = Weighted(weights={"pixels": 1.0, "edges": 0.5})
    assert training_changes(stored(config), config) == []
    assert training_changes(stored(Weighted()), config) == [("weights.edges", None, 0.5)]


@dataclass(frozen=True, kw_only=True)
class Demanding(RecipeConfig):
    """Refuses its own defaults."""

    dataset: str | None = None

    def __post_init__(self) -> None:
        if self.dataset is None:
            raise ValueError("--dataset is missing: give it")


def test_a_config_that_refuses_its_defaults_is_compared_with_a_stored() -> None:
    config = Demanding(dataset="digits")
    assert training_changes(stored(config), config) == []
    assert training_changes(stored(), config) == [("dataset", None, "digits")]


def test_the_shared_config_has_no_setting_of_a_single_process() -> None:
    lines = describe_shared(CONFIG).splitlines()
    names = [line.partition(":")[0] for line in lines]
    assert "seed: 0" in lines
    assert "checkpoint.every_n_steps" in names
    assert not {"run.output_dir", "batch.num_workers", "runtime.num_threads"} & set(names)
    assert "runtime.num_threads" in describe_shared(EXACT)


def test_a_change_of_the_config_that_is_allowed_must_be_of_a_setting() -> None:
    for name in ("data", "seed", "batch.global-batch-size"):
        checked_config(replace(CONFIG, run=RunConfig(allow_change=(name,))))
    with pytest.raises(ConfigError, match="--allow-change seeds: there is no such setting"):
        checked_config(replace(CONFIG, run=RunConfig(allow_change=("seeds",))))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"init_skip": "head"}, "init_skip= has no effect without init_from="),
        ({"init_from": "x/a", "resume": "runs/b"}, "resume='runs/b' and init_from='x/a' both set"),
        ({"init_from": "a", "init_skip": "("}, "run.init_skip is '.', which is not a regular"),
    ],
)
def test_a_config_of_a_run_that_contradicts_itself_is_refused(settings: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RunConfig(**settings)


def test_a_path_of_the_config_may_begin_with_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunConfig(output_dir=Path("~/run")).output_dir == tmp_path / "run"


def float_settings() -> list[str]:
    return [name for name, value in config_values(CONFIG).items() if isinstance(value, float)] + [
        "trainer.max_grad_norm",
        "trainer.ema_decay",
    ]


def is_refused(name: str, value: float) -> bool:
    group, _, field_name = name.rpartition(".")
    try:
        part = replace(getattr(CONFIG, group), **{field_name: value})
        config = replace(CONFIG, **{group: part})
        checked_config(config)
    except ConfigError:
        return True
    dump_json(decisive_values(config))
    return False


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_number_that_no_checkpoint_holds_is_refused(value: float) -> None:
    assert [name for name in float_settings() if not is_refused(name, value)] == []
