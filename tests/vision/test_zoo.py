from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from accel_trainer.core.errors import ConfigError
from accel_trainer.vision import MODEL_NAMES, ModelConfig, build_model

# Parameters in thousands: He et al. 2015 table 6 (0.27, 0.46, 0.66, 0.85, 1.7 M), ResNet-18 11.17 M
# as widely reported for CIFAR, ResNet-9 6.57 M as in D. Page's series.
PARAMETERS = {
    "resnet8": 75_290,
    "resnet20": 269_722,
    "resnet32": 464_154,
    "resnet44": 658_586,
    "resnet56": 853_018,
    "resnet110": 1_727_962,
    "resnet9": 6_573_120,
    "airbench94": 1_972_792,  # 1.97 M and 9.92 M: as the scripts of K. Jordan's repository
    "airbench96": 9_918_776,
    "resnet18": 11_173_962,
    "resnet34": 21_282_122,
    "resnet50": 23_520_842,
    "resnet101": 42_512_970,
}
SMALL = {name: ModelConfig(name=name, width=4) for name in MODEL_NAMES if name != "resnet110"}


def count_parameters(config: ModelConfig, *, in_channels: int = 3, num_classes: int = 10) -> int:
    with torch.device("meta"):
        model = build_model(config, in_channels=in_channels, num_classes=num_classes)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_models_have_as_many_parameters_as_their_papers_say(name: str, count: int) -> None:
    assert count_parameters(ModelConfig(name=name)) == count


def test_resnet9_of_width_16_has_0_41_million_parameters() -> None:
    assert count_parameters(ModelConfig(name="resnet9", width=16)) == 412_944


