"""A measured table, as the terminal shows it and as results/ keeps it."""

from dataclasses import dataclass

from wellposed.reporting import markdown_table


@dataclass(frozen=True)
class Table:
    """Rows of text with a title and the facts needed to measure them again."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    facts: dict[str, str]

    def markdown(self) -> str:
        """The table and its facts as GitHub Markdown."""
        return f"## {self.title}\n\n" + markdown_table(self.columns, self.rows, self.facts)
