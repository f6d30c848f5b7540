"""wellposed study: the main result in one command."""

from collections.abc import Callable, Sequence

from wellposed.cli.runs_named import values_of
from wellposed.studies import StudyConfig
from wellposed.studies.adapter_config import AdapterStudy
from wellposed.studies.compression_config import CompressionStudy


def command(argv: Sequence[str]) -> Callable[..., None]:
    """The command; with `--ablation adapters` or `compression` in `argv`, the one that has the flags of these."""
    named = [own for own in values_of(argv, "--ablation") if own in _OWN_FLAGS]
    return _OWN_FLAGS[named[-1]] if named else study


def study(config: StudyConfig) -> None:
    """Train one ViT with skips, without, and without but conditioned, or as --ablation says; print and write the table.

    Args:
        config: what to compare.
    """
    from rich.console import Console
    from rich.table import Table

    from wellposed.studies import study as run
    from wellposed.studies.words import TITLES

    result = run(config)
    headings = ("test accuracy, %", *(TITLES[optimizer] for optimizer in config.optimizers))
    table = Table(*headings, title=f"{config.model} on {config.data.partition(':')[0]}")
    for row in result.rows():
        table.add_row(*row)
    Console().print(table)
    print(f"The page: {result.report}")


def _adapters(config: AdapterStudy) -> None:
    """Fine-tune one model by LoRA, its kin and sine adapters of several ranks; print and write the table.

    Args:
        config: what to compare.
    """
    from wellposed.reporting import text_table
    from wellposed.studies.adapters import study_adapters

    result = study_adapters(config)
    print(text_table(result.columns(), result.rows(brief=True)))
    print(f"The page: {result.report}")


def _compression(config: CompressionStudy) -> None:
    """Quantize the adapters of a study of adapters, test every copy, and print what that saves.

    Args:
        config: what to compare.
    """
    from wellposed.reporting import text_table
    from wellposed.studies.compression import study_compression
    from wellposed.studies.compression_result import COLUMNS

    result = study_compression(config)
    print(text_table(COLUMNS, result.rows(brief=True)))
    print(text_table(result.rate_columns(), result.rates()))
    print(f"The page: {result.report}")


_OWN_FLAGS: dict[str, Callable[..., None]] = {"adapters": _adapters, "compression": _compression}
