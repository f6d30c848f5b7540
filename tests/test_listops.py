"""ListOps against an evaluation of the written expressions by Python itself."""

import re
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed.data.listops import OPERATIONS, VOCABULARY, make_listops, written
from wellposed.errors import DataError, InvalidArgumentError

NAMES = {"MIN": min, "MAX": max, "MED": lambda v: int(statistics.median(v)), "SM": lambda v: sum(v) % 10}


def evaluated(text: str) -> int:
    """The value of an expression, by rewriting it as a Python call."""
    call = re.sub(r"\[(\w+)", r"\1([", text).replace("]", "]),")
    call = re.sub(r"(\d)(?=[ \]])", r"\1,", call)
    return int(eval(call.rstrip(","), {"__builtins__": {}}, NAMES))


def depth_of(text: str) -> int:
    deepest = now = 0
    for token in text.split():
        now += token.startswith("[")
        now -= token == "]"
        deepest = max(deepest, now)
    return deepest


def arguments_of(text: str) -> list[int]:
    counts, stack = [], [0]
    for token in text.split():
        if token == "]":
            counts.append(stack.pop())
        else:
            stack[-1] += 1
            if token.startswith("["):
                stack.append(0)
    return counts


def test_the_papers_example() -> None:
    assert evaluated("[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]") == 5


@given(
    lengths=st.tuples(st.integers(1, 10), st.integers(0, 40)),
    depth=st.integers(2, 6),
    args=st.integers(2, 8),
    seed=st.integers(0, 999),
)
@settings(max_examples=40, deadline=None)
def test_values_and_shapes(lengths: tuple[int, int], depth: int, args: int, seed: int) -> None:
    shortest, longest = lengths[0], lengths[0] + lengths[1] + 4
    drawn = make_listops(5, min_length=shortest, max_length=longest, max_depth=depth, max_args=args, seed=seed)
    assert drawn.tokens.dtype == torch.uint8
    assert int(drawn.tokens.max()) < len(VOCABULARY)
    for tokens, mask, label in zip(drawn.tokens, drawn.mask, drawn.labels, strict=True):
        text, n = written(tokens), int(mask.sum())
        assert mask[:n].all()
        assert shortest <= n <= longest
        assert evaluated(text) == label
        assert depth_of(text) <= depth
        assert all(2 <= count <= args for count in arguments_of(text))


def test_the_same_for_the_same_seed() -> None:
    one, same, other = (make_listops(20, min_length=5, max_length=60, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one.tokens, same.tokens)
    assert torch.equal(one.labels, same.labels)
    assert written(one.tokens[0]) != written(other.tokens[0])
    first = make_listops(5, min_length=5, max_length=60, seed=3)
    assert [written(row) for row in first.tokens] == [written(row) for row in one.tokens[:5]]


def test_all_answers_and_operations_come_up() -> None:
    drawn = make_listops(400, min_length=10, max_length=100)
    assert set(drawn.labels.tolist()) == set(range(10))
    text = " ".join(written(row) for row in drawn.tokens)
    assert all(operation in text for operation in OPERATIONS)


def test_lengths_of_long_range_arena() -> None:
    drawn = make_listops(4)
    assert 500 <= drawn.mask.sum(1).min() <= drawn.mask.sum(1).max() <= 2000


@pytest.mark.parametrize(
    "arguments",
    [{"count": 0}, {"max_depth": 0}, {"max_args": 1}, {"min_length": 0}, {"min_length": 9, "max_length": 8}],
)
def test_arguments_out_of_range(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="expected count and max_depth"):
        make_listops(**({"count": 1} | arguments))


def test_lengths_that_cannot_be() -> None:
    with pytest.raises(DataError, match="none has 500 to 501 tokens"):
        make_listops(1, min_length=500, max_length=501, max_depth=1)
