"""How timm lays out its blocks (timm 1.0.29 and later).

timm itself is not imported here: a module that reaches this code was made by it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import UnsuitableModelError
from wellposed.families.family import AttentionLayer, BlockWeights, Family, Matrix, class_path, mask_and_bias, matrices
from wellposed.families.surgery import SitedModule, sites_of

ATTENTION = "timm.layers.attention.Attention"


class Block(SitedModule):
    """The pre-norm block of timm's VisionTransformer."""

    wp_forward_of = "timm.models.vision_transformer.Block"
    norm1: nn.Module
    norm2: nn.Module
    attn: nn.Module
    mlp: nn.Module
    ls1: nn.Module
    ls2: nn.Module
    drop_path1: Callable[[Tensor], Tensor]
    drop_path2: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        branch = self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal))
        x = self.wp_residual("attention", x, branch, self.drop_path1)
        branch = self.ls2(self.mlp(self.norm2(x)))
        return self.wp_residual("mlp", x, branch, self.drop_path2)


class ConvMixerResidual(SitedModule):
    """ConvMixer's one skip, around its depthwise convolution: the mixing of tokens, where a ViT has attention."""

    wp_forward_of = "timm.models.convmixer.Residual"
    fn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.wp_residual("attention", x, self.fn(x))


def _vit_weights(block: Any) -> BlockWeights:
    attention, mlp = block.attn, block.mlp
    if class_path(attention) != ATTENTION:
        raise UnsuitableModelError(f"the attention of its blocks is {class_path(attention)}, expected {ATTENTION}")
    query, key, value = Matrix(attention.qkv).split(3)
    if type(mlp).__name__ == "GluMlp":  # gate and value are stacked in fc1
        first = Matrix(mlp.fc1).split(2)
    elif type(mlp).__name__ == "SwiGLU":
        first = matrices(mlp, "fc1_g", "fc1_x")
    else:
        first = matrices(mlp, "fc1")
    return BlockWeights(query, key, value, Matrix(attention.proj), (*first, Matrix(mlp.fc2)), attention.head_dim)


@contextmanager
def _keeping_qkv(layer: Any) -> Iterator[None]:
    """Queries and keys are a fifth of a block's work, and need not be computed twice."""

    def keep(projection: nn.Module, arguments: Any, qkv: Tensor) -> None:
        layer.wp_qkv = qkv.detach()

    handle = layer.qkv.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()
        vars(layer).pop("wp_qkv", None)


def _vit_attention(layer: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> Tensor:
    q, k, _ = _heads(layer, vars(layer).pop("wp_qkv"))
    q, k, mask, causal = layer.q_norm(q), layer.k_norm(k), options.get("attn_mask"), bool(options.get("is_causal"))
    if sites_of(layer).attention is not None:
        how = mask_and_bias(None if causal else mask)
        return layer.wp_attention_weights(q, k, logit_scale=layer.scale, causal=causal, **how)
    logits = q * layer.scale @ k.mT
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    return logits.softmax(-1)


def keys(layer: Any, qkv_BNE: Tensor) -> Tensor:
    """The keys that timm's attention `layer` compares queries with, its heads side by side: (B, N, heads x width)."""
    _, k, _ = _heads(layer, qkv_BNE)
    keys_BHNd: Tensor = layer.k_norm(k)
    return keys_BHNd.transpose(1, 2).flatten(2)


def _heads(layer: Any, qkv_BNE: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values, (B, heads, N, width) each."""
    return qkv_BNE.reshape(*qkv_BNE.shape[:2], 3, layer.num_heads, -1).permute(2, 0, 3, 1, 4).unbind()


def _convmixer_weights(block: nn.Module) -> BlockWeights:
    raise UnsuitableModelError(
        "a ConvMixer has no attention and no MLP for alpha, beta and c to act on; it trains without its skip from its "
        "own initialization, so leave it as it is"
    )


FAMILIES = (
    Family(
        name="timm VisionTransformer",
        block=Block.wp_forward_of,
        skips={"attention": ("", Block), "mlp": ("", Block)},
        weights=_vit_weights,
        homes=tuple(
            f"timm.models.{module}" for module in ("vision_transformer", "deit", "pit", "naflexvit", "_features")
        ),
        stages={
            "attention input": ("attn", "input"),
            "attention": ("ls1", "output"),
            "after attention": ("norm2", "input"),
            "mlp input": ("mlp", "input"),
            "mlp": ("ls2", "output"),
        },
        attention=AttentionLayer("attn", _vit_attention, _keeping_qkv, lambda layer: class_path(layer) == ATTENTION),
    ),
    Family(
        name="timm ConvMixer",
        block=ConvMixerResidual.wp_forward_of,
        skips={"attention": ("", ConvMixerResidual)},
        weights=_convmixer_weights,
        homes=("timm.models.convmixer",),
        stages={
            "attention input": ("fn", "input"),
            "convolution": ("fn.0", "output"),
            "attention": ("fn", "output"),
        },
    ),
)
