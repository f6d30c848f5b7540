"""A transformer of HuggingFace's that reads sequences: what it is made from, and how it is trained.

Shapes: B sequences of L tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.data import Dataset, Loader
from wellposed.data.listops import VOCABULARY
from wellposed.data.sequences import BYTES, TokenLoader
from wellposed.errors import InvalidArgumentError
from wellposed.studies.sequence_config import SequenceRun
from wellposed.training.classification import Classification
from wellposed.training.models import changed


class SequenceTask(Classification):
    """Cross-entropy of the value of an expression, or of each byte that follows."""

    _config: SequenceRun

    def _loaders(self, data: Dataset, test: Dataset) -> tuple[Loader, Loader]:
        how = {**self._place(), "seed": self._config.seed}
        return tuple(  # type: ignore[return-value]
            TokenLoader(each, self._config.batch_size, shuffle=each is data, **how) for each in (data, test)
        )

    def _new_model(self, data: Dataset) -> tuple[nn.Module, dict[str, Any] | None]:
        return changed(self._config, make_model(self._config)), None

    def _example(self, data: Dataset) -> Tensor:
        return torch.ones(2, self._config.length, dtype=torch.long)

    def _logits(self, model: Callable[..., Any], inputs: Tensor) -> Tensor:
        return read(model, inputs, self._config.data)


def read(model: Callable[..., Any], tokens_BL: Tensor, task: str) -> Tensor:
    """The logits (B, 10) of the value of an expression, or (B, bytes, L) of what follows each byte."""
    if task == "listops":
        return model(tokens_BL, attention_mask=tokens_BL > 0).logits
    return model(tokens_BL, use_cache=False).logits.mT


def make_model(config: SequenceRun) -> nn.Module:
    """BERT with a classifier for ListOps, where all tokens see each other; Llama for text, which is causal."""
    try:
        from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise InvalidArgumentError(
            "the models of this study are transformers': pip install 'wellposed[peft]'"
        ) from error
    sizes: dict[str, Any] = {**config.model_args, "max_position_embeddings": config.length}
    if config.data == "listops":
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertForSequenceClassification(
            BertConfig(vocab_size=len(VOCABULARY), num_labels=10, pad_token_id=0, **no_dropout, **sizes)
        )
    return LlamaForCausalLM(LlamaConfig(vocab_size=BYTES, bos_token_id=None, eos_token_id=None, **sizes))
