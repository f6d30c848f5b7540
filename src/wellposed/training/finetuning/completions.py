"""Fine-tuning on completions: the loss of the answer alone, several sequences to a row, tested by their likelihood."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.data.language import Completion
from wellposed.data.language.batches import TokenRows, row_of
from wellposed.data.language.packing import packed
from wellposed.data.language.tokens import IGNORED, Tokens
from wellposed.errors import UnsuitableModelError
from wellposed.evaluation.language.generation import is_right, written_answers
from wellposed.evaluation.language.likelihood import Choosing, choose
from wellposed.runs import tracked
from wellposed.training.finetuning.language_task import LanguageTask


class NextToken(nn.Module):
    """The logits (B, L, V) of a causal model for token numbers and positions (B, 2, L)."""

    def __init__(self, model: Any, *, positions: bool) -> None:
        super().__init__()
        self.model, self._positions = model, positions

    def forward(self, inputs_B2L: Tensor) -> Tensor:
        # Without a mask, transformers takes a position that does not follow the one before as another sequence's.
        more = {"position_ids": inputs_B2L[:, 1]} if self._positions else {}
        return self.model(input_ids=inputs_B2L[:, 0], use_cache=False, **more).logits


class CompletionTask(LanguageTask):
    """Cross-entropy of the tokens of the answers."""

    def _rows(self) -> TokenRows:
        examples = tracked(_completions(self._data.train), "splitting into tokens")
        sequences = [self.encoder.example(example) for example in examples]
        groups = [[number] for number in range(len(sequences))]
        if self._config.pack:
            groups = packed([len(each.ids) for each in sequences], self.length)
        rows, targets = zip(*(row_of([sequences[number] for number in group]) for group in groups), strict=True)
        return TokenRows(self._data.name, list(rows), list(targets), self._padding)

    def _read_tests(self) -> None:
        self._questions = {
            name: [Choosing(self.encoder.choices(example), _place(example)) for example in _completions(examples)]
            for name, examples in self._data.tests.items()
        }

    def _net(self) -> nn.Module:
        return NextToken(self.model, positions=self._config.pack)

    @torch.no_grad()
    def _check(self) -> None:
        """Of two sequences in a row, the second must not see the first: another one in its place changes nothing."""
        if not self._config.pack:
            return
        net, size = self._net().eval(), min(8, self.length // 2)
        first = torch.arange(1, 1 + size)
        pairs = [[Tokens(ids.tolist(), 1) for ids in (begin, first)] for begin in (first, first.flip(0))]
        try:
            with self._autocast():
                one, other = (net(row_of(pair)[0][None].to(self._accelerator.device))[:, size:] for pair in pairs)
        except TypeError:  # a model that takes no positions
            one, other = torch.zeros(1), torch.ones(1)
        if (one - other).abs().max() > 1e-5 * one.abs().max():
            raise UnsuitableModelError(
                f"{self._config.model} cannot tell the sequences of a packed row apart: use --no-pack"
            )
        self.model.train()

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        counted = targets != IGNORED
        return F.cross_entropy(logits[counted].float(), targets[counted], reduction="sum")

    def _counted(self, targets: Tensor) -> Tensor:
        return (targets != IGNORED).sum()

    def _test(self, name: str) -> dict[str, float]:
        """-log p of a token of the answers and, where there are choices, how often the right one is the likeliest.

        After the last epoch also how often what is written is right, for the first `generate` examples.
        """
        net = self._net().eval()

        def logits(inputs: Tensor) -> Tensor:
            with self._autocast():
                return net(inputs)

        how: dict[str, Any] = {"batch_size": self._config.test_batch_size, "padding": self._padding}
        mine = self._share(self._questions[name])
        sums = self._accelerator.reduce(choose(logits, mine, **how, device=self._accelerator.device), "sum")
        loss, tokens, right, asked = sums.tolist()
        found = {"loss": loss / tokens} | ({"accuracy": right / asked} if asked else {})
        examples = self._share(_completions(self._data.tests[name])[: self._config.generate])
        if self.is_last and self._config.generate:
            with self._autocast():
                written = written_answers(
                    *(self.model, self.encoder, examples), **how, new_tokens=self._config.new_tokens
                )
            hits = [is_right(text, example) for text, example in zip(written, examples, strict=True)]
            counts = torch.tensor([sum(hits), len(hits)], dtype=torch.float64, device=self._accelerator.device)
            right, asked = self._accelerator.reduce(counts, "sum").tolist()
            found["written_accuracy"] = right / asked
        return found


def _completions(records: Any) -> list[Completion]:
    return [record for record in records if isinstance(record, Completion)]


def _place(example: Completion) -> int:
    return example.choices.index(example.answer) if example.choices else 0
