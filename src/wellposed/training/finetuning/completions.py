"""Fine-tuning on completions: the loss of the answer alone, several sequences to a row, tested by their likelihood."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
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
from wellposed.evaluation.language.likelihood import Choosing, Logits, choose, common_start, sees_own
from wellposed.runs import tracked
from wellposed.training.finetuning.language_task import AT_ONCE, SPLITTING, LanguageTask


class NextToken(nn.Module):
    """The logits of a causal model for token numbers and positions (B, 2, L).

    (B, L, V), or (P, V) at the places (P,) of the B L that are given: no others are computed, which of a large
    vocabulary is most of the memory and a good part of the time. Each token sees all before it in its sequence, or what
    is given as `sees_B1LL`.
    """

    def __init__(self, model: Any, *, positions: bool) -> None:
        super().__init__()
        self.model, self._positions = model, positions

    def forward(self, inputs_B2L: Tensor, places_P: Tensor | None = None, sees_B1LL: Tensor | None = None) -> Tensor:
        # Without a mask, transformers takes a position that does not follow the one before as another sequence's.
        more = {"position_ids": inputs_B2L[:, 1]} if self._positions or sees_B1LL is not None else {}
        more |= {} if sees_B1LL is None else {"attention_mask": sees_B1LL}
        with _head_at(self.model.get_output_embeddings(), places_P):
            logits = self.model(input_ids=inputs_B2L[:, 0], use_cache=False, **more).logits
        return logits if places_P is None else logits[0]


@contextmanager
def _head_at(head: nn.Module, places_P: Tensor | None) -> Iterator[None]:
    """Meanwhile `head` is given what belongs to `places_P` alone, as one row."""
    if places_P is None:
        yield
        return
    handle = head.register_forward_pre_hook(lambda _, given: given[0].flatten(0, 1).index_select(0, places_P)[None])
    try:
        yield
    finally:
        handle.remove()


class CompletionTask(LanguageTask):
    """Cross-entropy of the tokens of the answers."""

    def _rows(self) -> TokenRows:
        examples = _completions(self._data.train)
        self._split_ahead(examples)
        sequences = [self.encoder.example(example) for example in examples]
        groups = [[number] for number in range(len(sequences))]
        if self._config.pack:
            groups = packed([len(each.ids) for each in sequences], self.length)
        rows, targets = zip(*(row_of([sequences[number] for number in group]) for group in groups), strict=True)
        counts = sorted((int((row != IGNORED).sum()) for row in targets), reverse=True)
        self._most = list(accumulate(counts))  # targets that so many rows have at most, from one row on
        return TokenRows(self._data.name, list(rows), list(targets), self._padding, self.length)

    def _split_ahead(self, examples: list[Completion]) -> None:
        for start in tracked(range(0, len(examples), AT_ONCE), SPLITTING):
            self.encoder.split_ahead(examples[start : start + AT_ONCE])

    def _read_tests(self) -> None:
        self._split_ahead([example for examples in self._data.tests.values() for example in _completions(examples)])
        self._questions = {
            name: [self._asked(example) for example in _completions(examples)]
            for name, examples in self._data.tests.items()
        }

    def _asked(self, example: Completion) -> Choosing:
        place = example.choices.index(example.answer) if example.choices else 0
        answers, lengths = self.encoder.choices(example), []
        if example.by_character:  # of what the answers differ in
            common = common_start(answers)
            answers = [replace(answer, prompt=max(answer.prompt, common)) for answer in answers]
            lengths = [len(choice) for choice in example.choices]
        return Choosing(answers, place, lengths)

    def _net(self) -> nn.Module:
        return NextToken(self.model, positions=self._config.pack)

    @torch.no_grad()
    def _check(self) -> None:
        """Of two sequences in a row, the second must not see the first: another one in its place changes nothing."""
        self._together = self._reads_together()
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

    def _reads_together(self) -> bool:
        """Whether the model takes a mask and positions as they are given, so that a row may have several endings.

        Another ending before it must change nothing in the last one, and other positions must change it.
        """
        window = getattr(self.model.config.get_text_config(), "sliding_window", None)
        size = min(8, self.length // 3)
        if size < 2 or (window is not None and window < self.length):
            return False
        net, place, first = self._net().eval(), self._accelerator.device, torch.arange(1, 1 + size)
        parts = torch.arange(3).repeat_interleave(size)
        usual = torch.arange(size).repeat(3) + size * (parts > 0)

        def last(ending: Tensor, positions: Tensor) -> Tensor:
            inputs = torch.stack([torch.cat([first, ending, first]), positions])[None]
            with self._autocast():
                return net(inputs.to(place), None, sees_own(parts[None].to(place)))[:, 2 * size :]

        try:
            one, other = last(first, usual), last(first.flip(0), usual)
            moved = last(first, usual + size * (parts == 2))
        except Exception:  # whatever a model raises that takes no such mask
            return False
        return bool((one - other).abs().max() <= 1e-5 * one.abs().max()) and not torch.equal(one, moved)

    def _logits(self) -> Logits:
        net = self._net().eval()

        def logits(*inputs: Tensor | None) -> Tensor:
            with self._autocast():
                return net(*inputs)

        return logits

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Of the tokens of the answers; as many places as there may be, so that nothing waits to count them."""
        sees = None
        if self._config.pack and self._together:  # transformers would find out by itself, and wait for the device
            sees = sees_own((inputs[:, 1] == 0).cumsum(1))
        targets = targets.flatten()
        places = (targets == IGNORED).byte().argsort(stable=True)[: self._most[len(inputs) - 1]]
        with self._autocast():
            logits = self._forward(inputs, places, sees)
        return self._losses(logits, targets[places])

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")

    def _counted(self, targets: Tensor) -> Tensor:
        return (targets != IGNORED).sum()

    def _test(self, name: str) -> dict[str, float]:
        """-log p of a token of the answers and, where there are choices, how often the right one is the likeliest.

        After the last epoch also how often what is written is right, for the first `generate` examples.
        """
        how: dict[str, Any] = {"batch_size": self._config.test_batch_size, "padding": self._padding}
        place = {"device": self._accelerator.device, "together": self._together}
        sums = choose(self._logits(), self._share(self._questions[name]), **how, **place)
        loss, tokens, right, asked = self._accelerator.reduce(sums, "sum").tolist()
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
