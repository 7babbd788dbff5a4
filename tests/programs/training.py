"""How programs train: losses, optimizers, states of their own, steps, observers and settings."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

from accel_trainer import (
    Batch,
    Callback,
    ClassificationConfig,
    ClassificationTask,
    Gradients,
    MeanLoss,
    MeanNumber,
    Position,
    ReduceLROnPlateau,
    RunResult,
    StepBatch,
    StepOutput,
    StepReport,
    Trainer,
    gather_with_gradient,
)
from accel_trainer.vision import to_png
from tests.checkpoint.sharded_run import KINDS

from .draft import Draft

Part = Callable[[Draft], None]


def whole(tensor: Tensor) -> Tensor:
    """Return a weight, whole if it is a shard. **Collective** then."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# --- tasks ---


class Curriculum:
    """Smooths the labels less and less, and reports numbers of its own."""

    metrics = (MeanLoss(), MeanNumber("accuracy", higher_is_better=True))

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(batch.inputs)
        smoothing = 0.3 * (1 - batch.position.progress) + 0.1 * (batch.position.epoch % 2)
        losses = F.cross_entropy(logits, batch.targets, reduction="none", label_smoothing=smoothing)
        accuracy = (logits.argmax(1) == batch.targets).double()
        return StepOutput(losses, logits, numbers={"accuracy": accuracy})


class Items:
    """Averages over items, of which a sample has as many as its class says."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(batch.inputs)
        num_items = batch.targets + 1
        losses = F.cross_entropy(logits, batch.targets, reduction="none") * num_items
        return StepOutput(losses, logits, num_items=num_items)


class OnlyMean:
    """Has only the mean of a micro-batch."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(batch.inputs)
        mean = F.cross_entropy(logits, batch.targets)
        return StepOutput.from_mean(mean, num_items=len(batch), outputs=logits)


class Noisy:
    """Adds noise to the inputs, also in evaluations."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(batch.inputs + 0.2 * torch.randn_like(batch.inputs))
        return StepOutput(F.cross_entropy(logits, batch.targets, reduction="none"), logits)


class Pairs:
    """Lets two noisy views of a sample find each other among those of all samples of a step."""

    couples_batch: Any = "gathered"

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        views = batch.inputs.repeat(2, 1)
        outputs = model(views + 0.2 * torch.randn_like(views))
        mine, others = F.normalize(outputs, dim=1).chunk(2)
        accelerator = Accelerator()
        everyone = gather_with_gradient(others, accelerator)
        everyones_ids = gather_with_gradient(batch.sample_ids, accelerator)
        places = (batch.sample_ids[:, None] == everyones_ids).int().argmax(1)
        losses = F.cross_entropy(mine @ everyone.T / 0.2, places, reduction="none")
        return StepOutput(losses, outputs.chunk(2)[0])

    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        outputs = model(batch.inputs)
        return StepOutput(outputs.square().mean(1), outputs)


def weighted_classes(draft: Draft) -> None:
    config = ClassificationConfig(label_smoothing=0.1, class_weights="balanced")
    draft.task = ClassificationTask(config, class_counts=torch.tensor([15, 30, 27]))


class Sums:
    """Adds up the losses of a step."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(batch.inputs)
        losses = F.cross_entropy(logits, batch.targets, reduction="none") / 16
        return StepOutput(losses, logits, reduction="sum")


TASKS: dict[str, Part] = {
    "classes": lambda draft: setattr(draft, "task", ClassificationTask()),
    "weighted classes": weighted_classes,
    "pairs": lambda draft: setattr(draft, "task", Pairs()),
    "curriculum": lambda draft: setattr(draft, "task", Curriculum()),
    "items": lambda draft: setattr(draft, "task", Items()),
    "only a mean": lambda draft: setattr(draft, "task", OnlyMean()),
    "noisy": lambda draft: setattr(draft, "task", Noisy()),
    "sums": lambda draft: setattr(draft, "task", Sums()),
}


class Around:
    """A task around another: it passes on all that it does not change."""

    def __init__(self, task: Any) -> None:
        self.task = task

    def __getattr__(self, name: str) -> Any:
        if name == "task":  # while it is copied
            raise AttributeError(name)
        return getattr(self.task, name)

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return self.task.step(model, batch)


