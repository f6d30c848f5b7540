"""What language models are fine-tuned on, from files to batches."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from small_adapters import gpt2, llama
from small_language import byte_tokenizer, marked_sentences, write_jsonl
from wellposed.data.language import Completion, Labelled, open_language
from wellposed.data.language.batches import RowLoader, TokenRows, row_of, stacked
from wellposed.data.language.packing import packed
from wellposed.data.language.tokens import IGNORED, Encoder, Tokens
from wellposed.errors import DataError, InvalidArgumentError

DATA = Path(os.environ.get("WELLPOSED_DATA", Path(__file__).parents[2] / "shared/data"))


def test_the_three_kinds_of_objects(tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "plain.jsonl", [{"prompt": "2+2=", "completion": "4"}])
    assert open_language([str(plain)]).train == (Completion("2+2=", "4", "4"),)
    told = "is it so?\n\nAnswer format: true/false"
    (tmp_path / "list.json").write_text(
        json.dumps([{"instruction": told, "input": "", "output": "it is true", "answer": "true"}])
    )
    (example,) = open_language([str(tmp_path / "list.json")]).train
    assert isinstance(example, Completion)
    assert example.prompt == f"### Instruction:\n{told}\n\n### Response:\n"
    assert example.choices == ("true", "false")
    assert example.completed_by("false") == "it is false"
    texts = [{"text": word, "label": label} for word, label in [("x", 1), ("y", 0), ("z", 1)]]
    found = open_language([str(write_jsonl(tmp_path / "texts.jsonl", texts))])
    assert found.classes == ("0", "1")
    assert found.train[0] == Labelled("x", None, "1")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"prompt": "a", "completion": "b"}, {"prompt": "a"}], "line 2 has prompt: expected prompt and completion"),
        ([{"instruction": "a", "output": "b", "answer": "c"}], "line 1: the answer 'c' is no part of its output 'b'"),
        ([{"prompt": "a", "completion": "b", "choices": ["x", "y"]}], "the answer 'b' is none of x, y"),
        ([{"prompt": "a", "completion": "b", "choices": ["b"]}], "at least two different answers"),
        ([{"prompt": "a", "completion": " "}], "empty completion"),
        ([{"prompt": 3, "completion": "b"}], "prompt is 3, expected a text"),
        ([{"prompt": "a", "completion": "b"}, {"text": "a", "label": "b"}], "completions in all files"),
        ([{"text": "a", "label": "b"}], "1 labels in 1 examples"),
        ([["prompt"]], "line 1 is a list"),
        ([], "holds no example"),
    ],
)
def test_the_first_line_to_blame_is_named(lines: list[Any], message: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "broken.jsonl", lines)
    with pytest.raises(DataError, match=message) as caught:
        open_language([str(path)])
    assert "broken.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sentence\tlabel\nwell\t1\nbad\n", "line 3 has 1 columns: expected 2"),
        ("sentence\tlabel\nwell\t1\nbad\t\n", "line 3 has an empty label"),
        ("x\t1\t\twell\nx\t2\t\tbad\n", "line 2 has the label '2': expected 0 or 1"),
        ("a\tb\tc\n", "line 1 has 3 columns: expected a header"),
        ("sentence\tlabel\n", "a header and nothing else"),
        ("", "is empty"),
    ],
)
def test_broken_tables(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text(text)
    with pytest.raises(DataError, match=message):
        open_language([str(tmp_path / "train.tsv")])


def test_labels_outside_the_set_and_missing_files(tmp_path: Path) -> None:
    folder = marked_sentences(tmp_path / "CoLA")
    (tmp_path / "other.tsv").write_text("sentence\tlabel\nwell\t1\nbad\tmaybe\n")
    with pytest.raises(DataError, match=r"other.tsv, line 3 has the label 'maybe'.*expected one of 0, 1"):
        open_language([str(folder)], [str(tmp_path / "other.tsv")])
    with pytest.raises(DataError, match="no such file"):
        open_language([str(tmp_path / "none.tsv")])
    with pytest.raises(DataError, match=r"expected a .json, .jsonl, .tsv file"):
        open_language([str(tmp_path / "none.csv")])
    with pytest.raises(DataError, match="holds no train file"):
        open_language([str(tmp_path)])
    with pytest.raises(InvalidArgumentError, match="data is empty"):
        open_language([])


def test_a_union_is_trained_on_and_each_set_tested(tmp_path: Path) -> None:
    for name in ("one", "two"):
        marked_sentences(tmp_path / name)
    found = open_language([str(tmp_path / "one"), str(tmp_path / "two")], limit=5)
    assert found.name == "one+two"
    assert len(found) == 10
    assert {name: len(records) for name, records in found.tests.items()} == {"one": 5, "two": 5}


@pytest.mark.parametrize(
    ("name", "train", "test", "classes"),
    [
        ("CoLA", 7250, 1043, ("0", "1")),
        ("MRPC", 2576, 1500, ("0", "1")),
        ("RTE", 2127, 277, ("entailment", "not_entailment")),
        ("SST-2", 67349, 872, ("0", "1")),
    ],
)
def test_glue_as_it_lies_on_disk(name: str, train: int, test: int, classes: tuple[str, ...]) -> None:
    if not (DATA / "glue" / name).is_dir():
        pytest.skip(f"{DATA}/glue/{name} is not there")
    found = open_language([str(DATA / "glue" / name)])
    assert (len(found), len(found.tests[name]), found.classes) == (train, test, classes)
    pairs = {record.pair is not None for record in found.train if isinstance(record, Labelled)}
    assert pairs == {name in {"MRPC", "RTE"}}


def test_the_commonsense_sets_as_they_lie_on_disk() -> None:
    if not (DATA / "commonsense").is_dir():
        pytest.skip(f"{DATA}/commonsense is not there")
    found = open_language([str(folder) for folder in sorted((DATA / "commonsense").iterdir())])
    assert len(found) == 17754
    assert {name: len(records) for name, records in found.tests.items()} == {
        **{"ARC-Challenge": 1172, "ARC-Easy": 2376},
        **{"boolq": 3270, "openbookqa": 500},
    }
    for record in (*found.train, *sum(found.tests.values(), ())):
        assert isinstance(record, Completion)
        assert record.answer in record.choices
        assert record.completed_by(record.answer) == record.completion


def test_the_commonsense_sets_by_the_texts_of_their_options() -> None:
    if not (DATA / "commonsense").is_dir():
        pytest.skip(f"{DATA}/commonsense is not there")
    folders = [str(folder) for folder in sorted((DATA / "commonsense").iterdir())]
    named, told = (open_language(folders, answers=answers) for answers in ("names", "texts"))
    merged = 0
    for before, after in zip(
        (*named.train, *sum(named.tests.values(), ())), (*told.train, *sum(told.tests.values(), ())), strict=True
    ):
        assert isinstance(before, Completion)
        assert isinstance(after, Completion)
        if before.choices == ("true", "false"):
            assert after == before
            continue
        assert "Answer1" not in after.prompt
        assert before.prompt.startswith(after.prompt.removesuffix("\n\n### Response:\n"))
        if len(after.choices) == len(before.choices):
            listed = "".join(f" Answer{n}: {text}" for n, text in enumerate(after.choices, start=1))
            assert " ".join(listed.split()) in " ".join(before.prompt.split())
            assert after.choices.index(after.answer) == before.choices.index(before.answer)
        merged += len(before.choices) - len(after.choices)
        assert after.completion == f"the correct answer is {after.answer}"
    assert merged == 3  # questions of OpenBookQA to train on that list a text twice


@pytest.mark.parametrize(
    ("asked", "name", "texts", "prompt"),
    [
        (
            "Warm?\n\nAnswer1: dry palms Answer2: wet, Answer3: no\n\nAnswer format: {}",
            "answer",
            "dry palms|wet,|no",
            "Warm?",
        ),
        (
            "Rest.\n\nSolution1: Sit down. \n\nSolution2: Go: on.\n\nAnswer format: {}",
            "solution",
            "Sit down.|Go: on.",
            "Rest.",
        ),
        ("The _ fits.\n\nOption1: jeans Option2: shirt Answer format: {}", "option", "jeans|shirt", "The _ fits."),
        (
            "Drums:\nA man\nEnding1: [step] plays.\nEnding2: sings\nAnswer:",
            "Ending",
            "[step] plays.|sings",
            "Drums:\nA man\nAnswer:",
        ),
    ],
)
def test_options_are_answered_by_their_texts(asked: str, name: str, texts: str, prompt: str, tmp_path: Path) -> None:
    choices = tuple(texts.split("|"))
    names = [f"{name}{number}" for number in range(1, 1 + len(choices))]
    example = {"prompt": asked.format("/".join(names)), "completion": f"it is {names[1]}.", "answer": names[1]}
    path = write_jsonl(tmp_path / "asked.jsonl", [example if "{" in asked else example | {"choices": names}])
    (found,) = open_language([str(path)], answers="texts").train
    assert found == Completion(prompt, f"it is {choices[1]}.", choices[1], choices, by_character=True)
    assert isinstance(found, Completion)
    assert found.completed_by(choices[0]) == f"it is {choices[0]}."
    (named,) = open_language([str(path)]).train
    assert named == Completion(example["prompt"], example["completion"], names[1], tuple(names))


def test_options_of_the_same_text_are_one(tmp_path: Path) -> None:
    asked = "Where?\n\nAnswer1: sky Answer2: roots Answer3: sky\n\nAnswer format: answer1/answer2/answer3"
    example = {"instruction": asked, "output": "the correct answer is answer3", "answer": "answer3"}
    path = write_jsonl(tmp_path / "same.jsonl", [example])
    (found,) = open_language([str(path)], answers="texts").train
    prompt = "### Instruction:\nWhere?\n\n### Response:\n"
    assert found == Completion(prompt, "the correct answer is sky", "sky", ("sky", "roots"), by_character=True)


@pytest.mark.parametrize(
    ("listed", "completion", "told"),
    [
        ("Answer1: one\nand more Answer2: b", "answer1", "has lines between its options"),
        ("Answer1: no Answer2: yes", "answer1, and not the other", "the text 'no' stands in its completion once more"),
    ],
)
def test_options_that_cannot_be_put_in_place(listed: str, completion: str, told: str, tmp_path: Path) -> None:
    asked = {"prompt": f"Which?\n\n{listed}\n\nAnswer format: answer1/answer2", "completion": completion}
    path = write_jsonl(tmp_path / "broken.jsonl", [asked | {"answer": "answer1"}])
    with pytest.raises(DataError, match=f"line 1:? {told}"):
        open_language([str(path)], answers="texts")


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        ("", "no option"),
        ("Answer1: sky", "answer1"),
        ("Answer1: Answer2: sky", "answer2"),
        ("Answer1: a Answer2: b Answer3: c", "answer1, answer2, answer3"),
        ("Answer1: a Answer1: b", "answer1, answer1"),
        ("Answer1: a Answer2:\nAnswer:", "answer1"),
    ],
)
def test_options_without_a_text_of_their_own(listed: str, told: str, tmp_path: Path) -> None:
    good = {"prompt": "Is it?\n\nAnswer format: true/false", "completion": "true"}
    asked = {"prompt": f"Which?\n\n{listed}\n\nAnswer format: answer1/answer2", "completion": "answer1"}
    path = write_jsonl(tmp_path / "broken.jsonl", [good, asked])
    message = rf"broken.jsonl, line 2 lists {told} with a text: expected answer1, answer2, each once"
    with pytest.raises(DataError, match=message):
        open_language([str(path)], answers="texts")
    with pytest.raises(InvalidArgumentError, match="answers='letters': expected one of names, texts"):
        open_language([str(path)], answers="letters")  # type: ignore[arg-type]
    assert len(open_language([str(path)])) == 2


@pytest.mark.parametrize("starts", [False, True])
def test_the_answer_alone_is_learned_and_ends_the_text(starts: bool) -> None:
    tokenizer = byte_tokenizer()
    if starts:
        from tokenizers.processors import TemplateProcessing

        tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    encoder = Encoder(tokenizer, 32)
    tokens = encoder.example(Completion("ab", "cd", "cd"))
    assert tokenizer.decode(tokens.ids) == ("<s>" if starts else "") + "abcd<|endoftext|>"
    row, targets = row_of([tokens])
    learned = [(tokenizer.decode([a]), tokenizer.decode([b])) for a, b in zip(row[0], targets, strict=True) if b >= 0]
    assert learned == [("b", "c"), ("c", "d"), ("d", "<|endoftext|>")]
    assert encoder.told() is None


def test_what_is_too_long_is_cut_and_counted() -> None:
    tokenizer = byte_tokenizer()
    encoder = Encoder(tokenizer, 6)
    assert tokenizer.decode(encoder.example(Completion("abcdefgh", "xy", "xy")).ids) == "fghxy<|endoftext|>"
    assert tokenizer.decode(encoder.example(Completion("ab", "123456789", "1")).ids) == "b12345"
    assert tokenizer.decode(encoder.example(Completion("", "x", "x")).ids) == "x<|endoftext|>"
    assert encoder.told() == "2 of 3 are longer than 6 tokens and were cut to that"
    short, long, pair = encoder.texts(
        [Labelled("ab", None, "1"), Labelled("abcdefgh", None, "1"), Labelled("abcd", "efgh", "1")]
    )
    assert [len(each["input_ids"]) for each in (short, long, pair)] == [2, 6, 6]
    assert tokenizer.decode(short["input_ids"]) == "ab"
    assert encoder.cut == 4
    one, two = encoder.choices(Completion("abcdef", "no", "no", ("no", "yes")))
    assert one.ids[: one.prompt] == two.ids[: two.prompt] == tokenizer("ef")["input_ids"]
    assert len(encoder.prompt(Completion("abcdefgh", "x", "x"), room=4)) == 2


@given(st.lists(st.integers(1, 16), min_size=1, max_size=60))
def test_packing_keeps_every_sequence_once_and_wastes_little(lengths: list[int]) -> None:
    rows = packed(lengths, 16)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    sums = [sum(lengths[number] for number in row) for row in rows]
    assert max(sums) <= 16
    assert sum(total <= 8 for total in sums) <= 1  # two rows that fit into one are never both opened


@pytest.mark.parametrize("make", [llama, gpt2])
def test_packed_sequences_do_not_see_each_other(make: Any) -> None:
    """The loss of a packed and padded batch is that of the sequences one by one, whatever shares their row."""
    model = make()
    generator = torch.Generator().manual_seed(0)
    sequences = [
        Tokens(torch.randint(1, 60, (size,), generator=generator).tolist(), prompt) for size, prompt in
        [(5, 2), (9, 4), (3, 1), (6, 5)]
    ]  # fmt: skip
    alone = torch.cat([_token_losses(model, *stacked([row], [t], 0)) for row, t in (row_of([s]) for s in sequences)])
    rows, targets = zip(*(row_of(sequences[:3]), row_of(sequences[3:])), strict=True)
    together = _token_losses(model, *stacked(rows, targets, 0, length=24))
    assert [stacked(rows, targets, 0, length)[0].shape[-1] for length in (0, 23, 24)] == [17, 17, 24]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    assert len(alone) == 3 + 5 + 2 + 1


def _token_losses(model: transformers.PreTrainedModel, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=inputs[:, 0], position_ids=inputs[:, 1], use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits.mT, targets, ignore_index=IGNORED, reduction="none")
    return losses[targets != IGNORED].detach()


def test_batches_resume_and_are_shared_between_processes() -> None:
    pieces = [row_of([Tokens(list(range(1, 3 + n)), 1)]) for n in range(10)]
    data = TokenRows("rows", [row for row, _ in pieces], [targets for _, targets in pieces], padding=0)
    loader = RowLoader(data, 4, seed=3)
    steps = iter(loader)
    next(steps)
    state = loader.state_dict()
    second = next(steps)
    other = RowLoader(data, 4, seed=5)
    other.load_state_dict(state)
    torch.testing.assert_close(next(iter(other)), second)
    halves = [next(iter(RowLoader(data, 4, seed=3, rank=rank, ranks=2))) for rank in range(2)]
    whole = next(iter(RowLoader(data, 4, seed=3)))
    assert sum(int((targets >= 0).sum()) for _, targets in halves) == int((whole[1] >= 0).sum())
    last = [list(RowLoader(data, 9, shuffle=False, rank=rank, ranks=3))[-1] for rank in range(3)]
    assert [len(targets) for _, targets in last] == [0, 0, 1]  # the tenth row alone
