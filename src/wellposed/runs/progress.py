"""A progress bar for what takes more than a few seconds."""

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def tracked(work: Sequence[Item], description: str) -> Iterable[Item]:
    """The items of `work`, with a bar on the terminal that shows how many are done; none where there is no terminal."""
    if not sys.stderr.isatty():
        return work
    from rich.console import Console
    from rich.progress import track

    return track(work, description=description, console=Console(stderr=True), transient=True)
