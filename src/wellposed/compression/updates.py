"""The update that two factors make, dW = B A or sin(omega B A), and what quantizing them does to it.

The scale in front of dW is left out: relative errors and stable ranks do not know it. Of DoRA it is the update of the
direction, before the norms, for which one would need the base model.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from wellposed.compression.folders import SINE_LORA, PlainAdapter
from wellposed.errors import ModelFileError
from wellposed.lowrank import sine_delta
from wellposed.spectrum import product_singular_values

_ENDS = ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B"))
_ENTRIES = 2**22
"""Of dW that are worked on at a time, and that are looked at where not all are."""
_ROUNDS = 16


@dataclass(frozen=True)
class Layer:
    """One adapted layer: the names of its factors in the file, the factors as matrices, and its sine's frequency."""

    name: str
    a_key: str
    b_key: str
    a: Tensor
    """(r, in), in float32 at least."""
    b: Tensor
    """(out, r)."""
    omega: float | None


@dataclass(frozen=True)
class Damage:
    """What quantization does to an update."""

    error: float
    """||dW' - dW||_F / ||dW||_F."""
    stable_rank: float
    quantized_stable_rank: float


def layers_of(adapter: PlainAdapter) -> list[Layer]:
    """Every layer that the adapter has factors for.

    Raises:
        ModelFileError: there are none, or they do not fit each other.
    """
    found = []
    for a_key in adapter.tensors:
        for a_end, b_end in _ENDS:
            if a_key.endswith(a_end):
                found.append(_layer(adapter, a_key, a_key.removesuffix(a_end), b_end))
    paired = {key for layer in found for key in (layer.a_key, layer.b_key)}
    alone = [key for key in adapter.tensors if key.endswith(sum(_ENDS, ())) and key not in paired]
    if not found or alone:
        what = f"{alone[0]} without its partner" if alone else "no factors (lora_A, lora_B)"
        raise ModelFileError(f"the adapter has {what}; expected what PEFT's save_pretrained writes")
    return found


def damage(layer: Layer, quantized_a: Tensor, quantized_b: Tensor) -> Damage:
    """What becomes of a layer's update with these factors, measured on all of it."""
    if layer.omega is None:
        ranks = _low_rank_stable_rank(layer.a, layer.b), _low_rank_stable_rank(quantized_a, quantized_b)
        return Damage(update_error(layer, quantized_a, quantized_b), *ranks)
    before, after = (sine_delta(a, b, layer.omega, 1.0) for a, b in ((layer.a, layer.b), (quantized_a, quantized_b)))
    whole, ranks = float(before.norm()), (_stable_rank(before, layer.a), _stable_rank(after, quantized_a))
    return Damage(float(after.sub_(before).norm()) / whole if whole > 0 else 0.0, *ranks)


def update_error(layer: Layer, quantized_a: Tensor, quantized_b: Tensor, sampled: bool = False) -> float:
    """||dW' - dW||_F / ||dW||_F; 0 where there is no update. With `sampled`, of a large sine on some rows only."""
    if layer.omega is None:
        # With C = [B, -B'] and R = [A; A'], ||C R||^2 = tr(C^T C R R^T), in matrices of the rank's size.
        left = torch.cat([layer.b, -quantized_b.to(layer.b)], 1).double()
        right = torch.cat([layer.a, quantized_a.to(layer.a)]).double()
        changed, whole = (
            float((c.T @ c * (r @ r.T)).sum()) for c, r in ((left, right), (layer.b.double(), layer.a.double()))
        )
    else:
        changed = whole = 0.0
        b, chosen_b = layer.b, quantized_b
        if sampled and len(b) * layer.a.shape[1] > _ENTRIES:
            step = -(-len(b) * layer.a.shape[1] // _ENTRIES)
            b, chosen_b = b[::step], chosen_b[::step]
        for rows in _rows(len(b), layer.a.shape[1]):
            delta = sine_delta(layer.a, b[rows], layer.omega, 1.0)
            whole += float(delta.square().sum())
            changed += float((sine_delta(quantized_a, chosen_b[rows], layer.omega, 1.0) - delta).square().sum())
    return sqrt(max(changed, 0.0) / whole) if whole > 0 else 0.0


def relative_error(tensor: Tensor, quantized: Tensor) -> float:
    """||Q - X||_F / ||X||_F; 0 where X is 0."""
    whole = float(tensor.norm())
    return float((quantized.to(tensor) - tensor).norm()) / whole if whole > 0 else 0.0


def as_matrix(tensor: Tensor) -> Tensor:
    """A factor, a convolution's too, as a matrix in float32 at least."""
    return tensor.flatten(1).to(torch.promote_types(tensor.dtype, torch.float32))


def _layer(adapter: PlainAdapter, a_key: str, stem: str, b_end: str) -> Layer:
    b_key = stem + b_end
    b, a = adapter.tensors.get(b_key), adapter.tensors[a_key]
    if b is None or a.ndim < 2 or b.ndim < 2 or not a.is_floating_point() or not b.is_floating_point():
        raise ModelFileError(
            f"{a_key} has no {b_key}, or they are no matrices; expected what PEFT's save_pretrained writes"
        )
    a, b = as_matrix(a), as_matrix(b)
    if len(a) != b.shape[1] or 0 in (*a.shape, *b.shape):
        raise ModelFileError(
            f"{stem}: factors {tuple(a.shape)} and {tuple(b.shape)} have no product; save the adapter again"
        )
    name = stem.removeprefix("base_model.model.")
    return Layer(name, a_key, b_key, a, b, _omega(adapter.config, name, a, embedding="embedding" in b_end))


def _omega(config: dict[str, Any], name: str, a: Tensor, embedding: bool) -> float | None:
    if config["peft_type"] != SINE_LORA:
        return None
    pattern = config.get("omega_pattern")
    given = pattern.get(name) if isinstance(pattern, dict) else None
    if isinstance(given, int | float):
        return float(given)
    from wellposed.adapters import SineLoraConfig  # a layer that is tied to another, or a folder from other hands

    fields = {key: config[key] for key in ("omega", "omega_pattern", "init_lora_weights") if key in config}
    resolving = SineLoraConfig(**fields)
    gaussian = config.get("init_lora_weights") == "gaussian"
    std = 1.0 if embedding else 1 / len(a) if gaussian else 1 / sqrt(3 * a.shape[1])
    return resolving.resolve_omega(name, len(a), std)


def _stable_rank(delta: Tensor, a: Tensor) -> float:
    """||dW||_F^2 / ||dW||_2^2, the norm below by subspace iteration that starts from the rows of A, to a thousandth."""
    basis, largest = torch.linalg.qr(a.T).Q, 0.0
    for _ in range(_ROUNDS):
        basis, r = torch.linalg.qr(delta.T @ torch.linalg.qr(delta @ basis).Q)
        before, largest = largest, float(torch.linalg.matrix_norm(r, 2))
        if largest - before <= 1e-3 * largest:
            break
    return (float(delta.norm()) / largest) ** 2 if largest > 0 else 0.0


def _low_rank_stable_rank(a: Tensor, b: Tensor) -> float:
    values = product_singular_values(as_matrix(b), as_matrix(a).T)
    return float((values / values[0]).square().sum()) if values[0] > 0 else 0.0


def _rows(count: int, width: int) -> Iterator[slice]:
    step = max(1, _ENTRIES // width)
    return (slice(start, start + step) for start in range(0, count, step))
