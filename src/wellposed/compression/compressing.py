"""`wellposed.compress` and its way back: an adapter folder in k bits (arXiv 2505.21895)."""

import os
import re
from dataclasses import asdict, dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch
from torch import Tensor

from wellposed.compression.allocation import Quantizer, bits_for_error, bits_for_size
from wellposed.compression.files import PACKED, encoded_header, read_packed
from wellposed.compression.folders import (
    PlainAdapter,
    check_config,
    check_free,
    new_folder,
    read_plain,
    write_packed_folder,
    write_plain,
)
from wellposed.compression.packed import PackedAdapter, PackedTensor, packed_tensor, rows_of
from wellposed.compression.quantizers import Scheme, check_bits, quantize
from wellposed.compression.updates import Layer, as_matrix, damage, layers_of, relative_error, update_error
from wellposed.errors import InvalidArgumentError
from wellposed.reporting import text_table
from wellposed.runs import device_named, tracked

Per = Literal["tensor", "row"]
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SPARE = 512
"""Bytes that safetensors' own header and the alignment of its data take at most."""


@dataclass(frozen=True)
class LayerErrors:
    """What became of one layer."""

    name: str
    rank: int
    bits_a: int
    bits_b: int
    error_a: float
    """||Q(A) - A||_F / ||A||_F."""
    error_b: float
    error: float
    """The same of dW = s B A or s sin(omega B A)."""
    stable_rank: float
    """Of dW."""
    quantized_stable_rank: float


@dataclass(frozen=True)
class Compression:
    """What `compress` wrote, and what it did to the adapter; print it, or take it as a dict."""

    folder: Path
    original_size: int
    """Bytes of the tensors that were read."""
    size: int
    """Bytes of the packed file."""
    layers: tuple[LayerErrors, ...]

    @property
    def error(self) -> float:
        """The mean of the layers' errors of dW."""
        return sum(layer.error for layer in self.layers) / len(self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self) | {"folder": str(self.folder), "error": self.error}

    def __str__(self) -> str:
        columns = ["layer", "r", "bits A", "bits B", "error A", "error B", "error dW", "stable rank dW", "after"]
        rows = [
            [
                *(layer.name, f"{layer.rank}", f"{layer.bits_a}", f"{layer.bits_b}"),
                *(f"{error:.4f}" for error in (layer.error_a, layer.error_b, layer.error)),
                *(f"{layer.stable_rank:.2f}", f"{layer.quantized_stable_rank:.2f}"),
            ]
            for layer in self.layers
        ]
        ratio = self.original_size / self.size
        return (
            f"{text_table(columns, rows)}\n\n{self.original_size:,} -> {self.size:,} bytes ({ratio:.1f} times "
            f"smaller), mean error of dW {self.error:.4f}: {self.folder}"
        )


@torch.no_grad()
def compress(
    adapter: str | os.PathLike[str],
    bits: int | None = None,
    scheme: Scheme = "kmeans",
    *,
    out: str | os.PathLike[str],
    per: Per = "tensor",
    budget: int | str | None = None,
    max_error: float | None = None,
    device: str = "auto",
) -> Compression:
    """Write a PEFT adapter with its factors in `bits` bits per number into a new folder, and say what that does to it.

    A and B are quantized, not their product; omega and the gain stay, and the sine is taken of what the codes stand
    for: dW = s sin(omega Q(B) Q(A)). DoRA's magnitudes are kept in 16 bits, all other tensors as they are. The folder
    that is read is not touched.

    Args:
        adapter: a folder of PEFT's with a LoRA, DoRA, rsLoRA or sine adapter.
        bits: 1 to 8, the same for all factors; give this, `budget` or `max_error`.
        scheme: how the 2^bits values are chosen: "kmeans", "uniform", "normal" or "stretched".
        out: the new folder. It appears when it is whole.
        per: one codebook per "tensor", or per "row": for each of the r rows of A and columns of B.
        budget: largest size of the file, in bytes or as "2MB", "500 KiB". Each factor gets the bits that lower the
            errors of dW most for it.
        max_error: largest relative error of dW that a layer may have. Each factor gets the bits that this takes.
        device: where the work is done; "auto" is a GPU where there is one.

    Raises:
        ModelFileError: `adapter` is no such folder, or holds NaN.
        InvalidArgumentError: anything else out of range, or `out` is taken.
    """
    _check_one_goal(bits, budget, max_error)
    if per not in ("tensor", "row"):
        raise InvalidArgumentError(f"per={per!r}: expected 'tensor' or 'row'")
    check_free(Path(out))
    most_bytes = None if budget is None else bytes_of(budget)
    place = device_named(device)
    plain = read_plain(Path(adapter))
    size = sum(tensor.nbytes for tensor in plain.tensors.values())
    layers, factors, others, quantizer = _opened(plain, scheme, per, place)
    if bits is not None:
        chosen = dict.fromkeys(factors, bits)
    elif max_error is not None:
        chosen = bits_for_error(layers, quantizer, max_error)
    else:
        # A header with all the names and some bits for each: that of other bits differs from it by a few bytes.
        some = {key: quantizer(key, 1 + i % 2) for i, key in enumerate(factors)}
        header = len(encoded_header(PackedAdapter(plain.config, scheme, some, others)))
        fixed = sum(tensor.nbytes for tensor in others.values()) + header + 2 * len(factors) + _SPARE
        chosen = bits_for_size(layers, quantizer, (most_bytes or 0) - fixed)
    found = {key: quantizer(key, count) for key, count in chosen.items()}
    whole = PackedAdapter(plain.config, scheme, found, others)
    errors = tuple(_errors(layer, whole) for layer in tracked(layers, "measuring"))
    with new_folder(out) as folder:
        write_packed_folder(whole, folder)
        packed_size = (folder / PACKED).stat().st_size
    return Compression(Path(out), size, packed_size, errors)


