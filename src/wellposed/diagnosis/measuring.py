"""The linear algebra of a diagnosis: many small matrices measured together, and read from the device once.

Shapes: B inputs, N tokens, d wide, H heads of width h.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellposed.diagnosis.probe import mean_cosines
from wellposed.diagnosis.report import STAGES, Attention, Spread, Tokens, Weights
from wellposed.errors import InvalidArgumentError, UnsuitableModelError
from wellposed.families import Block
from wellposed.spectrum import extreme_singular_values, extreme_singular_values_of_product
from wellposed.spectrum.extremes import extremes_of_gram, gram_matrices

Ends = tuple[Tensor, Tensor]
"""The largest and the smallest singular values."""
_SAMPLES = 2
# Numbers of the matrices that are decomposed together: 1 GiB of float64.
_TOGETHER = 2**27


def measured_tokens(
    found: Sequence[Block], seen: Sequence[dict[str, Tensor]]
) -> tuple[list[dict[str, Tokens]], list[dict[str, Ends]]]:
    """What is said about the tokens of each block and stage, and their extreme singular values."""
    places = [(i, stage) for i, stages in enumerate(seen) for stage in STAGES if stage in stages]
    own = [(i, stage) for i, stage in places if stage != "input" or not _goes_on(seen, i)]
    tokens = [seen[i][stage] for i, stage in own]
    try:
        numbers = _together(_token_numbers, [(x,) for x in tokens])
    except InvalidArgumentError as error:
        for (i, stage), x in zip(own, tokens, strict=True):
            if not x.isfinite().all():
                raise InvalidArgumentError(
                    f"the tokens of {found[i].name} ({stage}) hold NaN or Inf: the model's weights or its inputs are "
                    "broken"
                ) from error
        raise
    largest, smallest, squares, pairs = (torch.stack(each) for each in zip(*numbers, strict=True))
    conditions = spreads(ratio(largest, smallest))
    ranks = spreads(squares / largest.where(largest > 0, 1.0).square())
    cosines = pairs.mean(1).tolist()
    measured: list[dict[str, Tokens]] = [{} for _ in seen]
    extremes: list[dict[str, Ends]] = [{} for _ in seen]
    for (i, stage), (top, bottom, *_), *said in zip(own, numbers, conditions, ranks, cosines, strict=True):
        measured[i][stage], extremes[i][stage] = Tokens(*said), (top, bottom)
    for i, stage in sorted({*places} - {*own}):
        measured[i][stage], extremes[i][stage] = measured[i - 1]["output"], extremes[i - 1]["output"]
    return measured, extremes


def _token_numbers(x_SBND: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each matrix of tokens its largest and smallest singular value, the sum of its squares, and its mean cosine."""
    gram = gram_matrices(x_SBND)
    squares = gram.diagonal(dim1=-2, dim2=-1)
    n, d = x_SBND.shape[-2:]
    if n > d:  # the Gram matrix is not one of products of tokens
        cosines = mean_cosines(x_SBND)
    elif n == 1:
        cosines = torch.ones_like(squares[..., 0])
    else:
        inverse_norms = squares.rsqrt().where(squares > 0, 0.0)[..., None]
        total = (inverse_norms.mT @ gram @ inverse_norms)[..., 0, 0]
        cosines = (total - n) / (n * (n - 1))
    return *extremes_of_gram(gram), squares.sum(-1), cosines


def _goes_on(seen: Sequence[dict[str, Tensor]], i: int) -> bool:
    """Whether the input of block `i` is the output of the one before it, as it mostly is."""
    if i == 0:
        return False
    first, second = seen[i - 1]["output"], seen[i]["input"]
    return first.data_ptr() == second.data_ptr() and first.shape == second.shape


