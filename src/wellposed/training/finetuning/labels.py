"""Fine-tuning on labelled texts: cross-entropy of the class, tested by accuracy, Matthews' correlation and F1."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.data.language import Labelled
from wellposed.data.language.batches import RowLoader, TokenRows, row_of_texts
from wellposed.evaluation.language.metrics import confusion, scores
from wellposed.runs import tracked
from wellposed.training.finetuning.language_task import AT_ONCE, SPLITTING, LanguageTask


class TextClasses(nn.Module):
    """The logits (B, classes) of a model for token numbers, where they are and of which text, (B, 2 or 3, L)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs_BKL: Tensor) -> Tensor:
        names = ("input_ids", "attention_mask", "token_type_ids")
        return self.model(**dict(zip(names, inputs_BKL.unbind(1), strict=False))).logits


class LabelTask(LanguageTask):
    """Cross-entropy of the labels."""

    def _rows(self) -> TokenRows:
        return self._encoded(self._data.train)

    def _encoded(self, records: Any) -> TokenRows:
        examples = [record for record in records if isinstance(record, Labelled)]
        pairs = "token_type_ids" in self.tokenizer.model_input_names
        parts = [examples[start : start + AT_ONCE] for start in range(0, len(examples), AT_ONCE)]
        split = (texts for part in tracked(parts, SPLITTING) for texts in self.encoder.texts(part))
        rows = [row_of_texts(texts, pairs) for texts in split]
        labels = [torch.tensor(self._data.classes.index(example.label)) for example in examples]
        return TokenRows(self._data.name, rows, labels, self._padding, self.length)

    def _read_tests(self) -> None:
        self._encoded_tests = {}
        for name, records in self._data.tests.items():
            found = self._encoded(records)
            order = sorted(range(len(found)), key=lambda number: found.rows[number].shape[1])  # little padding
            rows, labels = ([part[number] for number in order] for part in (found.rows, found.targets))
            self._encoded_tests[name] = replace(found, rows=rows, targets=labels)

    def _net(self) -> nn.Module:
        return TextClasses(self.model)

    def _check(self) -> None:
        """Nothing: every text is a row of its own."""

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets, reduction="sum")

    def _counted(self, targets: Tensor) -> Tensor:
        return torch.full((), len(targets), device=targets.device)

    @torch.no_grad()
    def _test(self, name: str) -> dict[str, float]:
        """Cross-entropy and the scores of `metrics.scores`."""
        classes, place = len(self._data.classes), self._accelerator
        net = self._net().eval()
        loss = torch.zeros((), dtype=torch.float64, device=place.device)
        counts = torch.zeros(classes, classes, dtype=torch.long, device=place.device)
        size = self._config.test_batch_size * place.num_processes
        how = {"device": place.device, "rank": place.process_index, "ranks": place.num_processes}
        for inputs, labels in RowLoader(self._encoded_tests[name], size, shuffle=False, **how):
            if len(labels):
                with self._autocast():
                    logits = net(inputs)
                loss += self._losses(logits, labels)
                counts += confusion(logits.argmax(1), labels, classes)
        loss, counts = (place.reduce(each, "sum") for each in (loss, counts))
        return {"loss": float(loss / counts.sum()), **scores(counts)}