@torch.no_grad()
def packed_copy(
    plain: PlainAdapter, bits: int, scheme: Scheme, per: Per, device: torch.device
) -> tuple[PackedAdapter, float]:
    """What `compress` would write, on `device`, and the mean error of dW; no file, and no stable ranks."""
    layers, factors, others, quantizer = _opened(plain, scheme, per, device)
    whole = PackedAdapter(plain.config, scheme, {key: quantizer(key, bits) for key in factors}, others)
    return whole, mean(update_error(layer, *_matrices(layer, whole)) for layer in layers)


@torch.no_grad()
def expand(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Write the packed adapter in `folder` as an ordinary PEFT folder, with the values that its codes stand for."""
    check_free(Path(out))
    adapter = read_packed(Path(folder))
    check_config(adapter.config, Path(folder))
    with new_folder(out) as temporary:
        write_plain(adapter, temporary)
    return Path(out)


def bytes_of(size: int | str) -> int:
    """A number of bytes, also as "2MB" or "1.5 MiB".

    Example:
        >>> bytes_of("2MB"), bytes_of("1.5 KiB"), bytes_of(3)
        (2000000, 1536, 3)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if match is None or match[2].upper() not in _UNITS or isinstance(size, bool) or float(match[1]) <= 0:
        raise InvalidArgumentError(
            f"budget={size!r}: expected bytes above 0, such as 500000, '500KB', '2MB' or '1.5 MiB'"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _check_one_goal(bits: Any, budget: Any, max_error: Any) -> None:
    given = [
        name for name, value in (("bits", bits), ("budget", budget), ("max_error", max_error)) if value is not None
    ]
    if len(given) != 1:
        raise InvalidArgumentError(
            f"{' and '.join(given) or 'nothing'} given: expected one of bits, budget and max_error"
        )
    if bits is not None:
        check_bits(bits)
    known = isinstance(max_error, int | float) and not isinstance(max_error, bool)
    if max_error is not None and (not known or not isfinite(max_error) or max_error <= 0):
        raise InvalidArgumentError(f"max_error={max_error!r}: expected a number above 0")


def _opened(
    plain: PlainAdapter, scheme: Scheme, per: Per, device: torch.device
) -> tuple[list[Layer], dict[str, Tensor], dict[str, Tensor], Quantizer]:
    """Its layers and factors on `device`, the other tensors as they are kept, and what packs a factor."""
    layers = [_on(layer, device) for layer in layers_of(plain)]
    by_column = {key: key == layer.b_key for layer in layers for key in (layer.a_key, layer.b_key)}
    factors = {key: plain.tensors[key].to(device) for key in by_column}
    others = {key: _kept(key, tensor) for key, tensor in plain.tensors.items() if key not in factors}
    return layers, factors, others, _quantizer(factors, by_column, scheme, per)


def _quantizer(factors: dict[str, Tensor], by_column: dict[str, bool], scheme: Scheme, per: Per) -> Quantizer:
    """What packs a factor; all factors are quantized together when a number of bits is first asked for."""
    rows = {key: rows_of(tensor, by_column[key], per == "row") for key, tensor in factors.items()}

    @cache
    def all_of(bits: int) -> dict[str, PackedTensor]:
        found = quantize(list(rows.values()), bits, scheme)
        return {key: packed_tensor(factors[key], each, by_column[key]) for key, each in zip(rows, found, strict=True)}

    return lambda key, bits: all_of(bits)[key]


def _errors(layer: Layer, whole: PackedAdapter) -> LayerErrors:
    packed_a, packed_b = whole.factors[layer.a_key], whole.factors[layer.b_key]
    a, b = _matrices(layer, whole)
    update = damage(layer, a, b)
    return LayerErrors(
        name=layer.name,
        rank=len(layer.a),
        bits_a=packed_a.bits,
        bits_b=packed_b.bits,
        error_a=relative_error(layer.a, a),
        error_b=relative_error(layer.b, b),
        error=update.error,
        stable_rank=update.stable_rank,
        quantized_stable_rank=update.quantized_stable_rank,
    )


def _matrices(layer: Layer, whole: PackedAdapter) -> tuple[Tensor, Tensor]:
    a, b = (as_matrix(whole.factors[key].values()) for key in (layer.a_key, layer.b_key))
    return a, b


def _on(layer: Layer, device: torch.device) -> Layer:
    return Layer(layer.name, layer.a_key, layer.b_key, layer.a.to(device), layer.b.to(device), layer.omega)


def _kept(key: str, tensor: Tensor) -> Tensor:
    """DoRA's magnitudes in 16 bits, unless these cannot hold them; anything else as it is."""
    if ".lora_magnitude" not in key or not tensor.is_floating_point():
        return tensor
    halves = tensor.half()
    return halves if torch.allclose(halves.double(), tensor.double(), rtol=2**-10, atol=0) else tensor
