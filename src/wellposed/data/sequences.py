"""Sets of token sequences in the form of image sets, a sequence as an image of one row, so that all loaders fit.

Shapes: N sequences of L tokens.
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from wellposed.data.images import ImageSet
from wellposed.data.listops import make_listops
from wellposed.data.loader import DeviceLoader
from wellposed.errors import DataError, InvalidArgumentError

BYTES = 256
TESTED = 10
"""One in so many pieces of a text is tested on."""


class TokenLoader(DeviceLoader):
    """Batches of token numbers, (N, L) int64, and their targets, as they are in the set."""

    def _finished(self, images_NCHW: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return images_NCHW.flatten(1).long(), labels


def listops_set(count: int, length: int, seed: int) -> ImageSet:
    """`count` expressions of ListOps of `length` / 4 to `length` tokens, padded with 0; their values are the labels."""
    drawn = make_listops(count, min_length=max(1, length // 4), max_length=length, seed=seed)
    tokens = torch.nn.functional.pad(drawn.tokens, (0, length - drawn.tokens.shape[1]))
    return ImageSet("listops", tuple(map(str, range(10))), tokens[:, None, None], drawn.labels)


def text_set(path: Path | None, length: int, split: str) -> ImageSet:
    """The bytes of a text in pieces of `length`; the label of each byte is the one that follows it, (N, L).

    Args:
        path: a file, or a folder whose *.txt files are read; the modules of Python's standard library if None, which
            are there wherever this runs, and the same for the same version of Python.
        length: bytes in a piece.
        split: "test" for every tenth piece, "train" for the others.
    """
    if split not in {"train", "test"}:
        raise InvalidArgumentError(f"split={split!r}: expected 'train' or 'test'")
    text = _bytes(path)
    count = (len(text) - 1) // length
    if count < TESTED:
        raise DataError(f"{path or 'the text'} has {len(text)} bytes: expected at least {TESTED} pieces of {length}")
    starts = torch.arange(count) * length
    chosen = torch.arange(count) % TESTED == TESTED - 1
    starts = starts[chosen if split == "test" else ~chosen]
    pieces = text[starts[:, None] + torch.arange(length + 1)]
    return ImageSet("text", tuple(map(str, range(BYTES))), pieces[:, None, None, :-1], pieces[:, 1:].long())


def _bytes(path: Path | None) -> Tensor:
    folder = Path(sysconfig.get_path("stdlib")) if path is None else path
    files = sorted(folder.glob("*.py" if path is None else "*.txt")) if folder.is_dir() else [folder]
    try:
        read = b"\n".join(file.read_bytes() for file in files)
    except OSError as error:
        raise DataError(
            f"text={folder} cannot be read ({error}); expected a file, or a folder of .txt files"
        ) from error
    return torch.frombuffer(bytearray(read or b"\n"), dtype=torch.uint8)
