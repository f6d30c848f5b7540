"""wellposed study: the main result in one command."""

from wellposed.studies import StudyConfig


def study(config: StudyConfig) -> None:
    """Train one ViT with skips, without, and without but conditioned; print the table and write the page.

    Args:
        config: what to compare.
    """
    from rich.console import Console
    from rich.table import Table

    from wellposed.studies import study as run

    result = run(config)
    table = Table("test accuracy, %", "AdamW", "SOAP", title=f"{config.model} on {config.data.partition(':')[0]}")
    for row in result.rows():
        table.add_row(*row)
    Console().print(table)
    print(f"The page: {result.report}")
