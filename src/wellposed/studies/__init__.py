"""The experiments of the papers, each one configuration and one function."""

from typing import TYPE_CHECKING, Any

from wellposed.studies.config import StudyConfig as StudyConfig

if TYPE_CHECKING:
    from wellposed.studies.comparison import StudyResult as StudyResult
    from wellposed.studies.comparison import study as study


def __getattr__(name: str) -> Any:
    if name not in {"StudyResult", "study"}:
        raise AttributeError(f"module 'wellposed.studies' has no attribute {name!r}")
    from wellposed.studies import comparison  # now, and not before: the command line asks for the fields alone

    return getattr(comparison, name)
