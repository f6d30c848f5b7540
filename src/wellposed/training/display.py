"""What a run shows while it goes on: a live bar in a terminal, a line per epoch everywhere."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Display:
    """Writes to stderr, or nowhere if not `visible`."""

    def __init__(self, *, visible: bool = True) -> None:
        self._console = Console(stderr=True, quiet=not visible, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._bar = TaskID(0)

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(text, markup=False)

    @contextmanager
    def progress(self, steps: int, done: int) -> Iterator[None]:
        """Show a bar of `steps` steps; it is only drawn in a terminal."""
        columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[numbers]}")]
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
        if self._progress is not None:
            numbers = "  ".join(f"{_name(name)} {_number(name, value)}" for name, value in values.items())
            self._progress.update(self._bar, completed=step, description=f"epoch {epoch:.1f}", numbers=numbers)

    def testing(self) -> None:
        """An evaluation begins."""
        if self._progress is not None:
            self._progress.update(self._bar, description="testing")

    def epoch(self, epoch: int, epochs: int, values: dict[str, float], seconds: float) -> None:
        """An epoch is over."""
        numbers = "  ".join(f"{_name(name)} {_number(name, value)}" for name, value in values.items())
        self.say(f"epoch {epoch:{len(str(epochs))}}/{epochs}  test  {numbers}  ({seconds:.0f} s)")


def _name(name: str) -> str:
    return {"images_per_second": "images/s", "grad_norm": "gradient"}.get(name, name)


def _number(name: str, value: float) -> str:
    if name == "accuracy":
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if name == "images_per_second" else f"{value:.3f}"
