"""wellposed bench: the measured comparisons with peers."""

from pathlib import Path

from tyro.extras import SubcommandApp

from wellposed.bench import ConditionBench
from wellposed.bench.table import Table

app = SubcommandApp()


@app.command
def condition(config: ConditionBench, out: Path | None = None) -> None:
    """Time wellposed.condition_ against one full SVD per head and per W_V, W_O pair.

    Args:
        config: what to measure.
        out: also append the table to this Markdown file.
    """
    _show(config.run(), out)


def _show(table: Table, out: Path | None) -> None:
    print(table.markdown())
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write("\n" + table.markdown())
