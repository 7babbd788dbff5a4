from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from accel_trainer import (
    BatchConfig,
    ConfigError,
    OptimizerConfig,
    RunConfig,
    RuntimeConfig,
    TrainerConfig,
)
from accel_trainer.cli.runs.run_reader import read_run
from accel_trainer.vision import ModelConfig, PhotoConfig, build_model
from accel_trainer.vision.models.timm_nets import describe_origin
from recipes import images

from .. import processes
from ..timm_here import import_timm
from ..variants import slow_but

# Convolutions, attention, both; norms over batches, layers, groups and none at all.
NAMES = [
    "resnet18",
    "resnet50d",
    "seresnet50",
    "regnetx_002",
    "mobilenetv3_small_050",
    "efficientnet_b0",
    "convnext_atto",
    "convnextv2_atto",
    "vit_tiny_patch16_224",
    "deit_tiny_patch16_224",
    "mixer_s32_224",
    "densenet121",
    "vgg11",
    "dla34",
    "ghostnet_100",
    "mobilevit_xxs",
    "edgenext_xx_small",
    "lcnet_050",
    "mnasnet_small",
    "resmlp_12_224",
]
FIXED_SIZE = ("vit_tiny_patch16_224", "deit_tiny_patch16_224", "mixer_s32_224", "resmlp_12_224")


@pytest.fixture(autouse=True)
def timm() -> object:
    return import_timm()


def make_photos(folder: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    for index in range(12):
        for split in ("train", "val"):
            path = folder / split / "ab"[index % 2] / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = torch.randint(256, (40 + index, 50, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(path)
    return folder


def train(
    name: str, photos: Path, folder: Path, *stops: int, micro: int = 4, freeze: str | None = None
) -> None:
    """Train a timm model for six steps of four photos, with a stop after each of `stops`."""
    import_timm()
    size = 224 if name in FIXED_SIZE else 64
    for max_steps in (*stops, 6):
        config = images.Config(
            dataset=str(photos),
            photos=PhotoConfig(image_size=size),
            model=ModelConfig(name=f"timm/{name}"),
            optimizer=OptimizerConfig(learning_rate=0.001, freeze=freeze),
            batch=BatchConfig(global_batch_size=4, per_device_batch_size=micro, eval_batch_size=6),
            trainer=TrainerConfig(num_epochs=2, max_steps=max_steps),
            runtime=RuntimeConfig(num_threads=1, timeout_s=600),
            run=RunConfig(output_dir=folder, cache_dir=folder.parent / "cache"),
        )
        images.train(config)


def exported(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "export" / "model.safetensors")


@pytest.mark.parametrize("name", slow_but(["resnet18"], NAMES))
def test_a_timm_model_resumes_bit_for_bit(tmp_path: Path, name: str) -> None:
    photos = make_photos(tmp_path / "photos")
    for which, stops in (("whole", ()), ("parts", (3,))):
        processes.run(
            train, name, photos, tmp_path / which, *stops, folder=tmp_path / f"logs-{which}"
        )
    whole, parts = (exported(tmp_path / which) for which in ("whole", "parts"))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_timm_model_trains_on_two_processes(tmp_path: Path, name: str) -> None:
    photos = make_photos(tmp_path / "photos")
    processes.run(
        two_processes, name, photos, tmp_path / "run", num_processes=2, folder=tmp_path / "logs"
    )
    assert exported(tmp_path / "run")


def two_processes(name: str, photos: Path, folder: Path) -> None:
    train(name, photos, folder, micro=2)


def test_weights_from_a_file_and_a_frozen_body(tmp_path: Path, timm: object) -> None:
    photos = make_photos(tmp_path / "photos")
    torch.manual_seed(5)
    weights = build_model(
        ModelConfig(name="timm/resnet18"), in_channels=3, num_classes=7
    ).state_dict()
    save_file(weights, tmp_path / "weights.safetensors")
    processes.run(fine_tune, photos, tmp_path, folder=tmp_path / "logs")
    trained = exported(tmp_path / "run")
    changed = {name for name in weights if not torch.equal(weights[name], trained[name])}
    assert {name.partition(".")[0] for name in changed} == {"layer3", "layer4", "fc"}
    assert trained["fc.weight"].shape == (2, 512)
    loaded, frozen = read_run(tmp_path / "run").origin
    sha256 = hashlib.sha256((tmp_path / "weights.safetensors").read_bytes()).hexdigest()
    assert (
        f"weights.safetensors (sha256 {sha256}): 120 tensors loaded; skipped: fc.bias, fc.weight; "
        "new: fc." in loaded
    )
    assert frozen.endswith("of them frozen: ^(conv1|bn1|layer[12])")


def test_the_origin_of_pretrained_weights_does_not_depend_on_the_new_head(timm: object) -> None:
    first, second = (
        build_model(ModelConfig(name="timm/resnet18"), in_channels=3, num_classes=num_classes)
        for num_classes in (2, 7)
    )
    second.load_state_dict(
        {k: v for k, v in first.state_dict().items() if not k.startswith("fc.")}, strict=False
    )
    line = describe_origin("timm/resnet18.a1_in1k", first)
    assert line == describe_origin("timm/resnet18.a1_in1k", second)
    assert re.fullmatch(
        r"timm/resnet18.a1_in1k from \S+ \(sha256 [0-9a-f]{64} without fc\): 120 tensors loaded",
        line,
    )
    with torch.no_grad():
        second.conv1.weight[0] += 1  # type: ignore[union-attr, index]
    assert line != describe_origin("timm/resnet18.a1_in1k", second)


def fine_tune(photos: Path, folder: Path) -> None:
    import_timm()
    config = images.Config(
        dataset=str(photos),
        photos=PhotoConfig(image_size=64),
        model=ModelConfig(name="timm/resnet18"),
        optimizer=OptimizerConfig(
            learning_rate=0.01, freeze="^(conv1|bn1|layer[12])", layer_decay=0.75
        ),
        trainer=TrainerConfig(num_epochs=1),
        batch=BatchConfig(per_device_batch_size=4),
        run=RunConfig(
            output_dir=folder / "run",
            cache_dir=folder / "cache",
            init_from=folder / "weights.safetensors",
        ),
    )
    images.train(config)


def test_photos_are_evaluated_as_in_the_pretraining() -> None:
    model = build_model(ModelConfig(name="timm/vit_tiny_patch16_224"), in_channels=3, num_classes=2)
    transform = PhotoConfig(image_size=224).eval_transform(model)
    assert (transform.mean, transform.std, transform.crop_ratio) == ((0.5,) * 3, (0.5,) * 3, 0.9)
    assert transform.interpolation == "bicubic"
    assert PhotoConfig(crop_ratio=0.5).eval_transform(model).crop_ratio == 0.5
    assert PhotoConfig().eval_transform(nn.Linear(1, 1)).crop_ratio == 0.875


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "timm/resnet19"}, "timm has no 'resnet19': did you mean timm/resnet1"),
        ({"name": "timm/resnet18", "width": 8}, "--model.width has no effect on timm/resnet18"),
        ({"name": "timm/resnet18.no_such_tag"}, "timm"),
    ],
)
def test_a_net_that_does_not_exist_is_one_line(config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(ModelConfig(**config), in_channels=3, num_classes=2)  # type: ignore[arg-type]


def test_weights_that_cannot_be_downloaded_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="the weights of timm/resnet18.a1_in1k cannot be"):
        build_model(ModelConfig(name="timm/resnet18.a1_in1k"), in_channels=3, num_classes=2)