@pytest.mark.parametrize("name", ["resnet20", "resnet18", "resnet9"])
def test_group_norm_has_the_parameters_of_batch_norm_and_no_statistics(name: str) -> None:
    assert count_parameters(ModelConfig(name=name)) == count_parameters(
        ModelConfig(name=name, norm="group")
    )
    model = build_model(
        ModelConfig(name=name, norm="group", width=8), in_channels=3, num_classes=10
    )
    assert not list(model.buffers())


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("config", SMALL.values(), ids=SMALL)
def test_every_model_trains_on_any_number_of_rows_and_on_none(
    config: ModelConfig, norm: str
) -> None:
    config = ModelConfig(name=config.name, width=config.width, norm=norm, dropout=0.1)  # type: ignore[arg-type]
    model = build_model(config, in_channels=1, num_classes=7)
    for rows in (3, 0):
        model.zero_grad()
        logits = model(torch.randn(rows, 1, 16, 16))
        assert logits.shape == (rows, 7)
        logits.sum().backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        assert all(p.grad is not None and p.grad.isfinite().all() for p in trained)
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["resnet8", "resnet18", "resnet9", "airbench94", "airbench96"])
def test_a_forward_without_rows_does_not_change_the_running_statistics(name: str) -> None:
    model = build_model(ModelConfig(name=name, width=4), in_channels=3, num_classes=10)
    before = {key: value.clone() for key, value in model.named_buffers() if "running" in key}
    model(torch.empty(0, 3, 32, 32))
    after = dict(model.named_buffers())
    assert before
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", ["resnet8", "resnet18", "resnet50", "resnet9", "airbench94"])
def test_dropout_drops_its_fraction_only_in_training(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(
        ModelConfig(name=name, width=16, dropout=0.25), in_channels=3, num_classes=10
    )
    kept, before = [], []

    def count(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        before.append(inputs[0].count_nonzero())
        kept.append(output.count_nonzero())

    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(count)
    images = torch.randn(64, 3, 16, 16)
    model(images)
    assert kept, "no dropout was applied"
    assert float(sum(kept) / sum(before)) == pytest.approx(0.75, abs=0.03)
    assert not torch.equal(model(images), model(images)), (
        "and what is dropped is missing in the logits"
    )
    model.eval()
    assert torch.equal(model(images), model(images))


@pytest.mark.parametrize("name", ["resnet8", "resnet18", "resnet50", "resnet9"])
def test_filters_begin_with_the_spread_of_their_fan_out(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(ModelConfig(name=name), in_channels=3, num_classes=10)
    for filters in (module.weight for module in model.modules() if isinstance(module, nn.Conv2d)):
        fan_out = filters.shape[0] * filters[0, 0].numel()
        assert float(filters.detach().std()) == pytest.approx((2 / fan_out) ** 0.5, rel=0.15), (
            filters.shape
        )


def scale_of_logits(name: str) -> float:
    """Return what the logits are, as a multiple of what the linear head gives."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(name=name, width=8), in_channels=3, num_classes=10)
    from_head: list[Tensor] = []
    head = model.fc if name.startswith("resnet2") else model.head
    head.register_forward_hook(lambda module, inputs, output: from_head.append(output))  # type: ignore[operator]
    ratio = model(torch.randn(4, 3, 16, 16)).detach() / from_head[0].detach()
    torch.testing.assert_close(ratio, ratio[0, 0].expand(4, 10))
    return float(ratio[0, 0])


def test_logits_are_scaled_as_their_authors_do() -> None:
    assert scale_of_logits("resnet9") == pytest.approx(0.125)  # D. Page's net
    # one by the channels of the last group
    assert scale_of_logits("airbench94") == pytest.approx(1 / 32)
    assert scale_of_logits("resnet20") == 1


@pytest.mark.parametrize(("name", "share"), [("airbench94", 0.4), ("airbench96", 0.1)])
def test_running_statistics_move_by_the_momentum_of_the_authors_script(
    name: str, share: float
) -> None:
    model = build_model(ModelConfig(name=name, width=4), in_channels=3, num_classes=10)
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    seen: list[Tensor] = []
    norm.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    model(torch.randn(4, 3, 16, 16))
    torch.testing.assert_close(norm.running_mean, share * seen[0].mean((0, 2, 3)))


def test_an_unknown_model_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="MODEL_NAME.*'resnet-20': did you mean"):
        ModelConfig(name="resnet-20")


def test_no_model_is_proposed_that_does_not_exist() -> None:
    for name in ("wrn28_10", "convnext_tiny", "x"):
        with pytest.raises(ConfigError) as refused:
            ModelConfig(name=name)
        assert "did you mean" not in refused.value.message
        assert f"timm/{name}" not in refused.value.message
        assert "timm.list_models()" in refused.value.message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"width": 0}, "--model.width is 0"),
        ({"dropout": 1.0}, "--model.dropout is 1.0"),
        ({"dropout": float("nan")}, "--model.dropout is nan"),
        ({"norm": "layer"}, "--model.norm is 'layer'"),
        ({"stem": "large"}, "--model.stem is 'large'"),
        ({"name": "resnet20", "stem": "imagenet"}, "resnet20 has no --model.stem"),
    ],
)
def test_values_out_of_range_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**values)  # type: ignore[arg-type]


# --- the nets of torchvision ---

# Name: blocks of the stages, whether they are bottlenecks; 10^9 multiply-adds at 224 pixels and
# 10^6 parameters with 1,000 classes, as torchvision's table of weights lists them.
LARGE = {
    "resnet18": ((2, 2, 2, 2), False, 1.81, 11.7),
    "resnet34": ((3, 4, 6, 3), False, 3.66, 21.8),
    "resnet50": ((3, 4, 6, 3), True, 4.09, 25.6),
    "resnet101": ((3, 4, 23, 3), True, 7.80, 44.5),
}


def build_large(name: str, *, image_size: int = 224, **values: Any) -> nn.Module:
    with torch.device("meta"):
        config = ModelConfig(name=name, **values)
        return build_model(
            config, in_channels=3, num_classes=1000, image_size=(image_size, image_size)
        )


def norm_shapes(name: str, channels: int) -> Iterator[tuple[str, list[int]]]:
    for part in ("weight", "bias", "running_mean", "running_var"):
        yield f"{name}.{part}", [channels]
    yield f"{name}.num_batches_tracked", []


def torchvision_shapes(
    stages: Sequence[int], *, is_bottleneck: bool
) -> Iterator[tuple[str, list[int]]]:
    """Yield the names and shapes of torchvision's state dict, in its order, by the rule that its
    code follows."""
    yield "conv1.weight", [64, 3, 7, 7]
    yield from norm_shapes("bn1", 64)
    channels = 64
    for stage, num_blocks in enumerate(stages, 1):
        width = 64 * 2 ** (stage - 1)
        out = width * 4 if is_bottleneck else width
        for number in range(num_blocks):
            block, filters = f"layer{stage}.{number}", [(width, channels, 3), (width, width, 3)]
            if is_bottleneck:
                filters = [(width, channels, 1), (width, width, 3), (out, width, 1)]
            for index, (after, before, kernel) in enumerate(filters, 1):
                yield f"{block}.conv{index}.weight", [after, before, kernel, kernel]
                yield from norm_shapes(f"{block}.bn{index}", after)
            if number == 0 and (stage > 1 or channels != out):
                yield f"{block}.downsample.0.weight", [out, channels, 1, 1]
                yield from norm_shapes(f"{block}.downsample.1", out)
            channels = out
    yield "fc.weight", [1000, channels]
    yield "fc.bias", [1000]


@pytest.mark.parametrize("name", LARGE)
def test_names_and_shapes_of_large_nets_are_those_of_torchvision(name: str) -> None:
    stages, is_bottleneck, _, millions = LARGE[name]
    model = build_large(name)
    shapes = [(key, list(tensor.shape)) for key, tensor in model.state_dict().items()]
    assert shapes == list(torchvision_shapes(stages, is_bottleneck=is_bottleneck))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


@pytest.mark.parametrize("name", LARGE)
def test_large_nets_do_the_work_of_their_papers_at_224_pixels(name: str) -> None:
    model = build_large(name).eval()
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 3, 224, 224, device="meta"))
    assert counter.get_total_flops() / 2e9 == pytest.approx(LARGE[name][2], abs=0.01)


def test_the_stem_for_large_images_is_for_64_pixels_on_the_shorter_side() -> None:
    def first(height: int, width: int, stem: Any = "auto") -> list[int]:
        config = ModelConfig(name="resnet18", width=4, stem=stem)
        model = build_model(config, in_channels=3, num_classes=10, image_size=(height, width))
        return list(model.state_dict()["conv1.weight"].shape)

    assert first(64, 64) == first(300, 64) == first(32, 32, "imagenet") == [4, 3, 7, 7]
    assert first(63, 63) == first(63, 300) == first(224, 224, "cifar") == [4, 3, 3, 3]
    small = build_model(
        ModelConfig(name="resnet20"), in_channels=3, num_classes=10, image_size=(224, 224)
    )
    assert list(small.state_dict()["conv1.weight"].shape) == [16, 3, 3, 3]
