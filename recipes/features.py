"""Train the head of a network on features of its frozen trunk, which are computed only once.

An epoch takes a moment, also on a CPU. At the end, the whole network is evaluated on the photos as
the test set: its numbers are those on the features, up to rounding. Its export predicts photos.

python recipes/features.py --dataset photos/ --val-fraction 0.1 --model resnet18 --pretrained
python recipes/features.py --dataset photos/ --val-fraction 0.1 --trunk model.safetensors
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accel_trainer import (
    ConfigError,
    EvalLoader,
    OptimizerConfig,
    RecipeConfig,
    Run,
    RunResult,
    build_eval_loader,
    build_trainer,
    main,
    start_run,
)
from accel_trainer.commands import filesystem
from accel_trainer.vision import (
    ImageClassificationTask,
    ModelConfig,
    PhotoConfig,
    PhotoReader,
    build_model,
    classification_metrics,
    load_photos,
)

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.utils.data import TensorDataset


@dataclass(frozen=True, kw_only=True)
class Config(RecipeConfig):
    """The settings of `recipes/features.py`."""

    dataset: str = "photos"
    """A folder of photos, parquet, tars or `save_to_disk` output, or OWNER/NAME on the hub."""
    photos: PhotoConfig = field(default_factory=PhotoConfig)
    model: ModelConfig = field(default_factory=lambda: ModelConfig(name="resnet18"))
    trunk: Path | None = None
    """A safetensors file with the weights of the trunk; None: those of `--pretrained`."""
    optimizer: OptimizerConfig = OptimizerConfig(name="adamw", learning_rate=1e-3)


def on_features(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the model, and the name of its head, its last linear layer.

    Its forward takes photos [B, C, S, S], or what the head gets, [B, F]; its tensors keep their
    names.
    """
    base = type(model)
    head = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)][-1]

    class OnFeatures(base):  # type: ignore[misc, valid-type]
        def forward(self, inputs: Tensor) -> Any:
            return self.get_submodule(head)(inputs) if inputs.ndim == 2 else super().forward(inputs)

    model.__class__ = OnFeatures
    return model, head


@torch.no_grad()
def features_of(run: Run, model: nn.Module, head: str, reader: PhotoReader, name: str) -> Tensor:
    """Return what the head gets of each photo, [N, F]: from the cache, or computed now."""
    trunk = {
        key: each for key, each in model.state_dict().items() if not key.startswith(f"{head}.")
    }
    digest = hashlib.sha256(name.encode() + save(trunk)).hexdigest()[:32]
    path = run.config.run.cache_dir.expanduser() / "features" / f"{digest}.safetensors"
    if path.exists():
        return load_file(path)["features"]
    device = run.accelerator.device
    model.to(device).eval()
    found: list[Tensor] = []
    hook = model.get_submodule(head).register_forward_pre_hook(
        lambda _, given: found.append(given[0].cpu())
    )
    for batch in EvalLoader(reader, batch_size=64, device=device).batches():
        model(batch.inputs)
    hook.remove()
    model.cpu().train()
    features = torch.cat(found)
    if run.accelerator.is_main_process:
        path.parent.mkdir(parents=True, exist_ok=True)
        filesystem.replace_file(path, [save({"features": features})])
    return features


def train(config: Config) -> RunResult:
    """Train, evaluate and export. Runs in every process.

    Raises ConfigError if weights of the trunk would be random, or would change after its features.
    """
    if config.run.init_from is not None:
        fact = "--init-from would replace the trunk after its features were computed"
        raise ConfigError("INIT_FROM", f"{fact}: give its weights to --trunk")
    if config.trunk is None and not config.model.is_pretrained:
        fact = "the trunk would have random weights"
        raise ConfigError("MODEL_PRETRAINED", f"{fact}: add --pretrained or --trunk FILE")
    photos = load_photos(
        config.dataset,
        image_column=config.photos.image_column,
        label_column=config.photos.label_column,
        val_fraction=config.photos.val_fraction,
        cache_dir=config.run.cache_dir,
    )
    with start_run(config, recipe="features") as run:
        size = config.photos.image_size
        shape = {"in_channels": 3, "num_classes": photos.num_classes, "image_size": (size, size)}
        model, head = on_features(build_model(config.model, **shape))
        if config.trunk is not None:
            weights = load_file(config.trunk)
            kept = {key: each for key, each in weights.items() if not key.startswith(f"{head}.")}
            try:
                missing = model.load_state_dict(kept, strict=False).missing_keys
            except RuntimeError as error:  # other shapes
                fact = f"--trunk {config.trunk} does not fit {config.model.name}"
                raise ConfigError("MODEL_PRETRAINED", f"{fact} ({error}): give its own") from error
            if random := [key for key in missing if not key.startswith(f"{head}.")]:
                fact = f"--trunk {config.trunk} has no {random[0]}"
                raise ConfigError(
                    "MODEL_PRETRAINED", f"{fact}: give a file of a {config.model.name}"
                )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(f"{head}."))
        transform = config.photos.eval_transform(model)
        readers, sets = {}, {}
        for part in ("train", "val"):
            split = getattr(photos, part)
            readers[part] = PhotoReader(
                split,
                transform=transform,
                device=run.accelerator.device,
                num_workers=config.batch.num_workers,
            )
            name = f"{part} {photos.fingerprint} {transform}"
            inputs = features_of(run, model, head, readers[part], name)
            sets[part] = TensorDataset(inputs, torch.from_numpy(split.labels))
        trainer = build_trainer(
            run,
            model=model,
            task=ImageClassificationTask(),
            train_set=sets["train"],
            eval_sets=sets["val"],
            test_set=build_eval_loader(
                readers["val"],
                config.batch,
                num_parts=run.accelerator.num_processes,
                accelerator=run.accelerator,
            ),
            metrics=classification_metrics(photos.num_classes),
            data_fingerprint=photos.fingerprint,
            export_config={
                "model": asdict(config.model),
                "in_channels": 3,
                "image_size": [size, size],
                "class_names": photos.class_names,
                "normalization": {"mean": transform.mean, "std": transform.std},
                "eval_transform": transform.to_dict(),
            },
        )
        return trainer.fit()


if __name__ == "__main__":
    main(train, Config)
