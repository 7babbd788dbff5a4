"""Chooses the settings of a run on photos that are left open, from the photos and the net.

A recipe leaves a setting open with `BY_RULE` as its default. Data flows one way: from the config
of the command line and the facts to a config in which every value is a number. A run stores these
numbers, and a run that continues takes them from there, also where the rules are others by then.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import median_low
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..core.batch_plan import BatchConfig
from ..core.config import flatten_config
from ..core.errors import CheckpointError, ConfigError, DataError, OutputError
from ..core.yaml_files import read_yaml
from ..distributed.launch_env import setup_launch_env
from ..optim.config import OptimizerConfig
from ..optim.lr_scheduler import ScheduleConfig
from ..run.config import RecipeConfig, with_defaults
from ..run.keywords import Settings, with_values
from ..run.resume import Source, find_source, folders_of, is_unfinished, stored_settings
from ..training.config import TrainerConfig
from .data.photo_decode import read_header
from .models.timm_nets import expected_size
from .models.zoo import ModelConfig
from .sources.photos import PhotoConfig, Photos
from .sources.raw import PhotoSplit

BY_RULE: Any = None
"""The default of a setting that `choose_settings` fills in if neither a flag nor a file gives
it."""

# What people write for weights that have no file.
_NO_FILE = re.compile(r"(?i)(imagenet|timm|torchvision|pretrained|default|true)")
_NUM_MEASURED = 64
_MIN_SIZE = 64
_MAX_SIZE = 224
_SIZE_STEP = 32
_MAX_BATCH = 128
_MIN_BATCH = 8
_STEPS_PER_EPOCH = 16
_MAX_PER_DEVICE = 128
_WARMUP = 0.1
# Peak learning rates from scratch and from weights, for batches of 128.
_PEAK_BATCH = 128
_PEAKS = {"sgd": (0.1, 0.03), "adamw": (0.003, 0.0005)}


@dataclass(frozen=True, kw_only=True)
class PhotoRecipeConfig(RecipeConfig):
    """The settings of every recipe on photos, most of which are open."""

    batch: BatchConfig = BatchConfig(per_device_batch_size=BY_RULE, drop_last=BY_RULE)
    trainer: TrainerConfig = TrainerConfig(num_epochs=BY_RULE)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=BY_RULE, weight_decay=BY_RULE)
    schedule: ScheduleConfig = ScheduleConfig(warmup_epochs=BY_RULE)
    dataset: str = "photos"
    photos: PhotoConfig = PhotoConfig(image_size=BY_RULE)
    model: ModelConfig = ModelConfig(name="resnet18")

    @property
    def starts_from_weights(self) -> bool:
        """Whether a new run starts from weights that were trained before."""
        return self.model.is_pretrained or self.run.init_from is not None


C = TypeVar("C", bound=PhotoRecipeConfig)


@dataclass(frozen=True, kw_only=True)
class PhotoFacts:
    """What the rules know about a run besides its config."""

    num_photos: int
    """To train on."""
    is_pretrained: bool
    """Whether the run starts from weights."""
    short_side: int = _MAX_SIZE
    """The median of the photos' shorter sides, in pixels."""
    net_size: int | None = None
    """The size in pixels that the net or its weights are made for; None: any."""
    num_processes: int = 1


class Choice(NamedTuple):
    """A value, and why it was chosen."""

    value: Any
    reason: str


def open_settings(config: RecipeConfig) -> set[str]:
    """Return the dotted names of the settings of `config` that `choose_settings` would fill in."""
    if not isinstance(config, PhotoRecipeConfig):
        return set()
    return {name for name in _RULES if attrgetter(name)(config) is None}


def settings_for(config: C, photos: Photos, *, recipe: str) -> tuple[C, str]:
    """Return `config` with every open setting filled in for `photos`, and a line that says how.

    A run that continues takes the values that it has stored. `recipe` is the name that
    `start_run` gets. Call it before that. The headers of up to 64 training photos are read.

    Raises:
        ConfigError: two settings say where the weights come from, or timm cannot be imported.
    """
    model = config.model
    _check_weights(model, config.run.init_from)
    facts = PhotoFacts(
        num_photos=len(photos.train),
        is_pretrained=config.starts_from_weights,
        short_side=_median_side(photos.train),
        net_size=expected_size(model.name, pretrained=model.is_pretrained),
        num_processes=setup_launch_env(),
    )
    return choose_settings(config, facts, stored=_stored_settings(config, recipe))


