"""Honest parts: models, tasks, optimizers and callbacks whose resume has the same bits."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from accel_trainer import Callback, DatasetOptions, StepOutput
from accel_trainer.core.types import Batch

from ..checkpoint.test_unsaved_state import Cached, Counting, Lookahead
from ..training.planted import Net, PlainTask, vectors


def layers() -> list[nn.Module]:
    return [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)]


def make_net() -> nn.Sequential:
    return nn.Sequential(*layers())


def sequential(kind: type[nn.Sequential]) -> Callable[[], nn.Module]:
    return lambda: kind(*layers())


# --- models ---


class ExpandedBuffer(Net):
    """A buffer that is one number in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1).expand(3))


class SetsUpLate(nn.Sequential):
    """Makes its table, and chooses its last function, at the first use; keeps what it last saw."""

    table: Any = None
    act: Any = None
    length = 0
    last: Any = None

    @functools.cached_property
    def scale(self) -> float:
        return 1 / len(self)

    @functools.cache  # noqa: B019
    def places(self, num: int) -> Tensor:
        return torch.arange(float(num))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, inputs.shape[1])
            self.act = torch.tanh
            self.length = 6
        self.last = super().forward(inputs + self.table * self.scale + self.places(self.length))
        self.auxiliary = self.last.mean()
        return self.act(self.last)


class FrozenInForward(nn.Sequential):
    """Puts its norm into evaluation mode before each use, and freezes it at the first."""

    def forward(self, inputs: Tensor) -> Tensor:
        self[1].eval()
        if self[1].weight.requires_grad:
            self[1].requires_grad_(False)
        return super().forward(inputs)


class FrozenByTrain(nn.Sequential):
    """Its norm stays in evaluation mode."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self[1].eval()
        return self


class OwnHooks(nn.Sequential):
    """Registers its hooks when it is made."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self[0].register_forward_hook(self.note)
        self[2].register_full_backward_hook(lambda module, inputs, outputs: None)
        self[0].weight.register_hook(lambda gradient: gradient * 0.5)

    def note(self, module: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
        return outputs * 0.9


class HooksOneForward(nn.Sequential):
    """Watches a layer during each forward."""

    def forward(self, inputs: Tensor) -> Tensor:
        seen: list[Tensor] = []
        with self[0].register_forward_hook(lambda module, inputs, out: seen.append(out)):
            outputs: Tensor = super().forward(inputs)
        return outputs + 0.1 * seen[0].mean(1, keepdim=True)


class StoredCounter(Net):
    """Counts, and says so in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(inputs) / (1 + self.calls)

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.calls)

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = int(state)


class GrowingExtraState(StoredCounter):
    """Its extra state has another shape after each step."""

    def get_extra_state(self) -> Tensor:
        return torch.zeros(self.calls)

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = len(state)


class Assigned(Net):
    """Assigns its buffer instead of changing it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * outputs.detach().mean(0)
        return outputs - self.centre


class Tied(nn.Sequential):
    """Two layers share a matrix."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
        self[2].weight = self[0].weight


class Recurrent(nn.Module):
    """An LSTM over the numbers of a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.lstm(inputs[..., None])[0][:, -1])


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(6, 3)
    )


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)),
        nn.Conv1d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.Dropout1d(0.2),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.LayerNorm(4),
        nn.PReLU(),
        nn.AlphaDropout(0.1),
        nn.Linear(4, 3),
    )


