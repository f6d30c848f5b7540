"""A measured table, as the terminal shows it and as results/ keeps it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of text with a title and the facts needed to measure them again."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    facts: dict[str, str]

    def markdown(self) -> str:
        """The table and its facts as GitHub Markdown."""
        lines = [f"## {self.title}", "", _row(self.columns), _row(("---",) * len(self.columns))]
        lines += [_row(row) for row in self.rows]
        lines += ["", *(f"* {name}: {_quoted(name, value)}" for name, value in self.facts.items())]
        return "\n".join(lines) + "\n"


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _quoted(name: str, value: str) -> str:
    return f"`{value}`" if name in {"command", "commit"} else value
