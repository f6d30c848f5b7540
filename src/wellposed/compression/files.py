"""The file of a packed adapter: all codes in one blob, all codebooks in another, what they mean in its metadata.

Nobody needs to trust such a file: nothing in it is executed, every length is checked against what there is before
anything of that length is made, and a checksum over all of it finds what damage the rest would not.
"""

import base64
import binascii
import hashlib
import json
import zlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from wellposed.compression.bits import packed_length
from wellposed.compression.packed import PackedAdapter, PackedTensor
from wellposed.compression.quantizers import MOST_BITS
from wellposed.errors import ModelFileError

PACKED = "adapter_packed.safetensors"
FORMAT_VERSION = "1"
_METADATA = "wellposed_packed_adapter"
"""The metadata's only key; its value is version, checksum and header. The order of several would be random."""
_BLOBS = {"codes": torch.uint8, "codebooks": torch.float16, "others": torch.uint8}
_LONGEST_HEADER = 2**24
"""Bytes, once it is inflated."""
_FLOATS = {
    str(each).removeprefix("torch."): each for each in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
_DTYPES = _FLOATS | {
    str(each).removeprefix("torch."): each for each in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
}


def write_packed(adapter: PackedAdapter, path: Path) -> None:
    """Write the file; not atomically, see `wellposed.compression.folders.new_folder`."""
    factors = [packed.to("cpu") for packed in adapter.factors.values()]
    blobs = {
        "codes": _joined([packed.codes for packed in factors], torch.uint8),
        "codebooks": _joined([packed.codebooks for packed in factors], torch.float16),
        "others": _joined([_as_bytes(tensor.cpu()) for tensor in adapter.others.values()], torch.uint8),
    }
    header = encoded_header(adapter)
    metadata = {_METADATA: f"{FORMAT_VERSION} {_checksum(header, blobs)} {header}"}
    save_file(blobs, str(path), metadata=metadata)


def encoded_header(adapter: PackedAdapter) -> str:
    """The metadata's larger part: JSON, deflated because it has the name of every tensor, in base 64."""
    header = {
        "config": adapter.config,
        "scheme": adapter.scheme,
        "factors": [
            [name, each.shape, _name(each.dtype), each.bits, len(each.codebooks), each.by_column, each.exponent]
            for name, each in adapter.factors.items()
        ],
        "others": [[name, tuple(each.shape), _name(each.dtype)] for name, each in adapter.others.items()],
    }
    return base64.b64encode(zlib.compress(json.dumps(header, separators=(",", ":")).encode(), 9)).decode()


def read_packed(path: Path) -> PackedAdapter:
    """The adapter in a file, or in a folder that has one.

    Raises:
        ModelFileError: it is missing, cut short, damaged, of a newer version, or holds something else than it says.
    """
    path = path / PACKED if path.is_dir() else path
    if not path.is_file():
        raise ModelFileError(
            f"{path.parent} is no packed adapter: it has no {path.name}, which `wellposed compress` writes"
        )
    try:
        with safe_open(path, framework="pt") as file:
            checksum, header = _known_version(dict(file.metadata() or {}).get(_METADATA), path)
            names = set(file.keys())
            if names != set(_BLOBS):
                raise _damaged(path, f"it holds {', '.join(sorted(names))[:80]}")
            # Copies: what safetensors gives is the file itself, and who cuts that short would end this process.
            blobs = {name: file.get_tensor(name).clone() for name in _BLOBS}
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{path} is not a whole safetensors file ({error}); copy it again") from error
    for name, dtype in _BLOBS.items():
        if blobs[name].dtype != dtype or blobs[name].ndim != 1:
            raise _damaged(path, f"its {name} are {blobs[name].dtype} of shape {tuple(blobs[name].shape)}")
    if checksum != _checksum(header, blobs):
        raise _damaged(path, "its checksum is another one")
    try:
        return _adapter(_decoded_header(header), blobs)
    except _LyingError as error:
        raise _damaged(path, str(error)) from None


def _known_version(metadata: str | None, path: Path) -> tuple[str, str]:
    """Checksum and header."""
    if metadata is None:
        raise ModelFileError(f"{path} is no packed adapter; expected a file that `wellposed compress` wrote")
    version, *rest = metadata.split(" ")
    if version != FORMAT_VERSION:
        raise ModelFileError(
            f"{path} has version {version[:20]!r} of the packed format, expected {FORMAT_VERSION!r}. If a newer "
            "wellposed wrote it, upgrade."
        )
    if len(rest) != 2:
        raise _damaged(path, "its metadata are cut short")
    return rest[0], rest[1]


class _LyingError(Exception):
    """What is wrong with a header."""


def _decoded_header(text: str) -> dict[str, Any]:
    try:
        inflating = zlib.decompressobj()
        data = inflating.decompress(base64.b64decode(text, validate=True), _LONGEST_HEADER)
        if not inflating.eof:
            raise _LyingError(f"its header is cut short, or longer than {_LONGEST_HEADER} bytes")
        header = json.loads(data)
    except (binascii.Error, zlib.error, ValueError, RecursionError) as error:
        raise _LyingError(f"its header cannot be read: {str(error)[:80]}") from error
    kinds = {"config": dict, "scheme": str, "factors": list, "others": list}
    if not isinstance(header, dict) or any(not isinstance(header.get(name), kind) for name, kind in kinds.items()):
        raise _LyingError(f"its header lacks one of {', '.join(kinds)}")
    return header


def _adapter(header: dict[str, Any], blobs: dict[str, Tensor]) -> PackedAdapter:
    codes, codebooks, others = (_Blob(name, blobs[name]) for name in _BLOBS)
    factors, rest = {}, {}
    for entry in header["factors"]:
        name, shape, dtype, more = _named(entry, 7, _FLOATS)
        bits, count, by_column, exponent = more
        numel = prod(shape)
        in_range = _whole(bits, 1, MOST_BITS) and _whole(count, 1, numel) and _whole(exponent, -126, 127)
        if not in_range or not isinstance(by_column, bool) or numel % count:
            raise _LyingError(f"{name} of {numel} numbers has bits, codebooks, by_column, exponent {str(more)[:80]}")
        if by_column and (len(shape) < 2 or shape[1] != count or numel != shape[0] * count):
            raise _LyingError(f"{name} of shape {shape} has {count} columns")
        packed = PackedTensor(
            shape=shape,
            dtype=dtype,
            bits=bits,
            exponent=exponent,
            by_column=by_column,
            codes=codes.take(packed_length(numel, bits)),
            codebooks=codebooks.take(count * 2**bits).view(count, -1),
        )
        if not torch.ldexp(packed.codebooks.float(), torch.tensor(exponent)).to(dtype).isfinite().all():
            raise _LyingError(f"{name} has values that are no finite numbers")
        factors[name] = packed
    for entry in header["others"]:
        name, shape, dtype, _ = _named(entry, 3, _DTYPES)
        rest[name] = others.take(prod(shape) * dtype.itemsize).clone().view(dtype).view(shape)
    for blob in (codes, codebooks, others):
        blob.check_end()
    if len(factors | rest) < len(header["factors"]) + len(header["others"]):
        raise _LyingError("two of its tensors have one name")
    return PackedAdapter(header["config"], header["scheme"], factors, rest)


def _named(entry: Any, length: int, dtypes: dict[str, torch.dtype]) -> tuple[str, tuple[int, ...], torch.dtype, Any]:
    """Name, shape, dtype and what else an entry has."""
    if not isinstance(entry, list) or len(entry) != length or not isinstance(entry[0], str):
        raise _LyingError(f"its header has an entry {str(entry)[:80]}")
    name, shape, dtype, *more = entry
    if not isinstance(shape, list) or len(shape) > 8 or not all(_whole(side, 1, 2**40) for side in shape):
        raise _LyingError(f"{name[:80]} has shape {str(shape)[:80]}")
    if not isinstance(dtype, str) or dtype not in dtypes:
        raise _LyingError(f"{name[:80]} is of {str(dtype)[:80]}")
    return name, tuple(shape), dtypes[dtype], more


def _whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


class _Blob:
    """A tensor from whose start pieces are taken, until it is used up."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self.tensor, self.taken = name, tensor, 0

    def take(self, count: int) -> Tensor:
        if count > len(self.tensor) - self.taken:
            raise _LyingError(f"its shapes need more {self.name} than the {len(self.tensor)} that it has")
        self.taken += count
        return self.tensor[self.taken - count : self.taken]

    def check_end(self) -> None:
        if self.taken < len(self.tensor):
            raise _LyingError(f"its shapes need {self.taken} {self.name}, and it has {len(self.tensor)}")


def _checksum(header: str, blobs: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(header.encode())
    for part in _parts(blobs):
        digest.update(part)
    return digest.hexdigest()


def _parts(blobs: dict[str, Tensor]) -> Iterator[Any]:
    """Length and bytes of each blob."""
    for name in _BLOBS:
        yield len(blobs[name]).to_bytes(8, "little")
        yield _as_bytes(blobs[name]).numpy()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _joined(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors]) if tensors else torch.empty(0, dtype=dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _damaged(path: Path, why: str) -> ModelFileError:
    return ModelFileError(f"{path} is damaged: {why}. Copy it again, or compress the adapter again.")