# --- optimizers ---


class OddForm(AdamW):
    """Keeps beside each weight a slow copy, a tuple and a dict, and a count in its group."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in filter(lambda each: each.grad is not None, group["params"]):
                state = self.state[parameter]
                slow = state.setdefault("slow", parameter.detach().clone())
                state["seen"] = {"counts": (group["count"], None), "rates": [1 / group["count"]]}
                slow.lerp_(parameter, state["seen"]["rates"][0])
                parameter.lerp_(slow, 0.1)


class ScheduleFree(Optimizer):
    """Evaluates the mean of the weights that it steps; `train` and `eval` exchange them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "mode": "train"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in filter(lambda each: each.grad is not None, group["params"]):
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                mean = state.setdefault("mean", parameter.detach().clone())
                parameter.sub_(parameter.grad, alpha=group["lr"])
                mean.lerp_(parameter, 1 / state["count"])

    def train(self) -> None:
        self._exchange("train")

    def eval(self) -> None:
        self._exchange("eval")

    @torch.no_grad()
    def _exchange(self, mode: str) -> None:
        for group in self.param_groups:
            if group["mode"] != mode:
                group["mode"] = mode
                for parameter in group["params"]:
                    if "mean" in self.state[parameter]:
                        mean = self.state[parameter]["mean"]
                        kept = parameter.detach().clone()
                        parameter.copy_(mean)
                        mean.copy_(kept)


class Counting(SGD):
    """Its rate depends on a number that only `state_dict` shows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.param_groups[0]["lr"] = 0.1 / self.count
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count, "seen": {"counts": [self.count]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.count = state["count"]


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [each for each in module.parameters() if each.requires_grad]


def all_but_head(model: nn.Module) -> list[nn.Parameter]:
    head = {*model.head.parameters()}
    return [each for each in trained(model) if each not in head]


def two_rates(model: nn.Module) -> Optimizer:
    groups = [{"params": all_but_head(model)}, {"params": trained(model.head), "lr": 0.2}]
    return SGD(groups, lr=0.05, momentum=0.9)


TWO: Mapping[str, Callable[[Any], Optimizer]] = {
    "body": lambda model: Adam(all_but_head(model), lr=0.01, betas=(0.5, 0.9)),
    "head": lambda model: SGD(trained(model.head), lr=0.1, momentum=0.9),
}


class InTurn(Around):
    """Trains the body twice, then the head, then both."""

    def turn(self, position: Position) -> str | tuple[str, ...]:
        return ("body", "body", "head", ("body", "head"))[position.step % 4]


def turns(draft: Draft) -> None:
    draft.optimizer = TWO
    draft.task = InTurn(draft.task)


class OnOneBatch(Around):
    """Trains the body and then the head on each batch, and sometimes both at once."""

    def updates(self, position: Position) -> list[str | tuple[str, ...]]:
        return [("body", "head"), "head"] if position.step % 3 == 2 else ["body", "head"]


def updates(draft: Draft) -> None:
    draft.optimizer = TWO
    draft.task = OnOneBatch(draft.task)


def by_name(name: str, rate: float) -> Part:
    return lambda draft: draft.set("optimizer", name=name, learning_rate=rate)


def own(build: Callable[[Any], Any]) -> Part:
    return lambda draft: setattr(draft, "optimizer", build)


def schedule_free(draft: Draft) -> None:
    draft.optimizer = lambda model: ScheduleFree(trained(model))


OPTIMIZERS: dict[str, Part] = {
    "sgd": by_name("sgd", 0.05),
    "adamw": by_name("adamw", 0.02),
    "RMSprop": by_name("RMSprop", 0.005),
    "counting": own(lambda model: Counting(trained(model))),
    "odd form": own(lambda model: OddForm(trained(model))),
    "schedule-free": schedule_free,
    "two rates": own(two_rates),
    "two together": lambda draft: setattr(draft, "optimizer", TWO),
    "turns": turns,
    "updates": updates,
}


# --- states of one's own ---


class Centre:
    """A running mean of the outputs."""

    def __init__(self) -> None:
        self.value = torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


class MoveCentre(Callback):
    """Moves the centre once in each step, by the outputs of all processes."""

    def __init__(self, centre: Centre) -> None:
        self.centre = centre
        self.sums: list[Tensor] = []

    def on_micro_batch(self, trainer: Trainer, batch: Batch, output: StepOutput) -> None:
        self.sums.append(output.outputs.float().sum())

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        total = trainer.accelerator.gather(torch.stack(self.sums)).sum()
        if not report.was_skipped:
            self.centre.value = self.centre.value.lerp(total / report.num_samples, 0.1)
        self.sums.clear()


class ByCentre(Around):
    """Weighs the losses by the centre."""

    def __init__(self, task: Any, centre: Centre) -> None:
        super().__init__(task)
        self.centre = centre

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        return output._replace(losses=output.losses * (1 + self.centre.value.tanh()))


def centre(draft: Draft) -> None:
    value = Centre()
    draft.task = ByCentre(draft.task, value)
    draft.callbacks.append(MoveCentre(value))
    draft.states["centre"] = value


class MoveTeacher(Callback):
    """Moves a teacher that follows the model."""

    def __init__(self, teacher: nn.Module) -> None:
        self.teacher = teacher

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        weights = zip(self.teacher.parameters(), trainer.model.parameters(), strict=True)
        with torch.no_grad():
            for slow, fast in weights:
                slow.lerp_(whole(fast), 0.2)
        self.teacher.train()  # forgets what it has computed from its weights
        self.teacher.eval()


class ByTeacher(Around):
    """Also learns what a teacher says."""

    def __init__(self, task: Any, teacher: nn.Module) -> None:
        super().__init__(task)
        self.teacher = teacher

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        with torch.no_grad():
            taught = self.teacher(batch.inputs)
        distances = (output.outputs - taught).square().mean(1)
        if not output.is_per_sample:
            return output._replace(losses=output.losses + distances.sum())
        return output._replace(losses=output.losses + distances)


def teacher(draft: Draft) -> None:
    copied = copy.deepcopy(draft.model).requires_grad_(False).eval()
    draft.task = ByTeacher(draft.task, copied)
    draft.callbacks.append(MoveTeacher(copied))
    draft.states["teacher"] = copied


class Drawing:
    """A generator of one's own, and the factor that it drew last."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.factor = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "factor": self.factor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.factor = state["factor"]


