"""`diagnose`: one forward pass of a model, watched, and the linear algebra that says how well it is conditioned.

Shapes: B inputs, N tokens, d wide, H heads of width h.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.diagnosis.jacobians import block_jacobians
from wellposed.diagnosis.predictions import predictions
from wellposed.diagnosis.probe import mean_cosine
from wellposed.diagnosis.report import STAGES, Attention, BlockReport, Diagnosis, Spread, Tokens, Weights
from wellposed.diagnosis.watching import attention_seen, tokens_seen
from wellposed.errors import InvalidArgumentError, UnsuitableModelError
from wellposed.families import Block, blocks, library_class, sites_of, unwrapped
from wellposed.spectrum import extreme_singular_values, extreme_singular_values_of_product

Inputs = Tensor | Mapping[str, Tensor]
_SAMPLES = 2
# Numbers of the matrices that are decomposed together: 1 GiB of float64.
_TOGETHER = 2**27


@torch.no_grad()
def diagnose(model: nn.Module, inputs: Inputs, *, jacobians: bool = False) -> Diagnosis:
    """How `model` treats a batch, block by block; the model is left as it was.

    Args:
        model: of a known family; in training mode it is measured in eval mode, without dropout.
        inputs: a batch of images or token ids as the model takes it, or a mapping of its named arguments. Inputs of
            different lengths are to be given one length at a time, without padding.
        jacobians: also the extremes of the Jacobians of attention and MLP, for the first input. They take far longer
            than everything else.

    Example:
        >>> import timm, wellposed as wp
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> report = wp.diagnose(model, torch.randn(4, 3, 32, 32))
        >>> report.blocks[1].name, report.blocks[1].attention.frobenius <= report.blocks[1].attention.frobenius_bound
        ('blocks.1', True)
    """
    model, found = unwrapped(model), blocks(model)
    inputs = _checked(inputs, model)
    notes = []
    if model.training:
        notes.append("The model is in training mode; it was measured in eval mode, without dropout.")
    with _in_eval_mode(model), tokens_seen(model) as seen, attention_seen(model, _attention_numbers) as attention:
        _run(model, inputs)
    tokens, extremes = _measured_tokens(found, seen)
    conditions = _attention_conditions([matrices for _, matrices in attention])
    weights = _measured_weights(found, notes)
    with _in_eval_mode(model):
        spectra = block_jacobians(model, found, lambda: _run(model, _first_of(inputs))) if jacobians else None
    reports = []
    for i, block in enumerate(found):
        attended = Attention(**attention[i][0], condition=conditions[i]) if attention else None
        jacobian = spectra[i] if spectra else None
        reports.append(
            BlockReport(
                name=block.name,
                cut=tuple(sorted(_cut(block))),
                tokens=tokens[i],
                attention=attended,
                weights=weights[i],
                jacobians=jacobian.whole if jacobian else {},
                predictions=predictions(
                    *(block, tokens[i], extremes[i], attended, weights[i], jacobian), seen[i]["output"].shape[1]
                ),
            )
        )
    first = seen[0]["input"]
    if attention and first.shape[1] >= first.shape[2]:
        notes.append(
            f"{first.shape[1]} tokens of {first.shape[2]} channels: LayerNorm leaves them one direction less, so that "
            "the condition number of what follows from it linearly is infinite. Cosine and stable rank tell more."
        )
    return Diagnosis(
        model=library_class(model).__name__,
        input_shape=(first.shape[0], first.shape[1], first.shape[2]),
        blocks=tuple(reports),
        notes=tuple(notes),
    )


def _run(model: nn.Module, inputs: Inputs) -> None:
    model(inputs) if isinstance(inputs, Tensor) else model(**inputs)


def _first_of(inputs: Inputs) -> Inputs:
    return inputs[:1] if isinstance(inputs, Tensor) else {name: value[:1] for name, value in inputs.items()}


def _checked(inputs: Inputs, model: nn.Module) -> Inputs:
    """`inputs` on the device of the model, once they are known to be a batch without padding."""
    named = {"inputs": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.ndim < 1 or 0 in value.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InvalidArgumentError(f"{name} is {shape}: expected a batch of at least one input, as a tensor")
        if value.is_floating_point() and not value.isfinite().all():
            raise InvalidArgumentError(f"{name} holds NaN or Inf: expected finite numbers")
    if "attention_mask" in named and not named["attention_mask"].bool().all():
        raise InvalidArgumentError("attention_mask leaves tokens out: give inputs of one length, without padding")
    device = next(model.parameters()).device
    return inputs.to(device) if isinstance(inputs, Tensor) else {name: x.to(device) for name, x in named.items()}


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _cut(block: Block) -> set[str]:
    """The skips that `block` has lost."""
    layers = {skip: block.module.get_submodule(name) for skip, (name, _) in block.family.skips.items()}
    return {skip for skip, layer in layers.items() if skip in sites_of(layer).cut}


def _measured_tokens(
    found: Sequence[Block], seen: Sequence[dict[str, Tensor]]
) -> tuple[list[dict[str, Tokens]], list[dict[str, tuple[Tensor, Tensor]]]]:
    """What is said about the tokens of each block and stage, and their extreme singular values."""
    places = [(i, stage) for i, stages in enumerate(seen) for stage in STAGES if stage in stages]
    own = [(i, stage) for i, stage in places if stage != "input" or not _goes_on(seen, i)]
    try:
        ends = _together(extreme_singular_values, [(seen[i][stage],) for i, stage in own])
    except InvalidArgumentError as error:
        for i, stage in own:
            if not seen[i][stage].isfinite().all():
                raise InvalidArgumentError(
                    f"the tokens of {found[i].name} ({stage}) hold NaN or Inf: the model's weights or its inputs are "
                    "broken"
                ) from error
        raise
    tokens = [seen[i][stage] for i, stage in own]
    largest = torch.stack([end for end, _ in ends])
    norms = torch.stack([torch.linalg.vector_norm(x, dim=(1, 2), dtype=torch.float64) for x in tokens])
    conditions = _spreads(torch.stack([_ratio(*pair) for pair in ends]))
    ranks = _spreads((norms / largest.where(largest > 0, 1.0)).square())
    cosines = torch.stack([mean_cosine(x) for x in tokens]).tolist()
    measured: list[dict[str, Tokens]] = [{} for _ in seen]
    extremes: list[dict[str, tuple[Tensor, Tensor]]] = [{} for _ in seen]
    for (i, stage), pair, *numbers in zip(own, ends, conditions, ranks, cosines, strict=True):
        measured[i][stage], extremes[i][stage] = Tokens(*numbers), pair
    for i, stage in sorted({*places} - {*own}):
        measured[i][stage], extremes[i][stage] = measured[i - 1]["output"], extremes[i - 1]["output"]
    return measured, extremes


def _goes_on(seen: Sequence[dict[str, Tensor]], i: int) -> bool:
    """Whether the input of block `i` is the output of the one before it, as it mostly is."""
    if i == 0:
        return False
    first, second = seen[i - 1]["output"], seen[i]["input"]
    return first.data_ptr() == second.data_ptr() and first.shape == second.shape


def _attention_numbers(matrices_BHNN: Tensor) -> tuple[dict[str, Any], Tensor]:
    """What is said about the attention matrices of a block, and the first of them for the linear algebra."""
    a = matrices_BHNN.float()
    n = a.shape[-1]
    diagonal = a.diagonal(dim1=-2, dim2=-1)
    entropy = torch.special.entr(a).sum(-1).mean() / math.log(n) if n > 1 else a.new_zeros(())
    is_causal = n > 1 and not a[0].triu(1).any()
    logits = a.clamp(min=torch.finfo(a.dtype).tiny).log_()  # up to a constant per row
    hidden = torch.ones(n, n, dtype=torch.bool, device=a.device).triu(1)
    lowest = (logits.masked_fill(hidden, torch.inf) if is_causal else logits).amin(-1)
    spread = logits.amax(-1) - lowest
    own = logits.diagonal(dim1=-2, dim2=-1).clone()
    margin = own - logits.masked_fill_(torch.eye(n, dtype=torch.bool, device=a.device), -torch.inf).amax(-1)
    numbers = {
        "diagonal": diagonal.mean(),
        "entropy": entropy,
        "frobenius": torch.linalg.matrix_norm(a).mean(),
        "logit_range": spread.flatten().median(),
        "diagonal_margin": margin.flatten().median(),
    }
    values = torch.stack(list(numbers.values())).tolist()
    known = {"frobenius_bound": math.sqrt(n), "is_causal": is_causal}
    return dict(zip(numbers, values, strict=True)) | known, a[:_SAMPLES].clone()


def _attention_conditions(matrices: list[Tensor]) -> list[Spread]:
    ratios = [_ratio(*ends).flatten() for ends in _together(extreme_singular_values, [(a,) for a in matrices])]
    return [spread for one in ratios for spread in _spreads(one[None])]


def _measured_weights(found: Sequence[Block], notes: list[str]) -> list[Weights | None]:
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
        query_keys, value_outputs, query_key, value_output = (_ratio(*next(of_products)) for _ in each.products)
        query, key, value = (float(_ratio(*next(alone))) for _ in each.alone)
        heads = tuple(query_keys.tolist()), tuple(value_outputs.tolist())
        measured.append(Weights(*heads, float(query_key), float(value_output), (query, key, value)))
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
    query, key, value, output = (m.view() for m in (weights.query, weights.key, weights.value, weights.output))
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
    measure: Callable[..., tuple[Tensor, Tensor]], groups: Sequence[tuple[Tensor, ...]]
) -> list[tuple[Tensor, Tensor]]:
    """`measure` of each of `groups`, those of like shape stacked: a GPU takes many at once as fast as a few."""
    results: list[Any] = [None] * len(groups)
    waiting = list(range(len(groups)))
    while waiting:
        shapes = [tensor.shape for tensor in groups[waiting[0]]]
        room = max(1, _TOGETHER // sum(tensor.numel() for tensor in groups[waiting[0]]))
        chosen = [i for i in waiting if [tensor.shape for tensor in groups[i]] == shapes][:room]
        stacked = (torch.stack([groups[i][part] for i in chosen]) for part in range(len(shapes)))
        largest, smallest = measure(*stacked)
        for position, i in enumerate(chosen):
            results[i] = (largest[position], smallest[position])
        waiting = [i for i in waiting if i not in chosen]
    return results


def _ratio(largest: Tensor, smallest: Tensor) -> Tensor:
    return torch.where(smallest > 0, largest / smallest, torch.inf)


def _spreads(values: Tensor) -> list[Spread]:
    """Of each row of `values`."""
    ordered = values.sort(-1).values
    positions = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64) * (ordered.shape[-1] - 1)
    return [Spread(*row) for row in ordered[:, positions.round().long().to(ordered.device)].tolist()]