class OfTransformers(nn.Module):
    """A small transformers model with random weights and dropout, over the signs of six numbers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import DistilBertConfig, DistilBertForSequenceClassification

        sizes = {"vocab_size": 2, "max_position_embeddings": 6, "dim": 8, "hidden_dim": 16}
        config = DistilBertConfig(**sizes, n_layers=1, n_heads=2, num_labels=3)
        self.net = DistilBertForSequenceClassification(config)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(input_ids=(inputs > 0).long()).logits


class Reverse(torch.autograd.Function):
    """The identity, with a negated gradient."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Gan(nn.Module):
    """A generator of vectors and a critic, both trained."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        made = self.generator(torch.randn(len(inputs), 2))
        return self.critic(inputs) - self.critic(Reverse.apply(made))


def normed(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(wrap(nn.Linear(6, 8)), *layers()[1:])


norms = nn.utils.parametrizations
MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": make_net,
    "sets up late": sequential(SetsUpLate),
    "frozen in the forward": sequential(FrozenInForward),
    "frozen by train": sequential(FrozenByTrain),
    "hooks of its own": sequential(OwnHooks),
    "hooks of one forward": sequential(HooksOneForward),
    "counter in the extra state": StoredCounter,
    "growing extra state": GrowingExtraState,
    "assigned buffer": Assigned,
    "expanded buffer": ExpandedBuffer,
    "tied": Tied,
    "recurrent": Recurrent,
    "transformer": transformer,
    "convolutional": convolutional,
    "spectral norm": normed(norms.spectral_norm),
    "weight norm": normed(norms.weight_norm),
    "orthogonal": normed(norms.orthogonal),
    "old spectral norm": normed(nn.utils.spectral_norm),
    "of transformers": OfTransformers,
    "gan": Gan,
}

# --- tasks ---


def task_of(measure: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Any]:
    """Return a task of the losses that `measure` returns for logits [B, 3] and targets [B]."""

    class Measured(PlainTask):
        def step(self, model: nn.Module, batch: Batch) -> StepOutput:
            return StepOutput(measure(model(batch.inputs), batch.targets))

        eval_step = step

    return Measured


def each_mean(measure: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda logits, targets: measure(
        logits, F.one_hot(targets, 3).float(), reduction="none"
    ).mean(1)


def contrastive(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)), reduction="none")


class SlottedTask:
    """A task without a dictionary, and nothing that it changes."""

    __slots__ = ("smoothing",)

    def __init__(self) -> None:
        self.smoothing = 0.1

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(batch.inputs)
        losses = F.cross_entropy(
            logits, batch.targets, reduction="none", label_smoothing=self.smoothing
        )
        return StepOutput(losses, logits)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    modes = [each.training for each in model.modules()]
    model.eval()
    yield
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode


class EvaluatesFirst(PlainTask):
    """Looks at the model in evaluation mode, and goes back."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        with evaluating(model), torch.no_grad():
            sure = model(batch.inputs).softmax(1).max(1).values
        output = super().step(model, batch)
        return output._replace(losses=output.losses * sure)

    eval_step = PlainTask.step


class TrainsWithoutDropout(PlainTask):
    """Puts the model into evaluation mode at the start of each step."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        model.eval()
        return super().step(model, batch)

    eval_step = PlainTask.step


class TakesTurns(PlainTask):
    """Trains one half of the model in even steps, and the other in odd ones."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        is_even = batch.position.step % 2 == 0
        net = getattr(model, "module", model)
        net[0].requires_grad_(is_even)
        net[4].requires_grad_(not is_even)
        return super().step(model, batch)

    eval_step = PlainTask.step


class SometimesTrainsItsHead(PlainTask):
    """Trains one layer in every second step."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        if batch.position.step % 2 == 0:
            hidden = model[:4](batch.inputs)  # type: ignore[index]
            return StepOutput(hidden.square().mean(1))
        return super().step(model, batch)

    eval_step = PlainTask.step


class FromMean:
    """A model's own mean loss."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        loss = F.cross_entropy(model(batch.inputs), batch.targets)
        return StepOutput.from_mean(loss, num_items=len(batch))


class Coupled(PlainTask):
    """Compares the samples of a batch with each other."""

    couples_batch = True

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return StepOutput(contrastive(model(batch.inputs), batch.targets))

    eval_step = PlainTask.step


class RemembersLoss(PlainTask):
    """Keeps its last loss for a log."""

    last: Any = None

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        self.last = output.losses.detach().mean()
        self.extremes = (float(self.last), float(output.losses.detach().max()))
        return output

    eval_step = PlainTask.step