def _check_weights(model: ModelConfig, init_from: Path | None) -> None:
    """Raise ConfigError if settings do not say where the initial weights come from."""
    if init_from is None:
        return
    if model.pretrained:
        raise ConfigError(
            "MODEL_PRETRAINED",
            f"--pretrained and --init-from {init_from} both set the initial weights: "
            "remove one of them",
        )
    if _NO_FILE.match(str(init_from)) and not init_from.exists():
        raise ConfigError(
            "MODEL_PRETRAINED",
            f"--init-from {init_from} is not a file: --pretrained loads timm's ImageNet weights",
        )


def _median_side(split: PhotoSplit) -> int:
    """Return the median of the shorter sides of evenly spaced photos, without the broken ones."""
    sides = []
    for index in np.linspace(0, len(split) - 1, min(_NUM_MEASURED, len(split))).astype(int):
        try:
            header = read_header(split.encoded_at(int(index)), split.name_of(int(index)))
        except DataError:  # training names the photo, or leaves it out
            continue
        sides.append(min(header.height, header.width))
    return median_low(sides) if sides else _MAX_SIZE


def choose_settings(
    config: C, facts: PhotoFacts, *, stored: Mapping[str, Any] = MappingProxyType({})
) -> tuple[C, str]:
    """Return `config` with every open setting filled in, and a line that says how.

    `stored` are settings by dotted name, which are taken where they are open here.
    """
    chosen: dict[str, Choice] = {}
    has_other_length = (config.trainer.num_steps, config.trainer.hours) != (None, None)
    for name, rule in _RULES.items():
        if attrgetter(name)(config) is not None:
            continue
        if name == "trainer.num_epochs" and has_other_length:
            continue  # also for a branch in steps of a run in epochs
        choice = Choice(stored[name], "") if name in stored else rule(config, facts)
        if choice.value is not None:
            chosen[name] = choice
            config = with_values(config, {name: choice.value})
    return config, _describe(chosen)


def _describe(chosen: Mapping[str, Choice]) -> str:
    """Return a line such as `by rule: epochs 30 (500 photos from weights), ...`."""
    is_stored = not any(choice.reason for choice in chosen.values())
    parts = []
    for name, (value, reason) in chosen.items():
        if value is not False:
            text = _WORDS[name] if value is True else f"{_WORDS[name]} {value:g}"
            parts.append(text + f" ({reason})" * bool(reason))
    if not parts:
        return "by rule: nothing, as all settings are given"
    return f"{'as the run began' if is_stored else 'by rule'}: {', '.join(parts)}"


# --- a run that continues ---


def _stored_settings(config: PhotoRecipeConfig, recipe: str) -> Settings:
    """Return the settings, by dotted name, of the run that `config` continues; {}: it is new.

    What is wrong with that run is for `start_run` to report, on the main process.
    """
    run = config.run
    with suppress(CheckpointError, OutputError, OSError, ValueError):
        if source := find_source(run.output_dir or run.runs_dir, run):
            return _read_settings(source)
        if run.output_dir is None and run.resume == "auto":
            return _settings_of_unfinished(config, recipe)
    return {}


def _read_settings(source: Source) -> Settings:
    # Only the config has what may differ between starts, such as the batch size of a device.
    config = dict(flatten_config(read_yaml(Path(source.run, "config.yaml"))))
    stored = {**config, **stored_settings(source)}
    return {name: stored[name] for name in _RULES if isinstance(stored.get(name), int | float)}


def _settings_of_unfinished(config: PhotoRecipeConfig, recipe: str) -> Settings:
    """Return those of the newest unfinished run that has all settings which `config` gives."""
    for folder in folders_of(recipe, config.run.runs_dir):
        with suppress(CheckpointError, ConfigError, OSError, ValueError):
            stored = _read_settings(Source(str(folder)))
            left_open = open_settings(config)
            filled = {name: value for name, value in stored.items() if name in left_open}
            if is_unfinished(folder, with_defaults(with_values(config, filled))):
                return stored
    return {}


# --- the rules ---


def _image_size(config: PhotoRecipeConfig, facts: PhotoFacts) -> Choice:
    """What the weights know, or no more pixels than the photos have.

    BiT (arXiv 1912.11370) has a smaller size for small photos, too.
    """
    if facts.net_size is not None:
        return Choice(facts.net_size, "as the net expects")
    size = math.ceil(facts.short_side / _SIZE_STEP) * _SIZE_STEP
    size = min(max(size, _MIN_SIZE), _MAX_SIZE)
    return Choice(size, f"photos of about {facts.short_side} pixels")