class Draw(Callback):
    """Draws after each step."""

    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        self.drawing.factor = 0.5 + torch.rand((), generator=self.drawing.generator).item()


class ByDrawing(Around):
    """Weighs the losses by what was drawn."""

    def __init__(self, task: Any, drawing: Drawing) -> None:
        super().__init__(task)
        self.drawing = drawing

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        return output._replace(losses=output.losses * self.drawing.factor)


def generator(draft: Draft) -> None:
    drawing = Drawing()
    draft.task = ByDrawing(draft.task, drawing)
    draft.callbacks.append(Draw(drawing))
    draft.states["drawing"] = drawing


class Anchor:
    """The weights of the body at the end of the last epoch, by its names."""

    def __init__(self, body: nn.Module) -> None:
        self.weights = {name: whole(each).clone() for name, each in body.named_parameters()}
        self.num_epochs = 0

    def norm(self) -> Tensor:
        return torch.stack([each.norm() for each in self.weights.values()]).norm()

    def state_dict(self) -> dict[str, Any]:
        return {**self.weights, "num_epochs": self.num_epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weights = {name: state[name] for name in self.weights}
        self.num_epochs = state["num_epochs"]


class MoveAnchor(Callback):
    """Lets the anchor be the weights that the body now has."""

    def __init__(self, anchor: Anchor) -> None:
        self.anchor = anchor

    def on_epoch_end(self, trainer: Trainer) -> None:
        body = trainer.model.body
        self.anchor.weights = {
            name: whole(body.get_parameter(name)).clone() for name in self.anchor.weights
        }
        self.anchor.num_epochs += 1


class ByAnchor(Around):
    """Weighs the losses by the norm of the anchor."""

    def __init__(self, task: Any, anchor: Anchor) -> None:
        super().__init__(task)
        self.anchor = anchor

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        return output._replace(losses=output.losses * (1 + self.anchor.norm() / 10))


def anchor(draft: Draft) -> None:
    value = Anchor(draft.model.body)
    draft.task = ByAnchor(draft.task, value)
    draft.callbacks.append(MoveAnchor(value))
    draft.states["body"] = value


class Frozen:
    """The weights that stand still, by the model's names: none in most models."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {
            name: each.detach().clone()
            for name, each in model.named_parameters()
            if not each.requires_grad
        }

    def state_dict(self) -> dict[str, Any]:
        return self.weights

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weights = {name: state[name] for name in self.weights}


def frozen(draft: Draft) -> None:
    draft.states["frozen"] = Frozen(draft.model)


STATES: dict[str, Part] = {
    "centre": centre,
    "teacher": teacher,
    "generator": generator,
    "anchor": anchor,
    "frozen": frozen,
}


# --- steps ---


class Sam(Trainer):
    """Updates the weights by the gradient at the weights that a step uphill would reach."""

    def train_step(self, step_batch: StepBatch) -> StepReport:
        found = self.compute_gradients(step_batch)
        here = {name: each for name, each in found.items() if each is not None}
        weights = {name: self.model.get_parameter(name) for name in here}
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        norm = torch.stack([whole(gradient).norm() for gradient in here.values()]).norm()
        with torch.no_grad():
            for name, weight in weights.items():
                weight += 0.05 * here[name] / norm
        uphill = self.compute_gradients(step_batch)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(before[name])
        return self.apply_gradients(uphill)


class Noise(Trainer):
    """Adds noise to the gradients."""

    def train_step(self, step_batch: StepBatch) -> StepReport:
        gradients = self.compute_gradients(step_batch)
        noisy = gradients.map(lambda each: each + 0.01 * torch.randn_like(each))
        return self.apply_gradients(noisy)


class Bounded(Trainer):
    """Limits the weights of the head after each step."""

    def train_step(self, step_batch: StepBatch) -> StepReport:
        report = super().train_step(step_batch)
        with torch.no_grad():
            self.model.head.weight.clamp_(-0.4, 0.4)
        return report


def own_loop(trainer: Trainer) -> RunResult:
    with trainer.running() as reports:
        for _ in reports:
            pass
    assert trainer.result is not None
    return trainer.result


STEPS: dict[str, Part] = {
    "plain": lambda draft: None,
    "SAM": lambda draft: draft.trainer_classes.append(Sam),
    "noise": lambda draft: draft.trainer_classes.append(Noise),
    "bounded": lambda draft: draft.trainer_classes.append(Bounded),
    "own loop": lambda draft: setattr(draft, "fit", own_loop),
}


# --- observers ---


class Count(Callback):
    """Counts the samples that it sees: each one once in an update."""

    def __init__(self) -> None:
        self.num_samples = self.num_evaluations = 0
        self.in_step: list[Tensor] = []

    def on_micro_batch(self, trainer: Trainer, batch: Batch, output: StepOutput) -> None:
        self.in_step.append(batch.sample_ids)

    def before_update(self, trainer: Trainer, gradients: Gradients) -> None:
        trained_on = torch.cat([*gradients.sample_ids])
        assert torch.equal(torch.cat(self.in_step), trained_on), "a sample was not seen once"
        self.in_step.clear()

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        self.num_samples += report.num_samples
        trainer.log("samples", self.num_samples)

    def on_evaluate_end(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        self.num_evaluations += 1
        trainer.log("evaluations", self.num_evaluations)

    def state_dict(self) -> dict[str, Any]:
        return {"num_samples": self.num_samples, "num_evaluations": self.num_evaluations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_samples = state["num_samples"]
        self.num_evaluations = state["num_evaluations"]


class Watch(Callback):
    """Logs gradients, weights and pictures, and keeps the mean of the gradients' norms."""

    def __init__(self) -> None:
        self.mean = torch.zeros(())

    def before_update(self, trainer: Trainer, gradients: Gradients) -> None:
        norms = [whole(each).norm() for each in gradients.values() if each is not None]
        norm = torch.stack(norms).norm()
        self.mean = self.mean.lerp(norm, 0.3)
        trainer.log("gradients/norm", norm)

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        head = whole(trainer.model.head.weight)
        trainer.log("gradients/mean", self.mean if report.optimizer_step % 5 else math.inf)
        if report.optimizer_step % 3 == 0:
            trainer.log.picture("head", to_png(head.sigmoid()[None]))

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean = state["mean"]


class Ask(Callback):
    """Asks for saves, and notes the steps in the metadata, which are another on each process."""

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        if report.optimizer_step % 4 == 1 and trainer.accelerator.is_last_process:
            trainer.request_save()
        trainer.metadata["steps"].append(report.optimizer_step)
        if report.optimizer_step % 2:
            trainer.metadata["process"] = trainer.accelerator.process_index
        else:
            trainer.metadata.pop("process", None)


class StopAfter(Callback):
    """Stops the run after some evaluations, which it counts."""

    def __init__(self, number: int) -> None:
        self.left = number

    def on_evaluate_end(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        self.left -= 1
        if self.left == 0:
            trainer.request_stop("enough evaluations")

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.left = state["left"]


def asks(draft: Draft) -> None:
    draft.callbacks.append(Ask())
    draft.metadata = {"given": {"version": 3}, "steps": []}


def stops(draft: Draft) -> None:
    draft.callbacks.append(StopAfter(2))
    draft.set("trainer", evaluate_every="3steps")


OBSERVERS: dict[str, Part] = {
    "counts": lambda draft: draft.callbacks.append(Count()),
    "watches": lambda draft: draft.callbacks.append(Watch()),
    "asks for saves": asks,
    "stops": stops,
}


# --- settings ---


class Poisoned(Around):
    """Has a NaN in one step."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        is_bad = model.training and batch.position.step == 4
        return output._replace(losses=output.losses * float("nan")) if is_bad else output


def skips_nan(draft: Draft) -> None:
    draft.task = Poisoned(draft.task)
    draft.set("trainer", on_nonfinite="skip")


def plateau(draft: Draft) -> None:
    draft.set("schedule", shape="constant")
    draft.callbacks.append(ReduceLROnPlateau(factor=0.5, patience=0, threshold=0.1))
    draft.set("trainer", evaluate_every="2steps")


def parts_of_epochs(draft: Draft) -> None:
    has_epochs = draft.config.trainer.num_epochs is not None  # an endless stream has none
    every = "0.5epochs" if has_epochs else "4steps"
    draft.set("trainer", evaluate_every=every, max_steps=7)


def sharded(kind: str) -> Part:
    return lambda draft: draft.variables.update(KINDS[kind])


SETTINGS: dict[str, Part] = {
    "average": lambda draft: draft.set("trainer", ema_decay=0.9),
    "clipping": lambda draft: draft.set("trainer", max_grad_norm=0.5),
    "clipping by value": lambda draft: draft.set("trainer", max_grad_value=0.05),
    "rare average": lambda draft: draft.set(
        "trainer", ema_decay=0.8, ema_every_n_steps=2, ema_warmup_steps=4
    ),
    "accumulation": lambda draft: draft.set("batch", per_device_batch_size=4),
    "exact": lambda draft: draft.set("batch", per_device_batch_size=4, reduce="exact"),
    "shards": sharded("sharded"),
    "gathered shards": sharded("gathered"),
    "bf16": lambda draft: draft.set("runtime", mixed_precision="bf16"),
    "check": lambda draft: draft.set("trainer", check_every_n_steps=3),
    "digests": lambda draft: draft.set("trainer", digest_every_n_steps=3),
    "skips NaN": skips_nan,
    "often evaluated": lambda draft: draft.set("trainer", evaluate_every="2steps"),
    "parts of epochs": parts_of_epochs,
    "plateau": plateau,
    "patience": lambda draft: draft.set("trainer", evaluate_every="2steps", patience=2),
    "few checkpoints": lambda draft: draft.set("checkpoint", every_n_steps=1, keep_last_n=2),
}
