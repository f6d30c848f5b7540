"""What stands at the attention site of a layer: a function in place of softmax(q k^T) v."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellposed.attention.eager import attention_weights, logits, visible_keys
from wellposed.attention.functional import attend, split_mask
from wellposed.attention.specs import Polynomial, Spec, phi_of


@dataclass(frozen=True)
class Attend:
    """Attention under `spec`, as a layer calls it."""

    spec: Spec

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        logit_scale: float,
        causal: bool = False,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        log_gain: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """What the heads return, (B, H, N, d); `log_gain` (H,) is the logarithm of a factor for each of them."""
        how: dict[str, Any] = {"phi": phi_of(self.spec), "scale": self._scale, "logit_scale": logit_scale}
        o_BHNd = attend(q, k, v, causal=causal, mask=mask, bias=bias, dropout=dropout, **how)
        # The output is linear in the scale, so a factor of it needs nothing of the attention itself.
        return o_BHNd if log_gain is None else (o_BHNd * _gain(log_gain)).to(o_BHNd.dtype)

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        *,
        logit_scale: float,
        causal: bool = False,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        log_gain: Tensor | None = None,
    ) -> Tensor:
        """The matrices (B, H, N, M) by which it multiplies the values, in float32 at least."""
        key_mask, mask = split_mask(mask, q, k)
        seen: dict[str, Any] = {"causal": causal, "key_mask": key_mask, "mask": mask}
        if phi_of(self.spec) == "softmax":
            s = logits(q, k, logit_scale, bias)
            visible = visible_keys(s.shape[-2], s.shape[-1], s.device, **seen)
            if visible is None:
                return s.softmax(-1)
            blind = ~visible.any(-1, keepdim=True)
            return s.masked_fill(~visible & ~blind, -torch.inf).softmax(-1).masked_fill(blind, 0.0)
        weights_BHNM = attention_weights(
            q, k, phi=phi_of(self.spec), scale=self._scale, logit_scale=logit_scale, bias=bias, **seen
        )
        return weights_BHNM if log_gain is None else weights_BHNM * _gain(log_gain)

    @property
    def _scale(self) -> float | None:
        return self.spec.scale if isinstance(self.spec, Polynomial) else None


def _gain(log_gain_H: Tensor) -> Tensor:
    return log_gain_H.to(torch.promote_types(log_gain_H.dtype, torch.float32)).exp()[:, None, None]
