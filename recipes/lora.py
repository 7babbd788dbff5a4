"""Fine-tune a transformers language model on a text, with LoRA adapters from peft.

The export is a folder that PeftModel.from_pretrained loads onto the same base.

python recipes/lora.py --base openai-community/gpt2 --text notes.txt
python recipes/lora.py    # a tiny Llama with random weights, on Python's own documentation
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from accel_trainer import (
    Batch,
    ConfigError,
    OptimizerConfig,
    RecipeConfig,
    RunResult,
    StepOutput,
    build_trainer,
    main,
    start_run,
)

import torch
from torch import Tensor, nn
from torch.nn import functional as F

try:
    import transformers as hf
    from peft import LoraConfig, get_peft_model
except ImportError as missing:
    needed = f"recipes/lora.py needs {missing.name}: pip install 'accel-trainer[hf]'"
    raise SystemExit(needed) from None

LENGTH = 128  # tokens of a sample
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
TINY |= {"bos_token_id": None, "eos_token_id": None}


@dataclass(frozen=True, kw_only=True)
class Config(RecipeConfig):
    """The settings of `recipes/lora.py`."""

    base: str | None = None
    """A folder, or OWNER/NAME on the hub, with a causal language model and its tokenizer."""
    text: Path | None = None
    """The text to learn; None: Python's help pages."""
    rank: int = 8
    """Of the adapters."""
    optimizer: OptimizerConfig = OptimizerConfig(name="adamw", learning_rate=1e-3)


class NextToken:
    """Mean cross-entropy of the next token, for B texts of T tokens."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the losses [B]."""
        logits = model(input_ids=batch.inputs).logits
        losses = F.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none")
        return StepOutput(losses.mean(1))


def load_base(base: str | None) -> tuple[hf.PreTrainedModel, Callable[[str], Sequence[int]]]:
    """Return the model, and what turns a text into token ids; without `base`, tokens are bytes."""
    if base is None:
        return hf.LlamaForCausalLM(hf.LlamaConfig(**TINY)), str.encode
    model = hf.AutoModelForCausalLM.from_pretrained(base)
    return model, hf.AutoTokenizer.from_pretrained(base).encode


def read_text(path: Path) -> str:
    """Return the text in a file. Raises ConfigError."""
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError("TEXT", f"--text cannot be read ({error}): give a text file") from None


def cut(tokens: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and targets, int64 [LENGTH] each; what is left at the end is not used."""
    starts = range(0, len(tokens) - LENGTH, LENGTH)
    pieces = [torch.tensor(list(tokens[start : start + LENGTH + 1])) for start in starts]
    return [(piece[:-1], piece[1:]) for piece in pieces]


def train(config: Config) -> RunResult:
    """Train, evaluate and export. Runs in every process."""
    help_pages = "\n".join(topics.values())
    text = read_text(config.text) if config.text else help_pages
    with start_run(config, recipe="lora") as run:
        model, encode = load_base(config.base)
        pieces = cut(encode(text))
        num_eval = max(1, len(pieces) // 20)
        adapters = LoraConfig(r=config.rank, task_type="CAUSAL_LM")
        trainer = build_trainer(
            run,
            model=get_peft_model(model, adapters),
            task=NextToken(),
            train_set=pieces[num_eval:],
            eval_sets=pieces[:num_eval],
        )
        return trainer.fit()


if __name__ == "__main__":
    main(train, Config)
