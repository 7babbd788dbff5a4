"""Every module of torch's own test suite steps in our Trainer as it does in a plain loop."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_trainer import (
    Batch,
    BatchConfig,
    DatasetOptions,
    MeanLoss,
    OptimizerConfig,
    RunConfig,
    StepOutput,
    TrainerConfig,
    build_trainer,
    start_run,
)
from accel_trainer.core.errors import UserError

from .. import processes, workload

NUM_SAMPLES = 4
MOST_INPUTS = 6


class Scalars(nn.Module):
    """A module called with each sample's arguments: one number per sample, from all outputs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, samples: list[Any]) -> Tensor:
        return torch.stack([_scalar(self.module(*args, **kwargs)) for args, kwargs in samples])


def _scalar(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        weights = torch.arange(output.numel(), dtype=torch.float64).cos().view(output.shape)
        return (output * weights).sum()
    return torch.stack([_scalar(each) for each in output if each is not None]).sum()


class Arguments:
    """The arguments of a forward, with other floating-point numbers in each sample."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args = args
        self._kwargs = kwargs

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return _scaled((self._args, self._kwargs), 1 + index / 10)


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_scaled(each, factor) for each in value)
    if isinstance(value, dict):
        return {key: _scaled(each, factor) for key, each in value.items()}
    is_number = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach() * factor if is_number else value


class Sum:
    """The loss is what the model returns."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        numbers = model(batch.inputs["samples"])
        return StepOutput(numbers, numbers)


def collate(samples: list[Any]) -> dict[str, Any]:
    return {"samples": samples, "labels": torch.zeros(len(samples))}


def cases() -> Iterator[tuple[str, nn.Module, Arguments]]:
    """Yield evenly spaced constructions of every module with parameters, and its inputs."""
    from torch.testing._internal.common_modules import module_db

    # The import forbids what runs do: to set `torch.backends.cudnn.deterministic`, and others.
    torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True
    for info in module_db:
        torch.manual_seed(0)
        inputs = info.module_inputs_func(info, "cpu", torch.float64, False, True)
        for place in sorted({place * len(inputs) // MOST_INPUTS for place in range(MOST_INPUTS)}):
            made = inputs[place].constructor_input
            called = inputs[place].forward_input
            module = info.module_cls(*made.args, **made.kwargs).double()
            if any(True for _ in module.parameters()):
                yield f"{info.name} {place}", module, Arguments(called.args, called.kwargs)


def by_hand(module: nn.Module, data: Arguments) -> dict[str, Tensor]:
    """Return the weights after a step of gradient descent by 1 on the mean over all samples."""
    model = Scalars(copy.deepcopy(module)).train()
    model([data[index] for index in range(NUM_SAMPLES)]).mean().backward()
    return {
        name: (value if value.grad is None else value - value.grad).detach()
        for name, value in model.named_parameters()
    }


def in_trainer(
    module: nn.Module, data: Arguments, folder: Path, micro: int, accumulation: int
) -> dict[str, Tensor]:
    config = workload.make_config(folder)
    config = replace(
        config,
        batch=BatchConfig(
            per_device_batch_size=micro, accumulation_steps=accumulation, eval_batch_size=2
        ),
        trainer=TrainerConfig(num_epochs=1),
        optimizer=OptimizerConfig(
            learning_rate=1.0, momentum=0.0, nesterov=False, weight_decay=0.0
        ),
        schedule=replace(config.schedule, shape="constant", warmup_epochs=0),
        runtime=replace(config.runtime, sync_batch_norm=False),
        run=RunConfig(output_dir=folder, quiet=True),
    )
    model = Scalars(copy.deepcopy(module))
    with start_run(config, recipe="modules") as run:
        build_trainer(
            run,
            model=model,
            task=Sum(),
            train_set=data,
            eval_sets=data,
            options=DatasetOptions(collate=collate),
            metrics=[MeanLoss()],
            data_fingerprint="arguments",
        ).fit()
    return dict(model.named_parameters())


def train_all(folder: Path, micro: int, accumulation: int) -> None:
    """Write, for each case, the largest difference from a plain loop's weights, or its refusal."""
    found: dict[str, Any] = {}
    for number, (name, module, data) in enumerate(cases()):
        try:
            trained = in_trainer(module, data, folder / str(number), micro, accumulation)
        except UserError as error:
            found[name] = error.message
            continue
        expected = by_hand(module, data)
        differences = [
            ((trained[key] - value).abs() / (1 + value.abs())).max().item()
            for key, value in expected.items()
            if value.numel()
        ]
        found[name] = max(differences) if all(map(math.isfinite, differences)) else math.inf
    (folder / f"found-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found, indent=1))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("expecttest") is None, reason="torch's own tests need it"
)
@pytest.mark.parametrize(
    ("num_processes", "micro", "accumulation"), [(1, 4, 1), (1, 2, 2), (2, 2, 1)]
)
def test_each_module_of_torch_takes_the_step_of_a_hand_written_loop(
    tmp_path: Path, num_processes: int, micro: int, accumulation: int
) -> None:
    processes.run(
        train_all,
        tmp_path,
        micro,
        accumulation,
        num_processes=num_processes,
        folder=tmp_path / "logs",
    )
    found = json.loads((tmp_path / "found-0.json").read_text())
    refused = {name: value for name, value in found.items() if isinstance(value, str)}
    assert {name.split()[0] for name in refused} == {
        name.split()[0] for name in found if name.startswith("nn.Lazy")
    }
    assert all("has no shape yet" in value for value in refused.values())
    assert len({name.split()[0] for name in {*found} - {*refused}}) >= 30
    assert {
        name: value for name, value in found.items() if isinstance(value, float) and value > 1e-10
    } == {}


def test_a_model_without_parameters_or_their_shapes_is_refused(tmp_path: Path) -> None:
    data = Arguments((torch.ones(2, 4, dtype=torch.float64),), {})
    for module, said in (
        (nn.ReLU(), "leave some to train"),
        (nn.LazyLinear(3), "module.weight has no shape yet: call"),
    ):
        with pytest.raises(UserError, match=said):
            in_trainer(module, data, tmp_path / type(module).__name__, 4, 1)
