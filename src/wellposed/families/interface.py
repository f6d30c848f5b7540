"""Importing this module makes the attention site known to transformers, with the masks that it needs.

transformers asks `config._attn_implementation` which function computes attention, and which one makes its masks; under
a name without the latter it would make none, and padding would be seen without a word. The configuration is one for
all layers of a model, so layers without a site come here too: they get softmax.

Unpickling a model with a site imports this module, because its layers' classes stand here.

Shapes: B inputs, H heads of queries, K of keys and values, N queries, M keys, heads d wide.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from wellposed.errors import UnsuitableModelError
from wellposed.families.family import mask_and_bias
from wellposed.families.huggingface import EXPOSED, IMPLEMENTATION, MODELS
from wellposed.families.surgery import SitedModule

_NOT_KNOWN = ("cache", "position_bias", "s_aux", "sliding_window", "softcap")


class InterfacedAttention(SitedModule):
    """An attention layer of transformers, unchanged; its site stands behind the attention interface."""

    config: Any

    def forward(self, *arguments: Any, **options: Any) -> Any:
        if self.config._attn_implementation != IMPLEMENTATION:
            raise UnsuitableModelError(
                f"the attention of this model was replaced by wellposed.use_attention, but its implementation is now "
                f"{self.config._attn_implementation!r}, which would compute softmax. Replace it again, or call "
                f"model.set_attn_implementation({IMPLEMENTATION!r}); use_attention(model, Softmax()) puts softmax back."
            )
        return super().forward(*arguments, **options)


class ViTAttention(InterfacedAttention):
    """ViT's."""

    wp_forward_of = f"{MODELS}.vit.modeling_vit.ViTAttention"


class BertSelfAttention(InterfacedAttention):
    """BERT's."""

    wp_forward_of = f"{MODELS}.bert.modeling_bert.BertSelfAttention"


class GPT2Attention(InterfacedAttention):
    """GPT-2's."""

    wp_forward_of = f"{MODELS}.gpt2.modeling_gpt2.GPT2Attention"


class LlamaAttention(InterfacedAttention):
    """Llama's."""

    wp_forward_of = f"{MODELS}.llama.modeling_llama.LlamaAttention"


def mask_for_site(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """What `attend` receives as its mask, True for what can be seen.

    None: all of it, or what is causal. (B, M): the keys that are no padding, in a causal layer. (B, 1, 1, M): the same
    in one that is not causal. (B, 1, N, M): anything else, such as packed sequences or a cache with free places.
    """
    causal = mask_function is causal_mask_function
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if (causal and aligned) or mask_function is bidirectional_mask_function:
        if attention_mask is None:
            return None
        keys_BM = attention_mask[:, kv_offset : kv_offset + kv_length]
        keys_BM = nn.functional.pad(keys_BM, (0, kv_length - keys_BM.shape[1]))
        if not torch.compiler.is_compiling() and bool(keys_BM.all()):
            return None
        return keys_BM if causal else keys_BM[:, None, None, :]
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **options,
    )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """What the heads return, (B, N, H, d), and if it was asked for the matrices (B, H, N, M)."""
    for name in _NOT_KNOWN:
        if options.get(name) is not None:
            raise UnsuitableModelError(f"attention by wellposed knows no {name}: use it without, or put softmax back")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    exposed = EXPOSED in vars(module) or bool(options.get("output_attentions"))
    if not isinstance(module, SitedModule):
        return _softmax(module, query, key, value, attention_mask, scaling, dropout, causal, exposed)
    how: dict[str, Any] = {"logit_scale": query.shape[-1] ** -0.5 if scaling is None else scaling}
    if attention_mask is None or attention_mask.ndim == 2:
        how |= {"causal": causal, "mask": attention_mask}
    else:
        how |= mask_and_bias(attention_mask)
    o_BHNd = module.wp_attend(query, key, value, dropout=dropout, **how)
    return o_BHNd.transpose(1, 2).contiguous(), module.wp_attention_weights(query, key, **how) if exposed else None


def _softmax(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    causal: bool,
    exposed: bool,
) -> tuple[Tensor, Tensor | None]:
    """What transformers computes itself for a layer without a site, from the same mask."""
    n, m = query.shape[2], key.shape[2]
    if attention_mask is None or attention_mask.ndim == 2:
        visible_BHNM = torch.ones(1, 1, n, m, dtype=torch.bool, device=query.device)
        if causal:
            visible_BHNM = visible_BHNM.tril(m - n)
        if attention_mask is not None:
            visible_BHNM = visible_BHNM & attention_mask[:, None, None, :]
    else:
        visible_BHNM = attention_mask
    sdpa: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
    o_BNHd, _ = sdpa(module, query, key, value, visible_BHNM, dropout=dropout, scaling=scaling, is_causal=False)
    if not exposed:
        return o_BNHd, None
    s = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    s = s * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if visible_BHNM.dtype == torch.bool:
        return o_BNHd, s.masked_fill(~visible_BHNM, torch.finfo(s.dtype).min).softmax(-1)
    return o_BNHd, (s + visible_BHNM).softmax(-1)


AttentionInterface.register(IMPLEMENTATION, attend)
AttentionMaskInterface.register(IMPLEMENTATION, mask_for_site)
