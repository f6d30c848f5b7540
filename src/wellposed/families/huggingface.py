"""How HuggingFace transformers lays out its blocks (transformers 5.17 and later).

transformers itself is not imported here: a module that reaches this code was made by it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn

from wellposed.families.family import AttentionLayer, BlockWeights, Family, Matrix, matrices
from wellposed.families.surgery import SitedModule

MODELS = "transformers.models"
IMPLEMENTATION = "wellposed"
"""What transformers knows our attention under, see `wellposed.families.interface`."""
EXPOSED = "wp_exposed"
"""The attribute of a layer under that implementation that is asked for its matrices."""


class ViTLayer(SitedModule):
    """The pre-norm block of ViT."""

    wp_forward_of = f"{MODELS}.vit.modeling_vit.ViTLayer"
    layernorm_before: nn.Module
    layernorm_after: nn.Module
    attention: nn.Module
    mlp: nn.Module
    dropout: nn.Module

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        attended, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, **kwargs)
        hidden_states = self.wp_residual("attention", hidden_states, self.dropout(attended))
        branch = self.dropout(self.mlp(self.layernorm_after(hidden_states)))
        return self.wp_residual("mlp", hidden_states, branch)


class BertSubLayerEnd(SitedModule):
    """The end of a sub-layer of BERT, which is post-norm: the addition stands inside the LayerNorm."""

    wp_skip: ClassVar[str]
    dense: nn.Module
    dropout: nn.Module
    LayerNorm: nn.Module

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        branch = self.dropout(self.dense(hidden_states))
        return self.LayerNorm(self.wp_residual(self.wp_skip, input_tensor, branch))


class BertSelfOutput(BertSubLayerEnd):
    """The end of BERT's attention."""

    wp_forward_of = f"{MODELS}.bert.modeling_bert.BertSelfOutput"
    wp_skip = "attention"


class BertOutput(BertSubLayerEnd):
    """The end of BERT's MLP."""

    wp_forward_of = f"{MODELS}.bert.modeling_bert.BertOutput"
    wp_skip = "mlp"