# --- `--pretrained` ---


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, without network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.mark.parametrize("name", ["resnet18", "timm/resnet18"])
def test_pretrained_means_the_weights_of_timm(name: str, timm: Any, hub_cache: Path) -> None:
    folder = hub_cache / "models--timm--resnet18.a1_in1k"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    theirs = timm.create_model("resnet18").state_dict()
    save_file(theirs, folder / "snapshots" / ("0" * 40) / "model.safetensors")
    config = ModelConfig(name=name, pretrained=True)
    model = build_model(config, in_channels=3, num_classes=7, image_size=[32, 32])
    mine = model.state_dict()
    assert mine["fc.weight"].shape == (7, 512)
    assert all(torch.equal(mine[key], theirs[key]) for key in mine if not key.startswith("fc."))
    assert str(model.weights_origin).endswith("120 tensors loaded")


@pytest.mark.usefixtures("hub_cache")
@pytest.mark.parametrize("name", ["resnet18", "timm/resnet18"])
def test_without_network_the_error_says_which_file_to_bring(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_model(ModelConfig(name=name, pretrained=True), in_channels=3, num_classes=7)
    assert str(error.value).endswith(
        "https://huggingface.co/timm/resnet18.a1_in1k/resolve/main/model.safetensors elsewhere, "
        f"and start with --model {name} --init-from model.safetensors"
    )


def test_a_keyword_of_a_timm_model_reaches_it_and_its_export(timm: Any) -> None:
    given = ("drop_path_rate=0.5", "depth=3", "class_token=false", "global_pool=avg")
    config = ModelConfig(name="timm/vit_tiny_patch16_224", keywords=given)
    net: Any = build_model(config, in_channels=3, num_classes=2)
    assert len(net.blocks) == 3
    assert net.cls_token is None
    assert net.blocks[2].drop_path1.drop_prob == 0.5
    again = ModelConfig(**json.loads(json.dumps(dataclasses.asdict(config))))
    assert str(build_model(again, in_channels=3, num_classes=2)) == str(net)


@pytest.mark.parametrize(
    ("name", "keyword"),
    [
        ("timm/vit_tiny_patch16_224", "drop_path_rate"),
        ("timm/vit_tiny_patch16_224", "drop_path_rate="),
        ("timm/vit_tiny_patch16_224", "num_classes=3"),
        ("timm/vit_tiny_patch16_224", "checkpoint_path=weights.pth"),
        ("timm/vit_tiny_patch16_224", "pretrained_cfg_overlay={file: weights.pth}"),
        ("resnet18", "drop_path_rate=0.1"),
    ],
)
def test_a_keyword_that_cannot_be_given_is_refused(name: str, keyword: str) -> None:
    """A keyword of an export must not name a file that timm would load."""
    with pytest.raises(
        ConfigError, match=f"MODEL_KEYWORDS.*{re.escape(keyword.split('=')[0])}|no effect"
    ):
        ModelConfig(name=name, keywords=(keyword,))
