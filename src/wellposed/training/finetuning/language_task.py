"""Fine-tuning on rows of tokens: what completions and labelled texts have in common.

Shapes: B rows of L tokens; inputs (B, K, L) as `wellposed.data.language.batches` has them.
"""

from abc import abstractmethod
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from wellposed.data.language import LanguageData
from wellposed.data.language.batches import RowLoader, TokenRows
from wellposed.data.language.tokens import Encoder
from wellposed.errors import InvalidArgumentError
from wellposed.training.finetuning.cards import Card, model_card
from wellposed.training.finetuning.config import LanguageConfig
from wellposed.training.finetuning.methods import made_trainable
from wellposed.training.finetuning.models import open_language_model
from wellposed.training.finetuning.task import FinetuneTask

SPLITTING, AT_ONCE = "splitting into tokens", 1000
"""What a bar says meanwhile, and examples of a step of it."""


class LanguageTask(FinetuneTask):
    """A model of transformers' that learns from rows of tokens."""

    def __init__(self, config: LanguageConfig, data: LanguageData, accelerator: Accelerator) -> None:
        super().__init__(config, accelerator)
        self._config, self._data = config, data
        opened = open_language_model(config, data.classes, self.base_dtype)
        self.tokenizer, self._padding = opened.tokenizer, opened.padding
        self.length = min(config.max_length, opened.context)
        self.encoder = Encoder(self.tokenizer, self.length)
        rows = self._rows()
        self._read_tests()
        how: dict[str, Any] = {"task_type": "SEQ_CLS" if data.classes else "CAUSAL_LM"}
        if opened.new:  # to be trained and saved as the head is: whoever loads the adapter would have others
            how |= {"modules_to_save": opened.new, "exclude_modules": opened.new}
        self.model = made_trainable(opened.model, config, how).to(accelerator.device)
        self._check()
        if config.batch_size > len(rows):
            raise InvalidArgumentError(
                f"batch_size={config.batch_size}: the {len(data)} examples make {len(rows)} rows; expected at most that"
            )
        self.loader = RowLoader(
            *(rows, config.batch_size),
            seed=config.seed,
            device=accelerator.device,
            rank=accelerator.process_index,
            ranks=accelerator.num_processes,
        )
        self._begin(rows.rows[0][None])

    @abstractmethod
    def _rows(self) -> TokenRows:
        """What to train on."""

    @abstractmethod
    def _read_tests(self) -> None:
        """Turn what to test on into tokens."""

    @abstractmethod
    def _test(self, name: str) -> dict[str, float]:
        """The scores on the test set `name`."""

    @abstractmethod
    def _check(self) -> None:
        """Raise where the model cannot do what is asked of it."""

    def _tested(self) -> dict[str, float]:
        """The scores on every test set, under its name where there are several, and then their means too."""
        found = {name: self._test(name) for name in self._data.tests}
        if len(found) < 2:
            return next(iter(found.values()), {})
        shared = set.intersection(*(set(values) for values in found.values()))
        means = {key: sum(each[key] for each in found.values()) / len(found) for key in sorted(shared)}
        return means | {f"{name}/{key}": v for name, values in found.items() for key, v in values.items()}

    def _share(self, items: Any) -> Any:
        """Those of `items` that this process tests."""
        return items[self._accelerator.process_index :: self._accelerator.num_processes]

    @property
    def facts(self) -> dict[str, Any]:
        """What else is to be known about the run: its size, what was cut, and the rank of what was learned."""
        return super().facts | {
            "examples": len(self._data),
            "max_length": self.length,
            "sequences_cut": self.encoder.cut,
            "sequences_read": self.encoder.seen,
        }

    def _save_model(self, folder: Path) -> None:
        self.model.save_pretrained(str(folder))

    def _save_more(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(str(folder))

    def _card(self, facts: dict[str, Any]) -> str:
        counts = f"{facts['sequences_cut']} of {facts['sequences_read']}"
        labels = f" with the labels {', '.join(self._data.classes)}" if self._data.classes else ""
        told = f"{counts} sequences were longer than {self.length} tokens and were cut."
        kind = "AutoModelForSequenceClassification" if self._data.classes else "AutoModelForCausalLM"
        size = f", num_labels={len(self._data.classes)}" if self._data.classes else ""
        return model_card(
            self._config,
            Card(
                data=self._data.name,
                told=f"Trained on {len(self._data)} examples{labels}. {told}",
                pipeline="text-classification" if self._data.classes else "text-generation",
                library="transformers",
                imports=f"from transformers import {kind}",
                base=f'{kind}.from_pretrained("path/to/the/base/model"{size})',
                whole=f'{kind}.from_pretrained("path/to/this/folder")',
                own_settings=("max_length", "pack", "answers"),
            ),
            self._results,
            facts,
        )