class FrozenTeacher(PlainTask):
    """A fixed teacher beside the loss, and what it said last."""

    def __init__(self) -> None:
        self.teacher = make_net().eval().requires_grad_(False)
        self.last: Any = None

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        self.last = self.teacher(output.outputs.repeat(1, 2))
        return output._replace(losses=output.losses + self.last.square().mean(1))

    eval_step = PlainTask.step


TASKS: dict[str, Callable[[], Any]] = {
    "slots": SlottedTask,
    "evaluates first": EvaluatesFirst,
    "trains without dropout": TrainsWithoutDropout,
    "remembers its loss": RemembersLoss,
    "frozen teacher": FrozenTeacher,
    "mean squared error": task_of(each_mean(F.mse_loss)),
    "smooth absolute error": task_of(each_mean(F.smooth_l1_loss)),
    "binary cross-entropy": task_of(each_mean(F.binary_cross_entropy_with_logits)),
    "margins": task_of(functools.partial(F.multi_margin_loss, reduction="none")),
    "random in evaluations": task_of(
        lambda logits, targets: F.cross_entropy(
            logits + torch.randn_like(logits), targets, reduction="none"
        )
    ),
    "mean of the batch": FromMean,
    "coupled, and says so": Coupled,
    "no loss at all": task_of(lambda logits, targets: 0 * logits.sum(1)),
    "tiny losses": task_of(lambda logits, targets: 1e-7 * logits.square().sum(1)),
    "larger losses": task_of(lambda logits, targets: 10 * logits.square().sum(1)),
    "likelihood": task_of(
        lambda logits, targets: F.nll_loss(logits.log_softmax(1), targets, reduction="none")
    ),
}

# --- optimizers, callbacks and data ---


class Wrapper(Optimizer):
    """Steps another optimizer, as wrappers do that do not call `Optimizer.__init__`."""

    def __init__(self, parameters: Any) -> None:
        self.wrapped = SGD(parameters, lr=0.1, momentum=0.9)
        self.param_groups = self.wrapped.param_groups
        self.state = self.wrapped.state
        self.defaults = {}

    def step(self, closure: Any = None) -> None:
        self.wrapped.step()

    def state_dict(self) -> dict[str, Any]:
        return self.wrapped.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wrapped.load_state_dict(state)
        self.param_groups = self.wrapped.param_groups
        self.state = self.wrapped.state


