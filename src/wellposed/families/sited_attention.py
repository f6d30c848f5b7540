"""The attention layers of timm with the site of their softmax (timm 1.0.29 and later).

timm itself is not imported here: a module that reaches this code was made by it.

Shapes: B inputs, H heads, N tokens, heads d wide; W windows.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.families.family import mask_and_bias
from wellposed.families.surgery import SitedModule
from wellposed.families.timm import ATTENTION


class TimmAttention(SitedModule):
    """The attention of timm's VisionTransformer."""

    wp_forward_of = ATTENTION
    num_heads: int
    head_dim: int
    attn_dim: int
    scale: float
    qkv: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    attn_drop: nn.Dropout
    norm: nn.Module
    proj: nn.Module
    proj_drop: nn.Module
    gate: nn.Module | None

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind()
        o_BHNd = self.wp_attend(
            *(self.q_norm(q), self.k_norm(k), v),
            logit_scale=self.scale,
            causal=is_causal,
            dropout=self.attn_drop.p if self.training else 0.0,
            **mask_and_bias(None if is_causal else attn_mask),
        )
        o_BND = self.norm(o_BHNd.transpose(1, 2).reshape(b, n, self.attn_dim))
        if self.gate is not None:
            o_BND = o_BND * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(o_BND))


class TimmWindowAttention(SitedModule):
    """The attention within the windows of timm's Swin, with its bias for relative positions."""

    wp_forward_of = "timm.models.swin_transformer.WindowAttention"
    num_heads: int
    scale: float
    qkv: nn.Module
    attn_drop: nn.Dropout
    proj: nn.Module
    proj_drop: nn.Module
    _get_rel_pos_bias: Callable[[], Tensor]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind()
        visible = None
        if mask is not None:  # (W, N, N), 0 within a window and -100 across the edge of a shifted image
            visible = (mask == 0).repeat(b // len(mask), 1, 1)[:, None]
        o_BHNd = self.wp_attend(
            *(q, k, v),
            logit_scale=self.scale,
            mask=visible,
            bias=self._get_rel_pos_bias(),
            dropout=self.attn_drop.p if self.training else 0.0,
        )
        return self.proj_drop(self.proj(o_BHNd.transpose(1, 2).reshape(b, n, -1)))


class TimmXCA(SitedModule):
    """The attention of timm's XCiT, in which the channels of a head attend to each other: d of them, N wide."""

    wp_forward_of = "timm.models.xcit.XCA"
    num_heads: int
    temperature: Tensor
    qkv: nn.Module
    attn_drop: nn.Dropout
    proj: nn.Module
    proj_drop: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 4, 1).unbind()
        o_BHdN = self.wp_attend(
            *(F.normalize(q, dim=-1) * self.temperature, F.normalize(k, dim=-1), v),
            logit_scale=1.0,
            dropout=self.attn_drop.p if self.training else 0.0,
        )
        return self.proj_drop(self.proj(o_BHdN.permute(0, 3, 1, 2).reshape(b, n, c)))


class TimmClassAttn(SitedModule):
    """The attention in XCiT's last blocks, in which only the class token has a query."""

    wp_forward_of = "timm.models.cait.ClassAttn"
    num_heads: int
    scale: float
    q: nn.Module
    k: nn.Module
    v: nn.Module
    attn_drop: nn.Dropout
    proj: nn.Module
    proj_drop: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        b, _, c = x.shape
        q, k, v = (
            layer(tokens).reshape(b, -1, self.num_heads, c // self.num_heads).transpose(1, 2)
            for layer, tokens in ((self.q, x[:, :1]), (self.k, x), (self.v, x))
        )
        o_BH1d = self.wp_attend(q, k, v, logit_scale=self.scale, dropout=self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(o_BH1d.transpose(1, 2).reshape(b, 1, c)))