class GPT2Block(SitedModule):
    """The pre-norm block of GPT-2, without cross-attention."""

    wp_forward_of = f"{MODELS}.gpt2.modeling_gpt2.GPT2Block"
    ln_1: nn.Module
    ln_2: nn.Module
    attn: nn.Module
    mlp: nn.Module

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = False,
        **kwargs: Any,
    ) -> Tensor:
        if encoder_hidden_states is not None:
            raise ValueError("encoder_hidden_states were given, but this GPT-2 block has no cross-attention")
        attended, _ = self.attn(
            self.ln_1(hidden_states),
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = self.wp_residual("attention", hidden_states, attended)
        return self.wp_residual("mlp", hidden_states, self.mlp(self.ln_2(hidden_states)))


class LlamaDecoderLayer(SitedModule):
    """The pre-norm block of Llama."""

    wp_forward_of = f"{MODELS}.llama.modeling_llama.LlamaDecoderLayer"
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    self_attn: nn.Module
    mlp: nn.Module

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        hidden_states = self.wp_residual("attention", hidden_states, attended)
        return self.wp_residual("mlp", hidden_states, self.mlp(self.post_attention_layernorm(hidden_states)))


def _vit_weights(block: Any) -> BlockWeights:
    attention = block.attention
    query, key, value, output = matrices(attention, "q_proj", "k_proj", "v_proj", "o_proj")
    return BlockWeights(query, key, value, output, matrices(block.mlp, "fc1", "fc2"), attention.head_dim)


def _bert_weights(block: Any) -> BlockWeights:
    query, key, value, output = matrices(block.attention, "self.query", "self.key", "self.value", "output.dense")
    mlp = matrices(block, "intermediate.dense", "output.dense")
    return BlockWeights(query, key, value, output, mlp, block.attention.self.attention_head_size)


def _gpt2_weights(block: Any) -> BlockWeights:
    attention = block.attn
    query, key, value = Matrix(attention.c_attn).split(3)
    mlp = matrices(block.mlp, "c_fc", "c_proj")
    return BlockWeights(query, key, value, Matrix(attention.c_proj), mlp, attention.head_dim)


def _llama_weights(block: Any) -> BlockWeights:
    attention = block.self_attn
    query, key, value, output = matrices(attention, "q_proj", "k_proj", "v_proj", "o_proj")
    mlp = matrices(block.mlp, "gate_proj", "up_proj", "down_proj")
    return BlockWeights(query, key, value, output, mlp, attention.head_dim)


@contextmanager
def _explicit(layer: Any) -> Iterator[None]:
    """Fused kernels return no matrices; transformers' own, "eager" attention does, and ours where it is asked to."""
    before = layer.config._attn_implementation
    if before == IMPLEMENTATION:
        vars(layer)[EXPOSED] = True
        try:
            yield
        finally:
            vars(layer).pop(EXPOSED, None)
        return
    layer.config._attn_implementation = "eager"
    try:
        yield
    finally:
        layer.config._attn_implementation = before


def _returned(layer: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> Tensor:
    weights: Tensor = output[1]
    return weights


def _cross_attention(block: nn.Module) -> str | None:
    return "it has cross-attention, whose skip is not supported" if hasattr(block, "crossattention") else None


FAMILIES = (
    Family(
        name="HuggingFace ViT",
        block=ViTLayer.wp_forward_of,
        skips={"attention": ("", ViTLayer), "mlp": ("", ViTLayer)},
        weights=_vit_weights,
        homes=(f"{MODELS}.vit.modeling_vit",),
        stages={
            "attention input": ("attention", "input"),
            "attention": ("attention", "output"),
            "after attention": ("layernorm_after", "input"),
            "mlp input": ("mlp", "input"),
            "mlp": ("mlp", "output"),
        },
        attention=AttentionLayer("attention", _returned, _explicit),
    ),
    Family(
        name="HuggingFace BERT",
        block=f"{MODELS}.bert.modeling_bert.BertLayer",
        skips={"attention": ("attention.output", BertSelfOutput), "mlp": ("output", BertOutput)},
        weights=_bert_weights,
        homes=(f"{MODELS}.bert.modeling_bert",),
        stages={
            "attention input": ("attention.self", "input"),
            "attention": ("attention.output.dense", "output"),
            "after attention": ("attention", "output"),
            "mlp input": ("intermediate", "input"),
            "mlp": ("output.dense", "output"),
        },
        attention=AttentionLayer("attention.self", _returned, _explicit),
        objection=_cross_attention,
    ),
    Family(
        name="HuggingFace GPT-2",
        block=GPT2Block.wp_forward_of,
        skips={"attention": ("", GPT2Block), "mlp": ("", GPT2Block)},
        weights=_gpt2_weights,
        homes=(f"{MODELS}.gpt2.modeling_gpt2",),
        stages={
            "attention input": ("attn", "input"),
            "attention": ("attn", "output"),
            "after attention": ("ln_2", "input"),
            "mlp input": ("mlp", "input"),
            "mlp": ("mlp", "output"),
        },
        attention=AttentionLayer("attn", _returned, _explicit),
        objection=_cross_attention,
    ),
    Family(
        name="HuggingFace Llama",
        block=LlamaDecoderLayer.wp_forward_of,
        skips={"attention": ("", LlamaDecoderLayer), "mlp": ("", LlamaDecoderLayer)},
        weights=_llama_weights,
        homes=(f"{MODELS}.llama.modeling_llama",),
        stages={
            "attention input": ("self_attn", "input"),
            "attention": ("self_attn", "output"),
            "after attention": ("post_attention_layernorm", "input"),
            "mlp input": ("mlp", "input"),
            "mlp": ("mlp", "output"),
        },
        attention=AttentionLayer("self_attn", _returned, _explicit),
    ),
)
