"""Which of the given answers a language model finds most likely.

The answers to a question are read as one row, what they have in common once and each ending after it, which sees what
is common and itself alone: the row costs little more than the question.

Shapes: B questions of L tokens, P places of them whose next token is asked for, V words in the vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.data.language.tokens import Tokens

Logits = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""From token numbers and positions (B, 2, L), places (P,) in the B L of them, and which of the L each sees, (B, 1, L,
L), or None for all before it, to (P, V)."""


@dataclass(frozen=True)
class Choosing:
    """The answers to one question as tokens, and which of them is right."""

    answers: list[Tokens]
    right: int
    lengths: Sequence[int] = ()
    """By which the log-likelihoods are divided before they are compared; compared as they are if empty."""


@dataclass(frozen=True)
class Row:
    """Answers that begin alike, as tokens that are read together."""

    ids: list[int]
    positions: list[int]
    endings: list[int]
    """Which ending each token is of, counted from 1; 0 for what all have in common."""
    asked: list[tuple[int, int, int]]
    """Which answer, a place, and the token that comes next there in this answer."""


def common_start(answers: Sequence[Tokens]) -> int:
    """How many tokens they begin alike with; the last one of each is its own."""
    common = 0
    for tokens in zip(*(answer.ids[:-1] for answer in answers), strict=False):
        if len(set(tokens)) > 1:
            break
        common += 1
    return common


def row_of_answers(answers: Sequence[Tokens]) -> Row:
    """One row for all `answers`; the last token of each is asked for and need not be read.

    Example:
        >>> row = row_of_answers([Tokens([5, 6, 7, 1], 2), Tokens([5, 6, 8, 1], 2)])
        >>> row.ids, row.positions, row.endings
        ([5, 6, 7, 8], [0, 1, 2, 2], [0, 0, 1, 2])
        >>> row.asked
        [(0, 1, 7), (0, 2, 1), (1, 1, 8), (1, 3, 1)]
    """
    common = common_start(answers)
    ids, endings = answers[0].ids[:common], [0] * common
    positions = list(range(common))
    asked = []
    for number, answer in enumerate(answers):
        ending = answer.ids[common:-1]
        places = [*range(common), *range(len(ids), len(ids) + len(ending))]
        asked += [(number, places[at - 1], answer.ids[at]) for at in range(max(1, answer.prompt), len(answer.ids))]
        ids = ids + ending
        positions += range(common, common + len(ending))
        endings += [number + 1] * len(ending)
    return Row(ids, positions, endings, asked)


@torch.no_grad()
def log_likelihoods(
    logits: Logits,
    questions: Sequence[Sequence[Tokens]],
    *,
    batch_size: int,
    padding: int,
    device: torch.device,
    together: bool = True,
) -> list[list[float]]:
    """The log of p(answer | prompt) of each answer to each question, summed over its tokens and the end of the text.

    Args:
        logits: the model.
        questions: the answers to each; they may begin alike.
        batch_size: rows at a time.
        padding: the number of a token to fill rows with.
        device: of the model.
        together: read the answers to a question in one row; where the model cannot, each has a row of its own.
    """
    owners = [(number, [at]) for number, answers in enumerate(questions) for at in range(len(answers))]
    if together:
        owners = [(number, list(range(len(answers)))) for number, answers in enumerate(questions)]
    rows = [row_of_answers([questions[number][at] for at in own]) for number, own in owners]
    order = sorted(range(len(rows)), key=lambda number: len(rows[number].ids))  # little padding in a batch
    sums = []
    for start in range(0, len(order), batch_size):
        chosen = [rows[number] for number in order[start : start + batch_size]]
        counts = [len(owners[number][1]) for number in order[start : start + batch_size]]
        inputs_B2L, endings_BL, asked = _stacked(chosen, counts, padding)
        places_P, of_asked = asked[:, 0].unique(return_inverse=True)
        parts = (inputs_B2L, endings_BL, places_P, of_asked, asked[:, 1:])
        inputs_B2L, endings_BL, places_P, of_asked, asked = (_moved(part, device) for part in parts)
        sees = sees_own(endings_BL) if any(len({*row.endings} - {0}) > 1 for row in chosen) else None
        scores_PV = logits(inputs_B2L, places_P, sees).float()
        found = scores_PV[of_asked, asked[:, 0]] - scores_PV.logsumexp(1)[of_asked]
        empty = torch.zeros(sum(counts), dtype=torch.float64, device=device)
        sums.append(empty.index_add_(0, asked[:, 1], found.double()))
    told = iter(torch.cat(sums).tolist() if sums else [])
    results = [[0.0] * len(answers) for answers in questions]
    for number, own in (owners[place] for place in order):
        for at in own:
            results[number][at] = next(told)
    return results


def choose(logits: Logits, questions: Sequence[Choosing], *, device: torch.device, **how: int | bool) -> Tensor:
    """Sums over `questions`: -log p of the right answers, their tokens, how often it is the likeliest, and of how many.

    A question with a single answer has nothing to choose from, and counts in the first two only. `how` is what
    `log_likelihoods` asks for.
    """
    found = log_likelihoods(logits, [each.answers for each in questions], device=device, **how)  # type: ignore[arg-type]
    sums = [0.0, 0, 0, 0]
    for question, own in zip(questions, found, strict=True):
        sums[0] -= own[question.right]
        sums[1] += question.answers[question.right].learned
        if len(own) > 1:
            compared = [value / length for value, length in zip(own, question.lengths or [1] * len(own), strict=True)]
            sums[2] += max(range(len(own)), key=compared.__getitem__) == question.right
            sums[3] += 1
    return torch.tensor(sums, dtype=torch.float64, device=device)


def _stacked(rows: Sequence[Row], counts: Sequence[int], padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs (B, 2, L), endings (B, L), and of all that is asked its place, token and answer, counted over all rows."""
    longest = max(1, *(len(row.ids) for row in rows))

    def filled(values: list[int], value: int) -> list[int]:
        return values + [value] * (longest - len(values))

    inputs = torch.tensor([[filled(row.ids, padding), filled(row.positions, 0)] for row in rows])
    endings = torch.tensor([filled(row.endings, -1) for row in rows])
    asked, before = [], 0
    for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
        asked += [(number * longest + place, token, before + answer) for answer, place, token in row.asked]
        before += count
    return inputs, endings, torch.tensor(asked, dtype=torch.long).view(-1, 3)


def sees_own(parts_BL: Tensor) -> Tensor:
    """What each token sees, (B, 1, L, L): of those before it, what is of its own part of the row or of part 0."""
    size = parts_BL.shape[1]
    before = torch.ones(size, size, dtype=torch.bool, device=parts_BL.device).tril()
    of_key = parts_BL[:, None]
    return (before & ((of_key == 0) | (of_key == parts_BL[:, :, None])))[:, None]


def _moved(part: Tensor, device: torch.device) -> Tensor:
    return part.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else part.to(device)
