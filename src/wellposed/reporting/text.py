"""Tables for a terminal, and for files that keep them."""

from collections.abc import Mapping, Sequence


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under their headings, which are broken at spaces so as not to be wider than what stands below them.

    Example:
        >>> print(text_table(["block", "a long name"], [["blocks.0", "1.5"], ["blocks.1", "12"]]))
                      a
                   long
        block      name
        blocks.0    1.5
        blocks.1     12
    """
    widths = [
        max([len(row[i]) for row in rows] + [len(word) for word in column.split()]) for i, column in enumerate(columns)
    ]
    heads = [_broken(column, width) for column, width in zip(columns, widths, strict=True)]
    height = max(map(len, heads))
    lines = [[([""] * (height - len(head)) + head)[i] for head in heads] for i in range(height)]
    return "\n".join(
        "   ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in [*lines, *rows]
    )


def _broken(text: str, width: int) -> list[str]:
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]], facts: Mapping[str, str]) -> str:
    """A table of GitHub's Markdown, and below it what is needed to measure it again.

    Example:
        >>> print(markdown_table(["a", "b"], [["1", "2"]], {"command": "count"}), end="")
        | a | b |
        | --- | --- |
        | 1 | 2 |
        <BLANKLINE>
        * command: `count`
    """
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]
    lines += ["", *(f"* {n}: {f'`{v}`' if n in {'command', 'commit'} else v}" for n, v in facts.items())]
    return "\n".join(lines) + "\n"
