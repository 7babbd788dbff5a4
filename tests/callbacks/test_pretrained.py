"""`export/pretrained/`: what the family of a model loads by its own `from_pretrained`."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from accel_trainer import (
    Batch,
    BatchConfig,
    Callback,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
    RunResult,
    RuntimeConfig,
    StepOutput,
    Trainer,
    TrainerConfig,
    build_trainer,
    start_run,
)
from accel_trainer.core.errors import ConfigError

hf = pytest.importorskip("transformers")

WORDS = torch.arange(60).reshape(12, 5) % 11
LABELS = torch.arange(12) % 3
SIZE = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
SIZE |= {"num_hidden_layers": 1, "max_position_embeddings": 8}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Label:
    """Classification of texts, int64 [B, T]."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(input_ids=batch.inputs).logits
        return StepOutput(
            nn.functional.cross_entropy(logits, batch.targets, reduction="none"), logits
        )


class Word:
    """Prediction of each word, int64 [B, T], from itself."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(input_ids=batch.inputs).logits
        losses = nn.functional.cross_entropy(logits.mT, batch.inputs, reduction="none")
        return StepOutput(losses.mean(1))


class Processor:
    """What prepares the inputs of a model."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "processor.json").write_text("{}")


def train(
    folder: Path,
    model: nn.Module,
    task: Any = None,
    *,
    ends: list[Any] | None = None,
    max_steps: int | None = None,
    **parts: Any,
) -> RunResult:
    """Train two epochs of three steps; the first evaluation counts as the best."""
    config = RecipeConfig(
        batch=BatchConfig(global_batch_size=4, per_device_batch_size=4, eval_batch_size=12),
        trainer=TrainerConfig(
            num_epochs=2, max_steps=max_steps, monitor="eval/loss", monitor_mode="max"
        ),
        optimizer=OptimizerConfig(name="adamw", learning_rate=0.01),
        runtime=RuntimeConfig(num_threads=1),
        run=RunConfig(output_dir=folder, quiet=True),
    )
    samples = list(zip(WORDS, LABELS, strict=True))
    with start_run(config, recipe="pretrained") as run:
        trainer = build_trainer(
            run, model=model, task=task or Label(), train_set=samples, eval_sets=samples, **parts
        )
        result = trainer.fit()
        for end in ends or []:
            end(trainer)
        return result


def bert() -> nn.Module:
    torch.manual_seed(0)
    return hf.BertForSequenceClassification(hf.BertConfig(**SIZE, **NO_DROPOUT, num_labels=3))


def pretrained(folder: Path) -> Path:
    return folder / "export" / "pretrained"


def logits_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=WORDS).logits


def exported(folder: Path, model: nn.Module) -> Tensor:
    """Return the logits of `model` with the weights of the export."""
    model.load_state_dict(load_file(folder / "export" / "model.safetensors"))
    return logits_of(model)


def test_the_family_of_a_model_loads_its_best_weights(tmp_path: Path) -> None:
    model = bert()
    result = train(tmp_path, model, processor=Processor())
    assert result.best is not None
    assert result.best.name == "step-0000000003-epoch-00001"
    last = logits_of(model)
    loaded = hf.AutoModelForSequenceClassification.from_pretrained(pretrained(tmp_path))
    assert torch.equal(logits_of(loaded), exported(tmp_path, bert()))
    assert not torch.equal(logits_of(loaded), last), "the model keeps the last weights"
    assert (pretrained(tmp_path) / "processor.json").is_file()


def test_who_can_read_the_run_can_read_what_the_family_wrote(tmp_path: Path) -> None:
    for umask, mode in ((0o022, 0o644), (0o027, 0o640), (0o077, 0o600)):
        before = os.umask(umask)
        try:
            train(tmp_path / str(umask), bert(), processor=Processor())
        finally:
            os.umask(before)
        files = [path for path in pretrained(tmp_path / str(umask)).rglob("*") if path.is_file()]
        assert files
        assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {
            path.name: oct(mode) for path in files
        }


def test_tied_weights_stay_tied_in_what_the_family_loads(tmp_path: Path) -> None:
    train(tmp_path, hf.BertForMaskedLM(hf.BertConfig(**SIZE, **NO_DROPOUT)), Word())
    loaded = hf.AutoModelForMaskedLM.from_pretrained(pretrained(tmp_path))
    fresh = hf.BertForMaskedLM(hf.BertConfig(**SIZE, **NO_DROPOUT))
    assert torch.equal(logits_of(loaded), exported(tmp_path, fresh))
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft 0.21 asks
def test_an_adapter_is_loaded_onto_its_base_with_its_trained_head(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, task_type="SEQ_CLS", target_modules=["query", "value"])
    train(tmp_path, peft.get_peft_model(bert(), lora))
    stored = load_file(pretrained(tmp_path) / "adapter_model.safetensors")
    assert any("classifier" in name for name in stored)
    assert not any("word_embeddings" in name for name in stored), "the base is not in it"
    again = exported(tmp_path, peft.get_peft_model(bert(), lora))
    loaded = peft.PeftModel.from_pretrained(bert(), pretrained(tmp_path))
    assert torch.equal(logits_of(loaded), again)
    assert not torch.equal(logits_of(loaded), logits_of(bert()))


def test_a_finished_run_that_is_started_again_writes_it_again(tmp_path: Path) -> None:
    train(tmp_path, bert())
    before = (pretrained(tmp_path) / "model.safetensors").read_bytes()
    (pretrained(tmp_path) / "config.json").unlink()
    train(tmp_path, bert())
    assert (pretrained(tmp_path) / "model.safetensors").read_bytes() == before
    assert json.loads((pretrained(tmp_path) / "config.json").read_text())["vocab_size"] == 11
    assert {path.name for path in (tmp_path / "export").iterdir()} == {
        "config.json",
        "model.safetensors",
        "pretrained",
    }


def test_a_save_pretrained_that_fails_costs_a_warning_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Processor):
        def save_pretrained(self, folder: str) -> None:
            super().save_pretrained(folder)
            raise OSError("no\n room")

    with caplog.at_level(logging.WARNING):
        result = train(tmp_path, bert(), processor=Broken())
    assert result.state == "done"
    (said,) = (line for line in caplog.messages if "[PRETRAINED]" in line)
    assert "OSError: no room" in said
    assert "same command again" in said
    assert not pretrained(tmp_path).exists()
    assert (tmp_path / "export" / "model.safetensors").is_file()


def test_a_processor_that_cannot_be_saved_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"processor=.*no save_pretrained"):
        train(tmp_path, bert(), processor=object())


def test_after_fit_the_model_can_get_the_weights_that_were_exported(tmp_path: Path) -> None:
    model = bert()
    said: list[str] = []
    train(tmp_path, model, ends=[lambda trainer: said.append(trainer.load_best())])
    assert said == ["model of the best checkpoint step-0000000003-epoch-00001"]
    assert torch.equal(logits_of(model), exported(tmp_path, bert()))


def test_the_best_weights_are_not_loaded_before_the_end_of_the_run(tmp_path: Path) -> None:
    class Early(Trainer):
        def train_step(self, step_batch: Any) -> Any:
            self.load_best()
            return super().train_step(step_batch)

    class Start(Callback):
        def on_fit_start(self, trainer: Any) -> None:
            trainer.load_best()

    train(tmp_path, bert(), max_steps=4)
    for early in ({"trainer_class": Early}, {"callbacks": [Start()]}):
        with pytest.raises(ConfigError, match="load_best was called before the end of the run"):
            train(tmp_path, bert(), **early)
