"""Atomic writes: a reader sees the old file or the new one, never a part of either."""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wellposed.errors import RunError

_LOCK = ".lock"


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it takes `path`'s place, on any error it is removed.

    The temporary file lies in the same folder, so the final step is one rename on one file system.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.touch()
        permissions = temporary.stat().st_mode
        yield temporary
        temporary.chmod(permissions)  # those that files have here: safetensors makes its own more private
        _flush_to_disk(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def is_free(folder: Path) -> bool:
    """Whether a folder holds nothing, or nothing but the file by which it is locked."""
    return all(found.name == _LOCK for found in folder.iterdir())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder`, which must exist, against other processes; RunError if one of them has it."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with (folder / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(f"another process is at work in {folder}; wait for it, or choose another --out") from error
        yield


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Raise RunError, with advice, where a run cannot be written; safetensors and torch have errors of their own."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise RunError(
            f"cannot write to {folder} ({reason}). Make room, or choose another --out; a run that has begun goes on "
            f"with --resume --out {folder}"
        ) from error


def write_json(path: str | os.PathLike[str], data: Any) -> None:
    """Write `data` as indented JSON, atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _flush_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
