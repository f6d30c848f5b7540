"""Scores of language models, against scikit-learn and against transformers' own loss."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics
from torch import Tensor

from small_adapters import llama
from wellposed.data.language import Completion
from wellposed.data.language.tokens import Tokens
from wellposed.evaluation.language.generation import is_right
from wellposed.evaluation.language.likelihood import Choosing, choose, log_likelihoods
from wellposed.evaluation.language.metrics import confusion, scores
from wellposed.training.finetuning.completions import NextToken


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40))
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
def test_binary_scores_are_those_of_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    predicted, labels = ([pair[side] for pair in pairs] for side in (0, 1))
    found = scores(confusion(torch.tensor(predicted), torch.tensor(labels), 2))
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(labels, predicted))
    assert found["f1"] == pytest.approx(metrics.f1_score(labels, predicted, zero_division=0))
    assert found["matthews"] == pytest.approx(metrics.matthews_corrcoef(labels, predicted))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40))
def test_the_confusion_of_several_classes_is_that_of_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    predicted, labels = ([pair[side] for pair in pairs] for side in (0, 1))
    found = confusion(torch.tensor(predicted), torch.tensor(labels), 4)
    assert found.tolist() == metrics.confusion_matrix(labels, predicted, labels=range(4)).tolist()
    assert set(scores(found)) == {"accuracy"}


HOW: dict[str, Any] = {"batch_size": 3, "padding": 0, "device": torch.device("cpu")}


def _logits(*inputs: Tensor) -> Tensor:
    return NextToken(llama(), positions=True)(*inputs)


def test_likelihoods_are_those_of_transformers_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    sequences = [
        Tokens(torch.randint(1, 60, (size,), generator=generator).tolist(), prompt)
        for size, prompt in [(5, 2), (9, 4), (3, 1), (12, 11)]
    ]
    found = [one for (one,) in log_likelihoods(_logits, [[each] for each in sequences], **HOW)]
    for tokens, value in zip(sequences, found, strict=True):
        ids = torch.tensor([tokens.ids])
        labels = ids.clone()
        labels[:, : tokens.prompt] = -100
        loss = llama()(input_ids=ids, labels=labels).loss
        assert value == pytest.approx(-loss.item() * len(tokens.answer), rel=1e-5)
    best = max(range(2), key=lambda number: found[number])
    questions = [Choosing(sequences[:2], best), Choosing(sequences[:2], 1 - best), Choosing(sequences[2:3], 0)]
    loss, tokens_counted, right, asked = choose(_logits, questions, **HOW).tolist()
    assert loss == pytest.approx(-(found[0] + found[1] + found[2]))
    assert (tokens_counted, right, asked) == (3 + 5 + 2, 1, 2)
    other = [1, 1]
    other[1 - best] = 1000  # per character, the less likely of the two is ahead
    for lengths, expected in (((), 1), (other[::-1], 1), (other, 0)):
        assert choose(_logits, [Choosing(sequences[:2], best, lengths)], **HOW)[2] == expected


@pytest.mark.parametrize("prompt", [0, 4])
def test_answers_read_together_are_as_likely_as_each_alone(prompt: int) -> None:
    """Endings of every length, one the beginning of another, one of no token, and questions with nothing in common."""
    generator = torch.Generator().manual_seed(prompt)
    numbers = torch.randint(1, 60, (4, 12), generator=generator).tolist()
    questions = [
        [Tokens(row[:prompt] + ending, prompt) for ending in ([7, 8, 9, 1], [7, 8, 1], [7, 2, 3, 4, 1], [5, 1], [6])]
        for row in numbers
    ]
    questions.append([Tokens(row, prompt) for row in numbers])
    read: list[int] = []

    def counted(inputs: Tensor, places: Tensor, sees: Tensor | None) -> Tensor:
        read.append(inputs.shape[0] * inputs.shape[2])
        return _logits(inputs, places, sees)

    alone = log_likelihoods(counted, questions, **HOW, together=False)
    tokens, read[:] = sum(read), []
    together = log_likelihoods(counted, questions, **HOW)
    assert sum(read) < tokens or not prompt
    for one, other in zip(together, alone, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-5)


def test_logits_of_some_places_are_those_of_all() -> None:
    inputs = torch.stack([torch.arange(1, 13).view(2, 6), torch.arange(6).repeat(2, 1)], 1)
    places = torch.tensor([11, 0, 5])
    model = llama()
    net = NextToken(model, positions=True)
    torch.testing.assert_close(net(inputs, places), model(input_ids=inputs[:, 0]).logits.flatten(0, 1)[places])
    torch.testing.assert_close(net(inputs), model(input_ids=inputs[:, 0]).logits)


@pytest.mark.parametrize(
    ("written", "right"),
    [
        ("the correct answer is answer1", True),
        ("answer10", False),
        ("it is answer2, or answer1", False),
        ("nothing", False),
        ("answer1answer2", False),
    ],
)
def test_what_is_written_counts_by_the_first_choice_in_it(written: str, right: bool) -> None:
    asked = Completion("which?", "the correct answer is answer1", "answer1", ("answer1", "answer2"))
    assert is_right(written, asked) == right
    assert is_right(f" {written}\n", Completion("say it", written, written))
