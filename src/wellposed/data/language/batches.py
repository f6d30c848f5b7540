"""Batches of token sequences for a loop that knows inputs and targets.

Shapes: B rows of L places. Inputs are (B, K, L): token numbers and, for completions, the position of each in its own
sequence; for labelled texts, where there is a token, and of which text it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.data.images import Dataset
from wellposed.data.language.tokens import IGNORED, Tokens
from wellposed.data.loader import Loader


@dataclass(frozen=True)
class TokenRows:
    """Rows of different lengths; an image set to the loaders, which ask for no more than this."""

    name: str
    rows: list[Tensor]
    """(K, L) each."""
    targets: list[Tensor]
    """(L,) each for completions, () for labelled texts."""
    padding: int
    length: int = 0
    """Tokens that the model takes; batches are not padded beyond it."""
    classes: tuple[str, ...] = ()
    image_shape: tuple[int, int, int] = (1, 1, 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raise NotImplementedError("read by RowLoader")


class RowLoader(Loader):
    """Batches of `TokenRows`, padded to the longest row of each, and to a multiple of 8, which GPUs are faster with."""

    unit = "rows"

    def _open(self, data: Dataset) -> tuple[Tensor, Tensor]:
        assert isinstance(data, TokenRows)
        self._rows = data
        return torch.zeros(1), torch.ones(1)

    def _read(self, shares: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        data = self._rows
        for chosen in [share.tolist() for share in shares]:  # all at once: later, each would wait for the device
            batch = stacked(
                [data.rows[i] for i in chosen], [data.targets[i] for i in chosen], data.padding, data.length
            )
            if self.device.type == "cuda":  # a copy from other memory would wait for it too
                batch = batch[0].pin_memory(), batch[1].pin_memory()
            inputs, targets = (part.to(self.device, non_blocking=True) for part in batch)
            yield inputs, targets

    def _finished(self, images_NCHW: Tensor, labels_N: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return images_NCHW, labels_N


def stacked(rows: Sequence[Tensor], targets: Sequence[Tensor], padding: int, length: int = 0) -> tuple[Tensor, Tensor]:
    """One tensor of rows (K, L) and one of their targets; padding is a sequence of its own, and has no target.

    L is a multiple of 8 where that is at most `length`.
    """
    if not rows:  # the part of a process in a batch that is too small for all
        return torch.zeros(0, 2, 1, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    longest = max(row.shape[1] for row in rows)
    rounded = 8 * -(-longest // 8)
    longest = rounded if rounded <= length else longest
    inputs = torch.zeros(len(rows), rows[0].shape[0], longest, dtype=torch.long)
    inputs[:, 0] = padding
    if targets[0].ndim:
        inputs[:, 1] = torch.arange(longest)
    for place, row in zip(inputs, rows, strict=True):
        place[:, : row.shape[1]] = row
        if targets[0].ndim:
            place[1, row.shape[1] :] -= row.shape[1]
    if not targets[0].ndim:
        return inputs, torch.stack(list(targets))
    padded = torch.full((len(rows), longest), IGNORED)
    for place, target in zip(padded, targets, strict=True):
        place[: len(target)] = target
    return inputs, padded


def row_of(sequences: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
    """Sequences as one row, ids and positions (2, L), and the target of each place: the next token of an answer."""
    ids: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    for tokens in sequences:
        ids += tokens.ids
        positions += range(len(tokens.ids))
        targets += [IGNORED] * (tokens.prompt - 1) + tokens.ids[max(1, tokens.prompt) :] + [IGNORED]
    return torch.tensor([ids, positions]), torch.tensor(targets)


def row_of_texts(texts: dict[str, list[int]], pairs: bool) -> Tensor:
    """Token numbers, where they are, and of which text each is where the model asks for that: (2 or 3, L)."""
    ids = texts["input_ids"]
    return torch.tensor([ids, [1] * len(ids), *([texts["token_type_ids"]] if pairs else [])])
