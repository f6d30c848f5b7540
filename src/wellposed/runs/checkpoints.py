"""The checkpoints of a run: a folder each, there as a whole or not at all."""

import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError, loads
from pathlib import Path
from secrets import token_hex

from wellposed.errors import RunError
from wellposed.runs.files import write_json

_MANIFEST = "manifest.json"


class Checkpoints:
    """The checkpoints under `folder`, of which the newest `keep` stay; all of them if it is None.

    The newest that was written at the step `spared` or before stays too.
    """

    def __init__(self, folder: Path, keep: int | None = 2) -> None:
        self.folder, self.keep = folder, keep
        self.spared: int | None = None

    def all(self) -> list[Path]:
        """Every checkpoint, the newest first, whether it can be read or not."""
        found = [path for path in self.folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
        return sorted(found, key=step_of, reverse=True)

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """Yield an empty folder to fill; afterwards it is the checkpoint of `step`, after an error it is gone."""
        target = self.folder / f"step-{step:08d}"
        temporary = self.folder / f".{target.name}.{token_hex(4)}.tmp"
        for left in self.folder.glob(".step-*.tmp"):  # by a run that was killed while it wrote
            shutil.rmtree(left, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            files = [path for path in sorted(temporary.rglob("*")) if path.is_file()]
            prints = {path.relative_to(temporary).as_posix(): _fingerprint(path) for path in files}
            write_json(temporary / _MANIFEST, prints)
            shutil.rmtree(target, ignore_errors=True)  # what a run that was taken up before this step left here
            temporary.replace(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for old in [] if self.keep is None else self.all()[self.keep :]:
            if old != self.before(self.spared):
                shutil.rmtree(old, ignore_errors=True)

    def before(self, step: int | None) -> Path | None:
        """The newest checkpoint that was written at `step` or before."""
        return next((path for path in self.all() if step is not None and step_of(path) <= step), None)

    def newest(self) -> tuple[Path, list[str]]:
        """The newest checkpoint that is whole, and what is wrong with each newer one."""
        complaints: list[str] = []
        for path in self.all():
            complaint = _damage(path)
            if complaint is None:
                return path, complaints
            complaints.append(f"{path} {complaint}")
        found = f"; {'; '.join(complaints)}" if complaints else ""
        raise RunError(f"there is no whole checkpoint in {self.folder}{found}. Start again in another --out")


def step_of(checkpoint: Path) -> int:
    """The step after which `checkpoint` was written."""
    return int(checkpoint.name.removeprefix("step-"))


def _fingerprint(path: Path) -> list[int]:
    """Size and CRC-32 of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return [size, checksum]


def _damage(checkpoint: Path) -> str | None:
    try:
        manifest = loads((checkpoint / _MANIFEST).read_text(encoding="utf-8"))
        wrong = [name for name, expected in manifest.items() if _fingerprint(checkpoint / name) != expected]
        if not manifest:
            return f"has an empty {_MANIFEST}"
    except (OSError, JSONDecodeError, UnicodeDecodeError, AttributeError, TypeError) as error:
        return f"cannot be read ({error})"
    return f"is damaged: {', '.join(wrong)} was changed or cut short after it was written" if wrong else None
