"""What a language model is trained and tested on: files, or folders in which both lie, as sets with a name."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from wellposed.data.language.records import Answers, Completion, Labelled, Record, read_json
from wellposed.data.language.tables import read_table
from wellposed.errors import DataError, InvalidArgumentError

_SUFFIXES = (".json", ".jsonl", ".tsv")
_TESTED = ("test", "dev", "validation", "valid")


@dataclass(frozen=True)
class LanguageData:
    """The examples to train on, and each set to test on; of one kind, completions or labelled texts."""

    name: str
    train: tuple[Record, ...]
    tests: dict[str, tuple[Record, ...]]
    classes: tuple[str, ...]
    """The labels in the order of their numbers; empty for completions."""

    def __len__(self) -> int:
        return len(self.train)


def open_language(
    data: Sequence[str], test: Sequence[str] = (), limit: int | None = None, answers: Answers = "names"
) -> LanguageData:
    """The union of the sets that `data` names, to train on, and sets to test each by itself.

    Args:
        data: .jsonl, .json or .tsv files to train on, or folders with such a file called train.
        test: files to test on, or folders with a file called test, dev, validation or valid; if empty, those of the
            folders in `data`.
        limit: at most so many examples of each set, the first ones; all if None.
        answers: of a question that lists options, as in "Answer1: a text Answer2: another", and is answered by one of
            these names: leave it at the "names"; or take the list away and have it answered by the "texts", compared
            by their likelihood per character. Answer may also be Solution, Option or Ending; questions of other kinds
            are the same with both.

    Raises:
        DataError: a file is missing, or an example lacks something, is of another kind or has an unknown label; the
            first line that is to blame is named.
    """
    if not data:
        raise InvalidArgumentError("data is empty: expected .jsonl, .json or .tsv files, or folders that hold them")
    if answers not in get_args(Answers):
        raise InvalidArgumentError(f"answers={answers!r}: expected one of {', '.join(get_args(Answers))}")
    sources = [_file(Path(each), ("train",)) for each in data]
    tested = [_file(Path(each), _TESTED) for each in test]
    tested = tested or [_file(Path(each), _TESTED) for each in data if Path(each).is_dir()]
    read = {path: tuple(_read(path, answers)[:limit]) for path in dict.fromkeys([*sources, *tested])}
    train = tuple(record for path in sources for record in read[path])
    kind = type(train[0])
    for path, records in read.items():
        if type(records[0]) is not kind or len(set(map(type, records))) > 1:
            raise DataError(f"{path} and {sources[0]}: expected completions in all files, or labels in all of them")
    classes = _classes(train, sources)
    for path in tested if classes else ():
        for record in read[path]:
            if isinstance(record, Labelled) and record.label not in classes:
                raise DataError(
                    f"{record.where} has the label {record.label!r}, which no example to train on has: "
                    f"expected one of {', '.join(classes)}"
                )
    tests: dict[str, tuple[Record, ...]] = {}
    for path in tested:
        name = _name(path)
        tests[name if name not in tests else f"{name}-{len(tests) + 1}"] = read[path]
    return LanguageData("+".join(dict.fromkeys(map(_name, sources))), train, tests, classes)


def _read(path: Path, answers: Answers) -> Sequence[Record]:
    return read_table(path) if path.suffix == ".tsv" else read_json(path, answers)


def _name(path: Path) -> str:
    return path.parent.name if path.stem in {"train", *_TESTED} else path.stem


def _file(path: Path, stems: Sequence[str]) -> Path:
    """`path`, or the file in this folder that is called one of `stems`."""
    if path.is_dir():
        found = [path / f"{stem}{suffix}" for stem in stems for suffix in _SUFFIXES]
        file = next((each for each in found if each.is_file()), None)
        if file is None:
            raise DataError(f"{path} holds no {stems[0]} file: expected {', '.join(each.name for each in found)}")
        return file
    if path.suffix not in _SUFFIXES:
        raise DataError(f"{path}: expected a {', '.join(_SUFFIXES)} file, or a folder that holds one")
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    return path


def _classes(train: tuple[Record, ...], sources: list[Path]) -> tuple[str, ...]:
    if isinstance(train[0], Completion):
        return ()
    classes = tuple(sorted({record.label for record in train if isinstance(record, Labelled)}))
    if not 2 <= len(classes) <= len(train) // 2 + 1:
        raise DataError(f"{sources[0]} has {len(classes)} labels in {len(train)} examples: expected 2 or more classes")
    return classes
