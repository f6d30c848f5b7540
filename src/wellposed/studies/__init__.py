"""The experiments of the papers, each one configuration and one function."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wellposed.studies.adapter_config import AdapterStudy as AdapterStudy
from wellposed.studies.config import StudyConfig as StudyConfig

if TYPE_CHECKING:
    from wellposed.studies.adapter_result import AdapterResult as AdapterResult
    from wellposed.studies.adapters import study_adapters as study_adapters
    from wellposed.studies.comparison import StudyResult as StudyResult
    from wellposed.studies.comparison import study as study

_HOMES = {
    "AdapterResult": "adapter_result",
    "StudyResult": "comparison",
    "study": "comparison",
    "study_adapters": "adapters",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'wellposed.studies' has no attribute {name!r}")
    # now, and not before: the command line asks for the fields alone
    return getattr(import_module(f"wellposed.studies.{_HOMES[name]}"), name)
