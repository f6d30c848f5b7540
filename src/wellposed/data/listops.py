"""`listops`: nested operations on lists of digits, the longest-range task of Long Range Arena (arXiv 2011.04006).

An expression is a digit, or an operation on 2 to `max_args` expressions:

    [MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]  ->  5

MIN and MAX are what they say, MED is the median, rounded down, and SM the sum modulo 10; the answer is a digit. An
expression is an operation with probability 1/4, and never where `max_depth` of them are around it. Those whose length
is out of range are drawn again.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from wellposed.errors import DataError, InvalidArgumentError
from wellposed.runs import tracked

OPERATIONS: dict[str, Callable[[Sequence[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(median(values)),
    "[SM": lambda values: sum(values) % 10,
}
VOCABULARY = ("", *map(str, range(10)), *OPERATIONS, "]")
"""The tokens by their number; 0 is padding."""
_OPERATION = 0.25
_PATIENCE = 100_000
_NUMBERS = {token: number for number, token in enumerate(VOCABULARY)}


@dataclass(frozen=True)
class ListOps:
    """Expressions and their values."""

    tokens: Tensor
    """Numbers of tokens, (count, longest), uint8, with 0 after the end."""
    labels: Tensor
    """The value of each, (count,), int64."""

    @property
    def mask(self) -> Tensor:
        """True for what is no padding, (count, longest)."""
        return self.tokens > 0


def make_listops(
    count: int,
    *,
    min_length: int = 500,
    max_length: int = 2000,
    max_depth: int = 9,
    max_args: int = 10,
    seed: int = 0,
) -> ListOps:
    """`count` expressions, the same for the same arguments; the defaults are Long Range Arena's.

    Args:
        count: number of expressions; Long Range Arena has 96,000 to train on and 2,000 to test on.
        min_length: tokens of the shortest expression, brackets included.
        max_length: tokens of the longest.
        max_depth: operations within each other, at least 1; digits are the tenth level of Long Range Arena.
        max_args: arguments of an operation, at least 2.
        seed: of the generator all random numbers come from.

    Raises:
        InvalidArgumentError: an argument out of its range.
        DataError: expressions of such a length hardly ever come up.
    """
    if count < 1 or max_depth < 1 or max_args < 2 or not 1 <= min_length <= max_length:
        raise InvalidArgumentError(
            f"count={count}, min_length={min_length}, max_length={max_length}, max_depth={max_depth}, "
            f"max_args={max_args}: expected count and max_depth of at least 1, max_args of at least 2, and "
            "1 <= min_length <= max_length"
        )
    draw = random.Random(seed)
    drawn = [
        _drawn(draw, min_length, max_length, max_depth, max_args) for _ in tracked(range(count), "making expressions")
    ]
    tokens = torch.zeros(count, max(len(expression) for expression, _ in drawn), dtype=torch.uint8)
    for row, (expression, _) in zip(tokens, drawn, strict=True):
        row[: len(expression)] = torch.tensor(expression, dtype=torch.uint8)
    return ListOps(tokens, torch.tensor([value for _, value in drawn]))


def written(tokens: Tensor) -> str:
    """An expression as text, from the numbers of its tokens.

    Example:
        >>> written(torch.tensor([11, 4, 9, 15, 0]))
        '[MIN 3 8 ]'
    """
    return " ".join(VOCABULARY[number] for number in tokens.tolist() if number)


def _drawn(
    draw: random.Random, min_length: int, max_length: int, max_depth: int, max_args: int
) -> tuple[list[int], int]:
    for _ in range(_PATIENCE):
        expression: list[int] = []
        value = _grow(draw, expression, max_length, max_depth, max_args)
        if value is not None and len(expression) >= min_length:
            return expression, value
    raise DataError(
        f"of {_PATIENCE} expressions of at most {max_depth} operations within each other with at most {max_args} "
        f"arguments, none has {min_length} to {max_length} tokens: widen the range of lengths"
    )


def _grow(draw: random.Random, expression: list[int], longest: int, depth: int, max_args: int) -> int | None:
    """Append an expression to `expression` and return its value, or None as soon as it is too long."""
    if len(expression) >= longest:
        return None
    if depth == 0 or draw.random() >= _OPERATION:
        value = draw.randrange(10)
        expression.append(_NUMBERS[str(value)])
        return value
    operation = draw.choice(tuple(OPERATIONS))
    expression.append(_NUMBERS[operation])
    values: list[int] = []
    for _ in range(draw.randint(2, max_args)):
        value_of_argument = _grow(draw, expression, longest - 1, depth - 1, max_args)
        if value_of_argument is None:
            return None
        values.append(value_of_argument)
    expression.append(_NUMBERS["]"])
    return OPERATIONS[operation](values)
