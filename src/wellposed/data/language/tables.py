"""Tables of GLUE's kind: a sentence or two and a label a line, between tabs, with a header or without."""

from dataclasses import dataclass
from pathlib import Path

from wellposed.data.language.records import Labelled, read_text
from wellposed.errors import DataError

_LABELS = ("label", "gold_label", "is_duplicate", "Quality")
_TEXTS = (
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("premise", "hypothesis"),
    ("#1 String", "#2 String"),
    ("sentence",),
    ("text",),
)


@dataclass(frozen=True)
class _Layout:
    columns: int
    label: int
    texts: tuple[int, ...]
    binary: bool = False
    """Whether the labels are 0 and 1, and no others."""


# What GLUE has without a header: CoLA (source, label, mark, sentence) and MRPC (label, two ids, two sentences).
_BARE = (_Layout(4, 1, (3,), binary=True), _Layout(5, 0, (3, 4), binary=True))


def read_table(path: Path) -> list[Labelled]:
    """The examples of a .tsv file; quotation marks are marks like any other."""
    lines = [line.rstrip("\r") for line in read_text(path).split("\n")]
    rows = [(number, line.split("\t")) for number, line in enumerate(lines, start=1) if line]
    if not rows:
        raise DataError(f"{path} is empty")
    layout, headed = _layout(rows[0][1], path)
    records = [_labelled(cells, layout, f"{path}, line {number}") for number, cells in rows[headed:]]
    if not records:
        raise DataError(f"{path} holds a header and nothing else")
    return records


def _layout(first: list[str], path: Path) -> tuple[_Layout, bool]:
    """How the columns are laid out, and whether the first line is a header."""
    label = next((name for name in _LABELS if name in first), None)
    texts = next((names for names in _TEXTS if set(names) <= set(first)), None)
    if label is not None and texts is not None:
        binary = label in {"Quality", "is_duplicate"}
        return _Layout(len(first), first.index(label), tuple(map(first.index, texts)), binary), True
    for layout in _BARE:
        if len(first) == layout.columns and first[layout.label] in {"0", "1"}:
            return layout, False
    raise DataError(
        f"{path}, line 1 has {len(first)} columns: expected a header with a label and sentence, or sentence1 and "
        "sentence2; or, without one, the 4 columns of CoLA (source, 0 or 1, mark, sentence) or the 5 of MRPC (0 or 1, "
        "two ids, two sentences)"
    )


def _labelled(cells: list[str], layout: _Layout, where: str) -> Labelled:
    if len(cells) != layout.columns:
        raise DataError(f"{where} has {len(cells)} columns: expected {layout.columns}, like the first line")
    label, texts = cells[layout.label].strip(), [cells[column] for column in layout.texts]
    if not label or not texts[0].strip():
        raise DataError(f"{where} has an empty {'sentence' if label else 'label'}")
    if layout.binary and label not in {"0", "1"}:
        raise DataError(f"{where} has the label {label!r}: expected 0 or 1")
    return Labelled(texts[0], texts[1] if len(texts) > 1 else None, label, where)
