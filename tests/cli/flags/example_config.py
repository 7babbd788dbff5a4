"""A config with a value of each kind, for the tests of the parser."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from accel_trainer.cli.flags.parser import parse_config
from accel_trainer.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How long and how."""

    num_epochs: Annotated[int, tyro.conf.arg(aliases=["--epochs"])] = 3
    """Passes over the data."""
    learning_rate: Annotated[float, tyro.conf.arg(aliases=["--lr"])] = 0.1
    max_grad_norm: float | None = None
    betas: tuple[float, float] = (0.9, 0.99)
    tags: tuple[str, ...] = ()
    use_ema: Annotated[bool, tyro.conf.arg(aliases=["--ema"])] = False
    mixed_precision: Literal["no", "bf16"] = "no"
    output_dir: Path | None = None
    run_name: str | None = None

    def __post_init__(self) -> None:
        if self.num_epochs < 0:
            raise ValueError(f"num_epochs is {self.num_epochs}: set it to 0 or more")
        if self.learning_rate == 666:
            raise ConfigError("LEARNING_RATE", "learning_rate is 666")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.seed == 13:
            raise ValueError("seed is 13: set another")


def parse(*argv: str) -> Config:
    return parse_config(Config, argv, description="Train.")
