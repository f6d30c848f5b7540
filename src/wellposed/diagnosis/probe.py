"""One look at every block of a model: how its tokens, its attention and its gradient are conditioned.

Shapes: B images, N tokens, d wide, H heads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.diagnosis.watching import attention_seen, tokens_seen
from wellposed.families import blocks
from wellposed.spectrum import condition_number


@dataclass(frozen=True)
class BlockState:
    """One block at one moment, over a batch of inputs."""

    name: str
    token_condition: float
    """Condition number of the block's output, a matrix of tokens per input; the median over inputs.

    At most what rounding lets it be, 8e6 for float32, which stands for a singular matrix.
    """
    token_cosine: float
    """Mean cosine between two different tokens of an input: 1 where all tokens have become the same."""
    image_difference: float
    """1 minus the mean cosine between the mean tokens of different inputs: 0 where no input differs from another."""
    attention_diagonal: float | None
    """Mean weight that a token gives to itself; 1/N where attention is uniform, None where there is no attention."""
    attention_norm: float | None
    """Mean Frobenius norm of a head's attention matrix, at most sqrt(N) for softmax; None likewise."""
    gradient_norm: float
    """Norm of the loss's gradient with respect to the block's parameters."""


def probe(model: nn.Module, inputs: Tensor, labels: Tensor) -> list[BlockState]:
    """The state of every block of `model` on a batch; neither the model nor its gradients change.

    Args:
        model: of a known family, with class logits as its output.
        inputs: a batch as the model takes it.
        labels: the classes, for the cross-entropy whose gradient is taken.
    """
    found = blocks(model)
    with attention_seen(model, _diagonal_and_norm) as attention, tokens_seen(model) as seen:
        loss = F.cross_entropy(model(inputs), labels)
    weights: list[tuple[float | None, float | None]] = [each or (None, None) for each in attention]
    params = [[param for param in block.module.parameters() if param.requires_grad] for block in found]
    flat = torch.autograd.grad(loss, [param for group in params for param in group], allow_unused=True)
    gradients = iter(flat)
    states = []
    for block, group, stages, (diagonal, norm) in zip(found, params, seen, weights, strict=True):
        norms = [gradient.norm() for gradient in (next(gradients) for _ in group) if gradient is not None]
        # Many small decompositions, which a GPU takes one after the other.
        tokens = stages["output"].cpu()
        condition = condition_number(tokens, tol=0).clamp(max=1 / torch.finfo(tokens.dtype).eps).median()
        states.append(
            BlockState(
                name=block.name,
                token_condition=float(condition),
                token_cosine=float(mean_cosine(tokens)),
                image_difference=1 - float(mean_cosine(tokens.mean(1)[None])),
                attention_diagonal=diagonal,
                attention_norm=norm,
                gradient_norm=float(torch.stack(norms).norm()) if norms else 0.0,
            )
        )
    return states


def _diagonal_and_norm(matrices_BHNN: Tensor) -> tuple[float, float]:
    norms = torch.linalg.matrix_norm(matrices_BHNN.float())
    return float(matrices_BHNN.diagonal(dim1=-2, dim2=-1).mean()), float(norms.mean())


def mean_cosine(tokens_BND: Tensor) -> Tensor:
    """The mean of `mean_cosines`."""
    return mean_cosines(tokens_BND).mean()


def mean_cosines(tokens_BND: Tensor) -> Tensor:
    """The mean cosine between two different tokens of each input, (B,); 1 where there is only one."""
    unit = F.normalize(tokens_BND if tokens_BND.dtype == torch.float64 else tokens_BND.float(), dim=-1)
    n = unit.shape[-2]
    # The sum over all pairs is the squared norm of the sum of tokens; N of them are pairs of a token with itself.
    total = unit.sum(-2, dtype=torch.float64).square().sum(-1)
    return (total - n) / (n * (n - 1)) if n > 1 else torch.ones_like(total)
