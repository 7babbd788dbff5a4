from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from accel_trainer.vision import ModelConfig, build_model


def one_step(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Return gradients and buffers after one forward and backward."""
    torch.manual_seed(1)
    model(images).square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients | dict(model.named_buffers())


@pytest.mark.parametrize("name", ["resnet8", "resnet9", "resnet50"])
def test_recomputed_activations_give_the_same_gradients_and_statistics(name: str) -> None:
    torch.manual_seed(0)
    plain = build_model(ModelConfig(name=name, width=4, dropout=0.3), in_channels=3, num_classes=5)
    config = ModelConfig(name=name, width=4, dropout=0.3, activation_checkpointing=True)
    recomputed = build_model(config, in_channels=3, num_classes=5)
    recomputed.load_state_dict(copy.deepcopy(plain.state_dict()))
    images = torch.randn(4, 3, 16, 16)
    expected, found = one_step(plain, images), one_step(recomputed, images)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_recomputing_keeps_fewer_activations() -> None:
    def bytes_saved(*, activation_checkpointing: bool) -> int:
        config = ModelConfig(name="resnet20", activation_checkpointing=activation_checkpointing)
        model, saved = build_model(config, in_channels=3, num_classes=10), []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.append(t.nbytes) or t, lambda t: t
        ):
            model(torch.randn(2, 3, 32, 32))
        return sum(saved)

    assert (
        bytes_saved(activation_checkpointing=True) < bytes_saved(activation_checkpointing=False) / 3
    )


@pytest.mark.slow
def test_a_recomputed_model_compiles() -> None:
    config = ModelConfig(name="resnet8", width=4, activation_checkpointing=True)
    model = build_model(config, in_channels=3, num_classes=5)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
    images = torch.randn(4, 3, 16, 16)
    expected, found = one_step(model, images), one_step(compiled, images)  # type: ignore[arg-type]
    for name, value in expected.items():
        torch.testing.assert_close(found[f"_orig_mod.{name}"], value)