class Logging(AdamW):
    """Keeps the norm of the last step, and has defaults of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.last_norm: Any = None

    def step(self, closure: Any = None) -> None:
        self.last_norm = self.param_groups[0]["params"][0].grad.norm()
        super().step()


class Watches(Callback):
    """Looks at the model in evaluation mode, with a hook, and puts all back."""

    def on_step_end(self, trainer: Any, report: Any) -> None:
        with evaluating(trainer.model), torch.no_grad():
            seen: list[Tensor] = []
            with trainer.model[0].register_forward_hook(lambda *call: seen.append(call[2])):
                trainer.model(torch.ones(2, 6))
            self.last = float(seen[0].mean())


class HooksAtStart(Callback):
    """Watches activations by a hook that it registers at each start."""

    def on_fit_start(self, trainer: Any) -> None:
        trainer.model[0].register_forward_hook(self.note)

    def note(self, module: nn.Module, inputs: Any, outputs: Tensor) -> None:
        self.last = float(outputs.detach().mean())


class OwnAverage(Callback):
    """An average of the weights that it stores."""

    def __init__(self) -> None:
        self.shadow: dict[str, Tensor] = {}

    def on_step_end(self, trainer: Any, report: Any) -> None:
        for name, weight in trainer.model.state_dict().items():
            old = self.shadow.get(name, weight)
            self.shadow[name] = torch.lerp(old.float(), weight.float(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


class Halves(Callback):
    """Rounds the weights after each step, and scales some of them after the second."""

    def on_step_end(self, trainer: Any, report: Any) -> None:
        trainer.model.half().float()
        if report.optimizer_step == 2:
            trainer.model[4].weight.data.mul_(0.99)


class StoredFreezing(Callback):
    """Freezes a layer after the first step, and stores that it did."""

    is_done = False

    def on_fit_start(self, trainer: Any) -> None:
        trainer.model[0].requires_grad_(not self.is_done)

    def on_step_end(self, trainer: Any, report: Any) -> None:
        if not self.is_done:
            self.is_done = True
            trainer.model[0].requires_grad_(False)

    def state_dict(self) -> dict[str, Any]:
        return {"is_done": self.is_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.is_done = state["is_done"]


class CountsForALog(Callback):
    """Counts, and says that no result depends on it."""

    unsaved_attributes = ("num_steps", "losses")

    def __init__(self) -> None:
        self.num_steps = 0
        self.losses: list[float] = []

    def on_step_end(self, trainer: Any, report: Any) -> None:
        self.num_steps += 1
        self.losses.append(float(report.loss_sum))

    def on_evaluate_end(self, trainer: Any, metrics: Any) -> None:
        self.best = max(metrics.values())


class FreezesAtStart(Callback):
    def on_fit_start(self, trainer: Any) -> None:
        trainer.model[0].weight.requires_grad_(False)


class Augmented:
    """Random vectors that draw from the global generators, over a cache of the raw ones."""

    def __init__(self, num: int) -> None:
        self.vectors = vectors(num)
        self.raw: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> Any:
        if index not in self.raw:
            self.raw[index] = self.vectors[index][0] * 2
        drawn = random.random() + np.random.rand() + torch.rand(6)
        return self.raw[index] + drawn, self.vectors[index][1]


def padding() -> DatasetOptions:
    """Return options of a function that pads, and draws from the global generator."""
    pad = functools.partial(F.pad, pad=(0, 0))

    def collate(samples: list[Any]) -> Any:
        inputs = torch.stack([pad(each) for each, _ in samples])
        return inputs * torch.rand(()), torch.tensor([target for _, target in samples])

    return DatasetOptions(collate=collate)


def warm_up(step: int, *, steps: int = 3) -> float:
    return 0.1 * min(1.0, (step + 1) / steps)


def of(optimizer: Callable[[Any], Any]) -> dict[str, Any]:
    return {"optimizer": lambda model: optimizer(model.parameters())}


def cached() -> nn.Module:
    """Return a model whose outputs depend on the size of the batch."""
    return nn.Sequential(nn.Linear(6, 4), Cached())


def all_callbacks() -> tuple[Callback, ...]:
    return Watches(), HooksAtStart(), OwnAverage(), CountsForALog()


# As functions: each start of a run builds its parts.
HONEST: dict[str, Callable[[], dict[str, Any]]] = {
    **{name: lambda model=model: {"model": model} for name, model in MODELS.items()},
    **{name: lambda task=task: {"task": task} for name, task in TASKS.items()},
    "non-persistent buffers": lambda: {"model": cached, "task": Coupled},
    "takes turns": lambda: {"model": make_net, "task": TakesTurns},
    "sometimes trains its head": lambda: {"model": make_net, "task": SometimesTrainsItsHead},
    "optimizer that counts": lambda: of(Counting),
    "lookahead": lambda: of(Lookahead),
    "optimizer that logs": lambda: of(Logging),
    "wrapper of an optimizer": lambda: of(Wrapper),
    "callbacks": lambda: {"model": make_net, "callbacks": all_callbacks()},
    "changes of weights": lambda: {"model": make_net, "callbacks": (Halves(),)},
    "stored freezing": lambda: {"model": make_net, "callbacks": (StoredFreezing(),)},
    "freezes at the start": lambda: {"model": make_net, "callbacks": (FreezesAtStart(),)},
    "augmentation and a cache": lambda: {"data": Augmented},
    "collate": lambda: {"options": padding()},
    "schedule": lambda: {"schedule": warm_up},
    "partial schedule": lambda: {"schedule": functools.partial(warm_up, steps=2)},
    "closed schedule": lambda: {"schedule": lambda step, rates=(0.1, 0.2): rates[step % 2]},
}