def attention_numbers(matrices_BHNN: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What is said about the attention matrices of a block, unread, and the first of them for the linear algebra."""
    a = matrices_BHNN.float()
    n = a.shape[-1]
    hidden = torch.ones(n, n, dtype=torch.bool, device=a.device).triu(1)
    is_causal = ~(a[0] * hidden).any() if n > 1 else hidden.any()
    diagonal = a.diagonal(dim1=-2, dim2=-1).clone()
    visible_N = torch.where(is_causal, torch.arange(1, n + 1, device=a.device), n)
    # A row with one token to look at has no entropy to speak of.
    entropy = (torch.special.entr(a).sum(-1) / visible_N.log().clamp(min=1e-9))[..., -max(1, n - 1) :].mean()
    others = a.masked_fill(torch.eye(n, dtype=torch.bool, device=a.device), 0.0).amax(-1)
    lowest = a.masked_fill(hidden & is_causal, torch.inf).amin(-1)
    # A row's logits are the logarithms of its weights, up to a constant.
    own, others, lowest = (x.clamp(min=torch.finfo(a.dtype).tiny).log() for x in (diagonal, others, lowest))
    spread, margin = torch.maximum(own, others) - lowest, own - others
    numbers = {
        "diagonal": diagonal.mean(),
        "entropy": entropy,
        "frobenius": torch.linalg.matrix_norm(a).mean(),
        "logit_range": spread.flatten().median(),
        "diagonal_margin": margin.flatten().median(),
        "others_bound": ((n - 1) * torch.exp(-margin)).clamp(max=1).mean(),
        "is_causal": is_causal,
    }
    return numbers, a[:_SAMPLES].clone()


def measured_attention(seen: Sequence[tuple[dict[str, Tensor], Tensor] | None]) -> list[Attention | None]:
    """From what `attention_numbers` returned for each block; None for a block without attention."""
    known = [each for each in seen if each is not None]
    ends = _together(extreme_singular_values, [(matrices,) for _, matrices in known])
    conditions = [spreads(ratio(*pair).flatten()[None])[0] for pair in ends]
    read = [dict(zip(numbers, torch.stack(list(numbers.values())).tolist(), strict=True)) for numbers, _ in known]
    measured = iter(
        Attention(
            **{**numbers, "is_causal": bool(numbers["is_causal"])},
            frobenius_bound=math.sqrt(matrices.shape[-1]),
            condition=condition,
        )
        for numbers, (_, matrices), condition in zip(read, known, conditions, strict=True)
    )
    return [next(measured) if each is not None else None for each in seen]


def measured_weights(found: Sequence[Block], notes: list[str]) -> list[Weights | None]:
    """Condition numbers of each block's products; None where there are no such weights, which is noted."""
    factors: list[_Factors | None] = []
    for block in found:
        try:
            factors.append(_factors(block))
        except UnsuitableModelError as reason:
            factors.append(None)
            if block.family.attention is not None:
                notes.append(f"No weight products of {block.name}: {reason}.")
    products = [pair for each in factors if each for pair in each.products]
    of_products = iter(_together(extreme_singular_values_of_product, products))
    alone = iter(_together(extreme_singular_values, [(each,) for all_ in factors if all_ for each in all_.alone]))
    measured: list[Weights | None] = []
    for each in factors:
        if each is None:
            measured.append(None)
            continue
        ratios = [ratio(*next(of_products)).flatten() for _ in each.products]
        ratios += [ratio(*next(alone)).flatten() for _ in each.alone]
        numbers = iter(torch.cat(ratios).tolist())
        query_keys, value_outputs = (tuple(next(numbers) for _ in one) for one in ratios[:2])
        query_key, value_output, *factors_alone = numbers
        measured.append(Weights(query_keys, value_outputs, query_key, value_output, tuple(factors_alone)))
    return measured


@dataclass(frozen=True)
class _Factors:
    """The weights of one attention layer."""

    products: tuple[tuple[Tensor, Tensor], ...]
    """W_Q W_K^T of each head, W_V W_O of each head, and both of the whole layer, as (left, right) of left right^T."""
    alone: tuple[Tensor, Tensor, Tensor]
    """W_Q, W_K and W_V."""


def _factors(block: Block) -> _Factors:
    weights = block.family.weights(block.module)
    matrices = (weights.query, weights.key, weights.value, weights.output)
    if any(hasattr(m.module, "base_layer") for m in matrices):
        raise UnsuitableModelError("its layers have adapters, which have to be merged first (merge_and_unload)")
    query, key, value, output = (m.view() for m in matrices)
    if not all(w.is_floating_point() and not w.is_meta for w in (query, key, value, output)):
        raise UnsuitableModelError("its weights are quantized or have no values")
    h, d = weights.head_dim, query.shape[1]
    shared = query.shape[0] // key.shape[0]
    q, k, v = (w.reshape(-1, h, d).mT for w in (query, key, value))
    k, v = k.repeat_interleave(shared, 0), v.repeat_interleave(shared, 0)
    o = output.reshape(output.shape[0], -1, h).transpose(0, 1)

    def whole(heads_HDh: Tensor) -> Tensor:
        """Side by side, (d, H h); those that share a key head are added up, as their products are."""
        return heads_HDh.unflatten(0, (-1, shared)).sum(1).transpose(0, 1).flatten(1)

    return _Factors(((q, k), (v, o), (whole(q), key.T), (value.T, whole(o))), (query, key, value))


def _together(
    measure: Callable[..., tuple[Tensor, ...]], groups: Sequence[tuple[Tensor, ...]]
) -> list[tuple[Tensor, ...]]:
    """`measure` of each of `groups`, those of like shape stacked: a GPU takes many at once as fast as a few."""
    results: list[Any] = [None] * len(groups)
    waiting = list(range(len(groups)))
    while waiting:
        first = groups[waiting[0]]
        room = max(1, _TOGETHER // sum(tensor.numel() for tensor in first))
        chosen = [i for i in waiting if _alike(groups[i], first)][:room]
        stacked = (torch.stack([groups[i][part] for i in chosen]) for part in range(len(first)))
        for i, *each in zip(chosen, *measure(*stacked), strict=True):
            results[i] = tuple(each)
        waiting = [i for i in waiting if i not in chosen]
    return results


def _alike(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> bool:
    return all(a.shape == b.shape and a.device == b.device for a, b in zip(first, second, strict=True))


def ratio(largest: Tensor, smallest: Tensor) -> Tensor:
    """The condition number; infinity where the smallest singular value is 0."""
    return torch.where(smallest > 0, largest / smallest, torch.inf)


def spreads(values: Tensor) -> list[Spread]:
    """Of each row of `values`."""
    ordered = values.sort(-1).values
    positions = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64) * (ordered.shape[-1] - 1)
    return [Spread(*row) for row in ordered[:, positions.round().long().to(ordered.device)].tolist()]
