"""The initialization that lets a transformer train without skips (arXiv 2510.00345, Section 4)."""

from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgumentError, UnsuitableModelError
from wellposed.families import Block, BlockWeights, Matrix, blocks, readable_name, unwrapped
from wellposed.runs import tracked
from wellposed.skipless.initializers import query_key_factors, semi_orthogonal, suo_scale

Model = TypeVar("Model", bound=nn.Module)

_NOTE = "_wellposed_conditioned"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SMALLEST, _LARGEST = 1e-6, 1e4
# Entries of the d x d matrices that are decomposed together: 1 GiB of float64.
_BATCH_ENTRIES = 2**27


@torch.no_grad()
def condition_(
    model: Model,
    alpha: float = 2.0,
    beta: float = 0.6,
    c: float = 3.0,
    scale_mlp: bool = True,
    generator: torch.Generator | None = None,
) -> Model:
    """Overwrite the weights of every block of `model` with the conditioned initialization, and return it.

    Per head, W_Q W_K^T is the best rank-h approximation of alpha Z + beta I with Z Gaussian of variance 1/d, so that
    attention starts near the identity. W_V and W_O are c times uniform orthogonal d x d matrices, the distribution of
    c U and c V^T for the SVD of a Gaussian matrix, so that W_V W_O has condition number 1. MLP matrices are
    orthogonal times max(sqrt(out/in), 1). Biases are 0, norm weights and LayerScale 1.

    Embeddings, the final norm and the head are left as they are. Where keys are shared by several query heads
    (Llama), one M is drawn per key head and all its query heads start from that factor; matrices that are not square
    are semi-orthogonal, with the MLP's scale. Where queries and keys are normalized after their projection (qk_norm),
    W_Q W_K^T is the same but attention is less close to the identity.

    Args:
        model: a model, or part of one, of a known family with attention; real weights, not quantized, not on "meta".
        alpha: weight of the random part of M, > 0 (as beta and c at most 1e4). The paper: 2.0 supervised, 1.8 for DINO.
        beta: weight of the identity in M, >= 0. The paper: 0.6 supervised, 1.0 for DINO.
        c: scale of W_V and of W_O, > 0.
        scale_mlp: keep the MLP's scale correction; without it every MLP matrix has singular values 1.
        generator: source of the random numbers, on any device; torch's default on the model's device if None.

    Raises:
        InvalidArgumentError: alpha, beta or c outside its range.
        UnknownFamilyError, UnsuitableModelError: the model cannot be conditioned. It is untouched in every case.

    Example:
        >>> import timm, torch
        >>> model = condition_(timm.create_model("vit_tiny_patch16_224", depth=1))
        >>> torch.linalg.svdvals(model.blocks[0].mlp.fc1.weight).aminmax()  # doctest: +ELLIPSIS
        torch.return_types.aminmax(
        min=tensor(2.0000, grad_fn=<...>),
        max=tensor(2.0000, grad_fn=<...>))
    """
    _check_number("alpha", alpha, positive=True)
    _check_number("beta", beta, positive=False)
    _check_number("c", c, positive=True)
    if not isinstance(generator, torch.Generator | None):
        raise InvalidArgumentError(f"generator={generator!r}: expected a torch.Generator or None")
    found = blocks(model)
    weights = [_checked_weights(model, block) for block in found]
    for block, matrices in tracked(list(zip(found, weights, strict=True)), "conditioning"):
        _reset_vectors(block.module)
        _condition_queries_and_keys(matrices, alpha, beta, generator)
        _write(matrices.value, c, generator)
        _write(matrices.output, c, generator)
        for matrix in matrices.mlp:
            _write(matrix, 1.0 if scale_mlp else 1.0 / suo_scale(*matrix.view().shape), generator)
    note_conditioning(model, alpha=float(alpha), beta=float(beta), c=float(c), scale_mlp=bool(scale_mlp))
    return model


def note_conditioning(model: nn.Module, at: str = "", **arguments: Any) -> None:
    """Remember on the part of `model` named `at` how it was initialized; `read_conditioning` finds it there."""
    part = unwrapped(model).get_submodule(at)
    forget_conditioning(part)
    vars(part)[_NOTE] = arguments


def forget_conditioning(model: nn.Module) -> None:
    """Remove what `note_conditioning` left on `model` and its parts."""
    for module in model.modules():
        vars(module).pop(_NOTE, None)


