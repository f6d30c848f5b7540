"""Examples for language models as they lie in files: a prompt and its completion, or texts and their label.

JSON Lines and JSON lists hold prompt and completion, or instruction (and input) and output (and answer), or text (and
text_pair) and label. What may be answered stands in `choices`, or as "Answer format: a/b/c" at the end of the prompt.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from wellposed.errors import DataError

_FIELDS = {"prompt": "completion", "instruction": "output", "text": "label"}
_FORMAT = re.compile(r"Answer format:\s*([^\s/]+(?:/[^\s/]+)+)\s*$")
_NAME = r"(?:answer|solution|option|ending)\d+"
_OPTION = re.compile(rf"\b({_NAME}):", re.IGNORECASE)

Answers = Literal["names", "texts"]
"""What stands for an option that a question lists, as in "Answer1: a text Answer2: another"."""


@dataclass(frozen=True)
class Completion:
    """What is asked, what is to follow, and what else might have."""

    prompt: str
    completion: str
    answer: str
    """The part of the completion that is right or wrong; all of it where the file does not say."""
    choices: tuple[str, ...] = ()
    """All that may be answered; empty if that is open."""
    by_character: bool = False
    """Compare the likelihoods of the choices per character, since they are texts of different lengths."""

    def completed_by(self, choice: str) -> str:
        """The completion with `choice` in the place of the answer."""
        before, _, after = self.completion.rpartition(self.answer)
        return f"{before}{choice}{after}"


@dataclass(frozen=True)
class Labelled:
    """A text, or a pair of them, and the name of its class."""

    text: str
    pair: str | None
    label: str
    where: str = field(default="", compare=False)
    """The file and line that it comes from."""


Record = Completion | Labelled


def read_json(path: Path, answers: Answers = "names") -> list[Record]:
    """The examples of a .jsonl file, one a line, or of a .json file that holds a list of them."""
    records = [_record(found, where, answers) for where, found in _objects(path)]
    if not records:
        raise DataError(f"{path} holds no example")
    return records


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    """Every object in the file, and where it stands."""
    text = read_text(path)
    if path.suffix == ".json":
        try:
            found = json.loads(text)
        except ValueError as error:
            raise DataError(f"{path} is not JSON: {error}; one object a line is .jsonl") from error
        if not isinstance(found, list):
            raise DataError(f"{path} holds a {type(found).__name__}: expected a list of objects")
        yield from ((f"{path}, example {number}", each) for number, each in enumerate(found, start=1))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield f"{path}, line {number}", json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number} is not JSON: {error}") from error


def _record(found: Any, where: str, answers: Answers) -> Record:
    if not isinstance(found, Mapping):
        raise DataError(f"{where} is a {type(found).__name__}: expected an object with prompt and completion")
    asked = next((name for name in _FIELDS if name in found), None)
    if asked is None or _FIELDS[asked] not in found:
        pairs = ", or ".join(f"{question} and {answer}" for question, answer in _FIELDS.items())
        raise DataError(f"{where} has {', '.join(map(str, found)) or 'no fields'}: expected {pairs}")
    if asked == "text":
        pair = found.get("text_pair")
        texts = _text(found, "text", where), pair and _text(found, "text_pair", where)
        return Labelled(*texts, label=str(found["label"]), where=where)
    prompt, completion = _text(found, asked, where), _text(found, _FIELDS[asked], where)
    if not completion.strip():
        raise DataError(f"{where} has an empty {_FIELDS[asked]}: expected what is to be learned")
    answer = str(found["answer"]) if found.get("answer") is not None else completion
    choices = _choices(found, prompt, where)
    if answer not in completion:
        raise DataError(f"{where}: the answer {answer!r} is no part of its {_FIELDS[asked]} {completion!r}")
    if choices and answer not in choices:
        raise DataError(f"{where}: the answer {answer!r} is none of {', '.join(choices)}")
    example = Completion(prompt, completion, answer, choices)
    if answers == "texts" and choices and all(re.fullmatch(_NAME, each, re.IGNORECASE) for each in choices):
        example = _answered_by_text(example, where)
    if asked == "instruction":
        more = f"\n\n### Input:\n{found['input']}" if found.get("input") else ""
        example = replace(example, prompt=f"### Instruction:\n{example.prompt}{more}\n\n### Response:\n")
    return example


def _choices(found: Mapping[str, Any], prompt: str, where: str) -> tuple[str, ...]:
    given = found.get("choices")
    if given is None:
        told = _FORMAT.search(prompt)
        return tuple(told[1].split("/")) if told else ()
    if not isinstance(given, list) or len(set(map(str, given))) < max(2, len(given)):
        raise DataError(f"{where}: choices is {given!r}, expected a list of at least two different answers")
    return tuple(map(str, given))


def _answered_by_text(example: Completion, where: str) -> Completion:
    """`example` without its list of options, whose texts take the place of their names; the same texts are one."""
    told = _FORMAT.search(example.prompt)
    prompt = example.prompt[: told.start()].rstrip() if told else example.prompt
    names = list(_OPTION.finditer(prompt))
    ends = [*(name.start() for name in names[1:]), len(prompt)]
    lines = [prompt[name.end() : end].partition("\n") for name, end in zip(names, ends, strict=False)]
    listed = [(name[1].lower(), line.strip()) for name, (line, _, _) in zip(names, lines, strict=True) if line.strip()]
    if sorted(name for name, _ in listed) != sorted(map(str.lower, example.choices)):
        raise DataError(
            f"{where} lists {', '.join(name for name, _ in listed) or 'no option'} with a text: expected "
            f"{', '.join(example.choices)}, each once, as in 'Answer1: a text Answer2: another'; or answers "
            "by their names"
        )
    if any(more.strip() for _, _, more in lines[:-1]):
        raise DataError(f"{where} has lines between its options: expected the text of each in one line")
    texts = dict(listed)
    answer = texts[example.answer.lower()]
    choices = tuple(dict.fromkeys(texts[choice.lower()] for choice in example.choices))
    asked = prompt[: names[0].start()].rstrip() + "".join(lines[-1][1:])
    changed = Completion(asked, example.completed_by(answer), answer, choices, by_character=True)
    if changed.completed_by(example.answer) != example.completion:
        raise DataError(f"{where}: the text {answer!r} stands in its completion once more, after the answer")
    return changed


def _text(found: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(found[name], str):
        raise DataError(f"{where}: {name} is {found[name]!r}, expected a text")
    return found[name]


def read_text(path: Path) -> str:
    """What the file holds, without the mark that some editors put before it."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text: {error}") from error
