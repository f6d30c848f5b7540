"""The page of a diagnosis: what is healthy and what is not in words, then curves and tables."""

from collections.abc import Mapping
from pathlib import Path

from wellposed.diagnosis.report import Diagnosis
from wellposed.reporting import Section, page
from wellposed.runs import atomic_path


def write_page(report: Diagnosis, path: Path, facts: Mapping[str, str]) -> None:
    """Write the page of `report`, one self-contained HTML file."""
    inputs, tokens, width = report.input_shape
    lead = (
        f"{len(report.blocks)} blocks, seen on {inputs} inputs of {tokens} tokens, {width} wide. A block turns the "
        "tokens of an input, a matrix with a row per token, into others; a well-conditioned one keeps them apart."
    )
    with atomic_path(path) as temporary:
        text = page(f"Diagnosis of {report.model}", lead, _sections(report), facts)
        temporary.write_text(text, encoding="utf-8")


def _sections(report: Diagnosis) -> list[Section]:
    columns, rows = report.table(spreads=True)
    sections = [
        Section("In words", "By rules of thumb, not theorems.", items=(*report.findings, *report.notes)),
        Section(
            "Over the blocks",
            "The condition number of a matrix is its largest singular value over its smallest: 1 is perfect, and at "
            "the top of the picture the matrix is singular as far as float32 can tell. attention and mlp are what "
            "these give before it meets the skip. Where the mean cosine nears 1 all tokens have become the same; the "
            "stable rank says in how many directions they differ. Attention to itself near 1/N, entropy near 1 and a "
            "small norm are uniform attention; entropy near 0 looks at one token only.",
            [curves.svg() for curves in report.curves()],
        ),
        Section(
            "Every block",
            "Medians over the inputs; in brackets, where all but a tenth below and a tenth above lie. cond. is a "
            "condition number, inf a singular matrix; A is the attention matrix, its norm is bounded by the root of "
            "the number of tokens.",
            columns=columns,
            rows=rows,
        ),
    ]
    columns, rows = report.prediction_table()
    if rows:
        text = (
            "What the papers expect of each block, and after the colon what was measured. These are no bounds to rely "
            "on: the propositions leave LayerNorm out, are about linear attention (4.1, 4.2), or assume square weights "
            "and at least as many tokens as channels."
        )
        sections.append(Section("Predictions of the papers", text, columns=columns, rows=rows))
    return sections