def read_conditioning(model: nn.Module) -> list[dict[str, Any]]:
    """The arguments that `model`, or the part of it named under "at", was last conditioned with."""
    found = []
    for name, module in unwrapped(model).named_modules():
        if _NOTE in vars(module):
            at = readable_name(name)
            found.append({**vars(module)[_NOTE], **({"at": at} if at else {})})
    return found


def _condition_queries_and_keys(
    weights: BlockWeights, alpha: float, beta: float, generator: torch.Generator | None
) -> None:
    query, key, h = weights.query.view(), weights.key.view(), weights.head_dim
    d = query.shape[1]
    query_HhD = query.unflatten(0, (-1, h))
    key_KhD = key.unflatten(0, (-1, h))
    group = len(query_HhD) // len(key_KhD)
    step = max(1, _BATCH_ENTRIES // d**2)
    for first in range(0, len(key_KhD), step):
        heads = slice(first, first + step)
        w_q, w_k = query_key_factors(
            len(key_KhD[heads]), d, h, alpha, beta, generator=generator, device=_working_device(query)
        )
        key_KhD[heads].copy_(w_k.mT)
        query_HhD[first * group : (first + len(w_q)) * group].copy_(w_q.mT.repeat_interleave(group, dim=0))


def _write(matrix: Matrix, gain: float, generator: torch.Generator | None) -> None:
    """Gain x SUO into `matrix`."""
    target = matrix.view()
    dtype = torch.promote_types(target.dtype, torch.float32)
    orthogonal = semi_orthogonal(*target.shape, generator=generator, device=target.device, dtype=dtype)
    target.copy_(gain * suo_scale(*target.shape) * orthogonal)


def _reset_vectors(block: nn.Module) -> None:
    """Biases to 0; the other vectors, weights of norms and gammas of LayerScale, to 1."""
    for name, parameter in block.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _checked_weights(model: nn.Module, block: Block) -> BlockWeights:
    """The block's matrices, once it is sure that all of its parameters can be written and are accounted for."""
    try:
        weights = block.family.weights(block.module)
    except UnsuitableModelError as reason:
        raise UnsuitableModelError(f"cannot condition {type(model).__name__}: {reason}") from None
    matrices = (weights.query, weights.key, weights.value, weights.output, *weights.mlp)
    for matrix in matrices:
        _check_plain(getattr(matrix.module, "weight", None), f"{block.name}, {type(matrix.module).__name__}")
    known = {id(matrix.module.weight) for matrix in matrices}
    for name, parameter in block.module.named_parameters():
        if parameter.ndim == 1:
            _check_plain(parameter, f"{block.name}.{name}")
        elif id(parameter) not in known:
            raise UnsuitableModelError(
                f"cannot condition {block.name}.{name}: the method says nothing about this weight. "
                "Condition the model before adapters or other layers are added to it."
            )
    if weights.head_dim > weights.query.view().shape[1]:
        raise UnsuitableModelError(
            f"cannot condition {block.name}: heads of width {weights.head_dim} are wider than the model "
            f"({weights.query.view().shape[1]}), so W_Q W_K^T would not have full rank"
        )
    return weights


def _check_plain(weight: Any, name: str) -> None:
    if isinstance(weight, Tensor) and weight.is_meta:
        raise UnsuitableModelError(
            f"cannot condition {name}: it is on the meta device and has no values. "
            "Materialize the model first: model.to_empty(device=...)."
        )
    if type(weight) is not nn.Parameter or weight.dtype not in _DTYPES:
        kind = f"{type(weight).__name__} of {weight.dtype}" if isinstance(weight, Tensor) else type(weight).__name__
        raise UnsuitableModelError(
            f"cannot condition {name}: its weight is a {kind}, expected a plain parameter of 16, 32 or 64 bits. "
            "Condition the model before it is quantized, sharded or parametrized."
        )


def _check_number(name: str, value: float, *, positive: bool) -> None:
    """Raise unless the weights that follow from `value` are numbers in every dtype a weight may have."""
    in_range = isinstance(value, Real) and _SMALLEST <= value <= _LARGEST
    if not in_range and (positive or value != 0):
        raise InvalidArgumentError(
            f"{name}={value!r}: expected {'' if positive else '0 or '}a number from {_SMALLEST:g} to {_LARGEST:g}"
        )


def _working_device(weight: Tensor) -> torch.device:
    """Where to decompose in float64: with the weight, unless its device has no float64."""
    return torch.device("cpu") if weight.device.type == "mps" else weight.device
