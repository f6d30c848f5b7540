"""Which of the given answers a language model finds most likely.

Shapes: B sequences of L tokens, V words in the vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.data.language.batches import row_of, stacked
from wellposed.data.language.tokens import IGNORED, Tokens

Logits = Callable[[Tensor], Tensor]
"""From token numbers and positions, (B, 2, L), to (B, L, V)."""


@dataclass(frozen=True)
class Choosing:
    """The answers to one question as tokens, and which of them is right."""

    answers: list[Tokens]
    right: int


@torch.no_grad()
def log_likelihoods(
    logits: Logits, sequences: Sequence[Tokens], *, batch_size: int, padding: int, device: torch.device
) -> list[float]:
    """The log of p(answer | prompt) of each sequence, summed over the tokens of its answer and the end of the text."""
    found = [0.0] * len(sequences)
    order = sorted(range(len(sequences)), key=lambda number: len(sequences[number].ids))  # little padding in a batch
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        rows, targets = zip(*(row_of([sequences[number]]) for number in chosen), strict=True)
        inputs_B2L, targets_BL = (part.to(device) for part in stacked(rows, targets, padding))
        counted_BL = targets_BL != IGNORED
        losses = F.cross_entropy(logits(inputs_B2L)[counted_BL].float(), targets_BL[counted_BL], reduction="none")
        sums = torch.zeros(len(chosen), dtype=torch.float64, device=device)
        sums.index_add_(0, counted_BL.nonzero()[:, 0], losses.double())
        for number, loss in zip(chosen, sums.tolist(), strict=True):
            found[number] = -loss
    return found


def choose(
    logits: Logits, questions: Sequence[Choosing], *, batch_size: int, padding: int, device: torch.device
) -> Tensor:
    """Sums over `questions`: -log p of the right answers, their tokens, how often it is the likeliest, and of how many.

    A question with a single answer has nothing to choose from, and counts in the first two only.
    """
    flat = [answer for question in questions for answer in question.answers]
    found = log_likelihoods(logits, flat, batch_size=batch_size, padding=padding, device=device)
    sums, start = [0.0, 0, 0, 0], 0
    for question in questions:
        own, start = found[start : start + len(question.answers)], start + len(question.answers)
        sums[0] -= own[question.right]
        sums[1] += question.answers[question.right].learned
        if len(own) > 1:
            sums[2] += max(range(len(own)), key=own.__getitem__) == question.right
            sums[3] += 1
    return torch.tensor(sums, dtype=torch.float64, device=device)
