"""What the papers predict for a block, to be shown beside what was measured.

They are predictions, not bounds to rely on: the propositions leave LayerNorm out, are about linear attention, or hold
for square weights and at least as many tokens as channels.
"""

import math
from collections.abc import Collection

import torch
from torch import Tensor

from wellposed.diagnosis.jacobians import BlockJacobians
from wellposed.diagnosis.measuring import Ends, spreads
from wellposed.diagnosis.report import Attention, Prediction, Tokens, Weights
from wellposed.families import Block
from wellposed.spectrum import depthwise_singular_values, weyl_condition_bound

SKIPLESS, GRAYING = "2510.00345", "2505.01996"


def predictions(
    block: Block,
    tokens: dict[str, Tokens],
    extremes: dict[str, Ends],
    attention: Attention | None,
    weights: Weights | None,
    jacobians: BlockJacobians | None,
    cut: Collection[str],
    n: int,
) -> tuple[Prediction, ...]:
    """All that apply to `block`, which lost the skips `cut`, seen with `n` tokens of `extremes` singular values."""
    found = []
    if attention is not None:
        found += _of_softmax(attention)
    if weights is not None:
        found += _of_linear_attention(tokens, *extremes["attention input"], weights, has_skip="attention" not in cut)
    found += _of_convolution(block, tokens, n)
    if jacobians is not None and jacobians.through_values is not None:
        found += _of_jacobian(jacobians, attention)
    return tuple(found)


def _of_softmax(attention: Attention) -> list[Prediction]:
    """Proposition 1: a narrow range of logits makes A singular, a wide margin of the diagonal makes it the identity.

    It speaks of ranges below the temperature and of margins above 0.
    """
    source, found = f"{SKIPLESS}, Prop. 1", []
    if attention.logit_range < 1 and not attention.is_causal:  # uniform rows over ever more tokens are not alike
        order = 1 / attention.logit_range if attention.logit_range > 0 else math.inf
        measured = attention.condition.median
        found.append(Prediction(source, "condition number of A", "at least about", order, measured))
    if attention.diagonal_margin > 0:
        others = 1 - attention.diagonal
        found.append(Prediction(source, "attention to other tokens", "at most", attention.others_bound, others))
    return found


def _of_linear_attention(
    tokens: dict[str, Tokens], largest: Tensor, smallest: Tensor, weights: Weights, has_skip: bool
) -> list[Prediction]:
    """Propositions 4.1 and 4.2: without its skip attention cubes the condition number of its input, with it not."""
    constant = math.prod(weights.factors)
    condition = tokens["attention input"].condition.median
    found = [
        Prediction(
            f"{GRAYING}, Prop. 4.1",
            "condition number of attention's output",
            "at most",
            constant * condition**3,
            tokens["attention"].condition.median,
        )
    ]
    if has_skip and "after attention" in tokens:
        ratios = torch.where(smallest > 0, (constant * largest**3 + largest) / (smallest**3 + smallest), torch.inf)
        measured = tokens["after attention"].condition.median
        quantity = "condition number after attention's skip"
        predicted = spreads(ratios[None])[0].median
        found.append(Prediction(f"{GRAYING}, Prop. 4.2", quantity, "at most", predicted, measured))
    return found


def _of_convolution(block: Block, tokens: dict[str, Tokens], n: int) -> list[Prediction]:
    """Eq. 24: a depthwise convolution is only linear in the condition number of its input."""
    layers = [m for m in block.module.modules() if isinstance(m, torch.nn.Conv2d) and m.groups == m.in_channels > 1]
    side = math.isqrt(n)
    if block.family.attention is not None or len(layers) != 1 or side**2 != n:
        return []
    values = depthwise_singular_values(layers[0].weight.detach(), side, side)
    predicted = float(values.amax() / values.amin()) * tokens["attention input"].condition.median
    quantity = "condition number of the convolution's output"
    return [Prediction(f"{GRAYING}, Eq. 24", quantity, "at most", predicted, tokens["convolution"].condition.median)]


def _of_jacobian(jacobians: BlockJacobians, attention: Attention | None) -> list[Prediction]:
    """Proposition 2 and Lemma 1: attention's Jacobian K = B + E is conditioned as B is while E is small.

    Of a large Jacobian only a bound on the smallest singular value is known, too little for Lemma 1.
    """
    whole, values, weights = jacobians.whole["attention"], jacobians.through_values, jacobians.through_weights
    assert values is not None
    assert weights is not None
    is_exact = whole.is_exact and values.is_exact
    known = "" if is_exact else ", both no more than lower bounds"
    of_k, measured = f"condition number of K{known}", whole.condition_number
    found = [Prediction(f"{SKIPLESS}, Prop. 2", of_k, "about", values.condition_number, measured)]
    if is_exact:
        bound = float(weyl_condition_bound(values.largest[0], values.smallest[0], weights.largest[0]))
        found.append(Prediction(f"{SKIPLESS}, Lemma 1", of_k, "at most", bound, measured))
    if attention is not None:
        quantity = "condition number of B, that of A for one head" + ("" if is_exact else ", measured at least")
        found.append(
            Prediction(f"{SKIPLESS}, Prop. 2", quantity, "about", attention.condition.median, values.condition_number)
        )
    return found
