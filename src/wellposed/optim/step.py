"""What happens to batches at every step: Adam in their bases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wellposed.optim.batch import Batch
from wellposed.optim.graph import side_by_side
from wellposed.optim.rotation import accumulate_factor_, rotated, rotated_back


@dataclass(frozen=True)
class Constants:
    """The options that the arithmetic of a step depends on; the learning rate comes after it."""

    betas: tuple[float, float]
    shampoo_beta: float
    eps: float
    normalize: bool
    tf32: bool

    @staticmethod
    def of(group: dict[str, Any]) -> Constants:
        beta1, beta2 = group["betas"]
        shampoo_beta = group["shampoo_beta"] if group["shampoo_beta"] >= 0 else beta2
        return Constants((beta1, beta2), shampoo_beta, group["eps"], group["normalize_grads"], group["tf32"])


def gradients_to_updates_(batches: list[Batch], constants: Constants) -> None:
    """Turn the gradients in the batches' `work` into updates, and move their moments and factors along.

    What this does depends on nothing but the batches' tensors and the constants, and never waits for the device: it can
    be captured.
    """
    side_by_side([partial(_step_, batch, constants) for batch in batches], batches[0].work.device)


def _step_(batch: Batch, constants: Constants) -> None:
    """The step of one batch: for matrices Q_L (M / (V^1/2 + eps)) Q_R^T, with the moments M and V of Q_L^T G Q_R."""
    beta1, beta2 = constants.betas
    for i, factor in enumerate(batch.factors):
        if factor is not None:
            accumulate_factor_(factor, batch.work, i, constants.shampoo_beta)
    turned = rotated(batch.work, batch.bases)
    batch.exp_avg.lerp_(turned, 1 - beta1)
    batch.exp_avg_sq.mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
    del turned
    update = rotated_back(batch.exp_avg / batch.exp_avg_sq.sqrt().add_(constants.eps), batch.bases)
    if constants.normalize:
        update = update / _root_mean_square(update)
    batch.work.copy_(update)


@contextmanager
def precise(device: torch.device, *, tf32: bool) -> Iterator[None]:
    """Matrix products in float32 or TF32 as asked, whatever the surrounding code has set."""
    before = torch.backends.cuda.matmul.fp32_precision
    if before == getattr(torch.backends, "fp32_precision", None):
        before = "none"  # it was inherited; set to itself it would not follow the general setting any more
    with torch.autocast(device.type, enabled=False):
        torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
        try:
            yield
        finally:
            torch.backends.cuda.matmul.fp32_precision = before


def _root_mean_square(stack: Tensor) -> Tensor:
    """Of each tensor in a stack, shaped to divide it."""
    return stack.square().mean(tuple(range(1, stack.ndim)), keepdim=True).sqrt() + 1e-30