def _batch_size(config: PhotoRecipeConfig, facts: PhotoFacts) -> Choice:
    """A sixteenth of the photos, so that an epoch has enough steps; 8 to 128 on all processes."""
    batch = config.batch
    if batch.global_batch_size is not None:
        return Choice(_MAX_PER_DEVICE, "at most, as --global-batch-size is given")
    wanted = min(max(facts.num_photos / _STEPS_PER_EPOCH, _MIN_BATCH), _MAX_BATCH)
    parts = facts.num_processes * batch.accumulation_steps
    size = 2 ** int(math.log2(min(wanted, facts.num_photos)))
    each = f" on each of {facts.num_processes} processes" * (facts.num_processes > 1)
    return Choice(max(1, size // parts), f"{facts.num_photos:,} photos{each}")


def _drop_last(config: PhotoRecipeConfig, facts: PhotoFacts) -> Choice:
    """A last step of very few photos is left out: its BatchNorms see too little.

    timm leaves out any short last step.
    """
    batch_size = config.batch.resolved_global_batch_size(facts.num_processes)
    rest = facts.num_photos % batch_size
    return Choice(
        0 < rest < batch_size / 4 < facts.num_photos / 4, f"{rest} of {batch_size} photos"
    )


def _num_epochs(config: PhotoRecipeConfig, facts: PhotoFacts) -> Choice:
    """About the same number of photos is seen, so that few photos are seen more often.

    BiT (arXiv 1912.11370) takes the same number of steps for all data up to 20,000 photos.
    """
    seen, least, most = (30_000, 5, 30) if facts.is_pretrained else (100_000, 20, 30)
    epochs = min(max(round(seen / facts.num_photos), least), most)
    start = "from weights" if facts.is_pretrained else "from scratch"
    return Choice(epochs, f"{facts.num_photos:,} photos {start}")


def _learning_rate(config: PhotoRecipeConfig, facts: PhotoFacts) -> Choice:
    """Lower from weights, which a large step would forget, and for small batches.

    The gradients of these are noisier: it goes with the square root of the batch (Krizhevsky 2014,
    arXiv 1404.5997).
    """
    optimizer = config.optimizer
    peaks = _PEAKS.get(optimizer.name)
    if peaks is None:
        return Choice(None, "the optimizer has its own default")
    batch_size = config.batch.resolved_global_batch_size(facts.num_processes)
    if optimizer.learning_rate_scaling != "none":
        batch_size = optimizer.base_batch_size
    rate = peaks[facts.is_pretrained] * math.sqrt(batch_size / _PEAK_BATCH)
    start = "from weights" if facts.is_pretrained else "from scratch"
    return Choice(float(f"{rate:.2g}"), f"{optimizer.name} {start}, batch {batch_size}")


def _weight_decay(config: PhotoRecipeConfig, facts: PhotoFacts) -> Choice:
    name = config.optimizer.name
    return Choice(0.05 if name == "adamw" else 0.0005, f"usual with {name}")


def _warmup(config: PhotoRecipeConfig, facts: PhotoFacts) -> Choice:
    """A tenth of the run, in which a new head and the statistics of norms settle."""
    if config.schedule.shape == "triangular":
        return Choice(0.0, "triangular rises by itself")
    if config.schedule.warmup_steps:
        return Choice(0.0, "the warmup is set in steps")
    batch_size = config.batch.resolved_global_batch_size(facts.num_processes)
    steps_per_epoch = max(1, facts.num_photos // batch_size)
    num_epochs = config.trainer.total_steps(steps_per_epoch) / steps_per_epoch
    if config.schedule.shape == "trunk":
        return Choice(min(1.0, round(num_epochs, 2)), "the same for a trunk of any length")
    return Choice(round(_WARMUP * num_epochs, 2), "a tenth of the epochs")


# In this order: a rule sees what those before it have chosen.
_RULES: dict[str, Callable[[Any, PhotoFacts], Choice]] = {
    "photos.image_size": _image_size,
    "batch.per_device_batch_size": _batch_size,
    "batch.drop_last": _drop_last,
    "trainer.num_epochs": _num_epochs,
    "optimizer.learning_rate": _learning_rate,
    "optimizer.weight_decay": _weight_decay,
    "schedule.warmup_epochs": _warmup,
}
RULED = frozenset(_RULES)
"""The dotted names of the settings that a rule chooses if they are open."""
_WORDS = {
    "photos.image_size": "image size",
    "batch.per_device_batch_size": "batch size",
    "batch.drop_last": "no short last step",
    "trainer.num_epochs": "epochs",
    "optimizer.learning_rate": "learning rate",
    "optimizer.weight_decay": "weight decay",
    "schedule.warmup_epochs": "warmup epochs",
}
