"""wellposed study: the main result in one command."""

from wellposed.studies import StudyConfig


def study(config: StudyConfig) -> None:
    """Train one ViT with skips, without, and without but conditioned, or as --ablation says; print and write the table.

    Args:
        config: what to compare.
    """
    from rich.console import Console
    from rich.table import Table

    from wellposed.studies import study as run
    from wellposed.studies.config import TITLES

    result = run(config)
    headings = ("test accuracy, %", *(TITLES[optimizer] for optimizer in config.optimizers))
    table = Table(*headings, title=f"{config.model} on {config.data.partition(':')[0]}")
    for row in result.rows():
        table.add_row(*row)
    Console().print(table)
    print(f"The page: {result.report}")
