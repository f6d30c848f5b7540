"""What a run shows while it goes on: a live bar in a terminal, a line per epoch everywhere."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column


class Display:
    """Writes to stderr, or nowhere if not `visible`."""

    def __init__(self, *, visible: bool = True) -> None:
        self._console = Console(stderr=True, quiet=not visible, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._bar = TaskID(0)
        self._latest = ""

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(text, markup=False)

    @contextmanager
    def progress(self, steps: int, done: int) -> Iterator[None]:
        """Show a bar of `steps` steps; it is only drawn in a terminal."""
        what = TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=len("epoch 100.0")))
        columns = [what, BarColumn(), TextColumn("{task.fields[numbers]}")]
        hidden = not self._console.is_terminal
        with Progress(
            *columns, TimeRemainingColumn(), console=self._console, transient=True, disable=hidden
        ) as self._progress:
            self._bar = self._progress.add_task("starting", total=steps, completed=done, numbers="")
            try:
                yield
            finally:
                self._progress.remove_task(self._bar)
        self._progress = None

    def advance(self, step: int, epoch: float, values: dict[str, float]) -> None:
        """The run has done `step` steps, and these are its latest numbers."""
        self._latest = _listed(values)
        if self._progress is not None:
            self._progress.update(self._bar, completed=step, description=f"epoch {epoch:.1f}", numbers=self._latest)

    def testing(self) -> None:
        """An evaluation begins."""
        if self._progress is not None:
            self._progress.update(self._bar, description="testing")

    def epoch(self, epoch: int, epochs: int, values: dict[str, float], seconds: float) -> None:
        """An epoch is over."""
        tested = f"  test  {_listed(values)}" if values else ""
        self.say(f"epoch {epoch:{len(str(epochs))}}/{epochs}  {self._latest}{tested}  ({seconds:.0f} s)")


_NAMES = {
    "images_per_second": "images/s",
    "rows_per_second": "rows/s",
    "grad_norm": "gradient",
    "knn": "k-NN",
    "entropy": "entropy/log K",
}


def _listed(values: dict[str, float]) -> str:
    return "  ".join(f"{_NAMES.get(name, name)} {_number(name, value)}" for name, value in values.items())


def _number(name: str, value: float) -> str:
    if name in {"accuracy", "knn"}:
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if name.endswith("_per_second") or value >= 100 else f"{value:.3f}"
