"""What a run reports along the way: one JSON line per event, and the same numbers as TensorBoard curves."""

import json
import time
from os import SEEK_END
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from wellposed.errors import RunError


class Journal:
    """The metrics of the run in `folder`, written as they come.

    Args:
        folder: of the run; `metrics.jsonl` and `tensorboard/` are made in it.
        length: bytes of `metrics.jsonl` to keep; what a run that is taken up again wrote after its checkpoint goes.
        step: the step of that checkpoint; None for a new run.
    """

    def __init__(self, folder: Path, *, length: int = 0, step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._file: IO[bytes] = (folder / "metrics.jsonl").open("ab")
        self._file.truncate(min(length, self._file.tell()))
        self._file.seek(0, SEEK_END)
        curves = folder / "tensorboard"
        # TensorBoard reads files by their names, which begin with the second: two of one second may change places.
        if any(curves.glob(f"events.out.tfevents.{int(time.time())}.*")):
            time.sleep(1 - time.time() % 1)
        self._curves = SummaryWriter(str(curves), purge_step=None if step is None else step + 1)

    def write(self, event: str, step: int, **values: Any) -> None:
        """Add an event; its numbers become points of curves named event/name."""
        line = json.dumps({"event": event, "step": step, **values})
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        for name, value in values.items():
            if isinstance(value, int | float):
                self._curves.add_scalar(f"{event}/{name}", value, step)

    def length(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._file.close()
            self._curves.close()
        except OSError as problem:
            if error is None:  # otherwise the disk that is full has been reported
                raise RunError(f"cannot write {self._file.name} to its end: {problem}") from problem


def read_journal(folder: Path, event: str | None = None) -> list[dict[str, Any]]:
    """The events of the run in `folder`, or those of one kind."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    return [found for found in events if event is None or found["event"] == event]
