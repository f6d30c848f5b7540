"""One small model of every family, with an input, and the skipless block written out by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timm
import torch
import transformers
from timm.models.convmixer import ConvMixer
from torch import Tensor, nn

from wellposed.families import library_class

IMAGE = (2, 3, 32, 32)
VOCABULARY = 60
SMALL_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
Forward = Callable[..., Tensor]


@dataclass(frozen=True)
class Specimen:
    """A family's small model, and what is known about it independently of the code under test."""

    family: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    skipless: Forward
    """What a block with its skips cut computes from the block's arguments, written by hand."""
    linears: Callable[[Any, Tensor], dict[str, Tensor]] | None = None
    """The block's linear maps applied to the rows of the identity: y = x W as the papers write it."""
    skips: tuple[str, ...] = ("attention", "mlp")
    names: str = "blocks.{}"

    def output(self, model: nn.Module, inputs: dict[str, Tensor] | None = None) -> Tensor:
        result = model(**(inputs or self.inputs()))
        return result if isinstance(result, Tensor) else result.logits


def images() -> dict[str, Tensor]:
    return {"x": torch.randn(IMAGE, generator=torch.Generator().manual_seed(1))}


def pixel_values() -> dict[str, Tensor]:
    return {"pixel_values": images()["x"]}


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def vit(**arguments: Any) -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", **(SMALL_VIT | arguments))


def dinov2() -> nn.Module:
    return timm.create_model("vit_small_patch14_reg4_dinov2", **SMALL_VIT)


def deit() -> nn.Module:
    return timm.create_model("deit_tiny_distilled_patch16_224", **SMALL_VIT)


def convmixer(**arguments: Any) -> nn.Module:
    settings = {"dim": 16, "depth": 2, "kernel_size": 3, "patch_size": 4, "num_classes": 5}
    return ConvMixer(**(settings | arguments))


def hf_vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            image_size=32,
            patch_size=8,
        )
    )


def bert(**arguments: Any) -> nn.Module:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=32,
            **arguments,
        )
    )


def gpt2(**arguments: Any) -> nn.Module:
    settings = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY}
    settings |= {"bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**(settings | arguments)))


def llama(**arguments: Any) -> nn.Module:
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    settings |= {"intermediate_size": 88, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(settings | arguments)))


def _timm_skipless(block: Any, x: Tensor, **_: Any) -> Tensor:
    x = block.ls1(block.attn(block.norm1(x)))
    return block.ls2(block.mlp(block.norm2(x)))


def _convmixer_skipless(block: Any, x: Tensor) -> Tensor:
    return block.fn(x)


def _hf_vit_skipless(block: Any, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    x = block.attention(block.layernorm_before(x), *arguments, **options)[0]
    return block.mlp(block.layernorm_after(x))


def _bert_skipless(block: Any, x: Tensor, mask: Tensor, *_: Any, **options: Any) -> Tensor:
    x = block.attention.self(x, mask, **options)[0]
    end = block.attention.output
    x = end.LayerNorm(end.dense(x))
    return block.output.LayerNorm(block.output.dense(block.intermediate(x)))


def _gpt2_skipless(block: Any, x: Tensor, past: Any, mask: Tensor, *_: Any, **options: Any) -> Tensor:
    x = block.attn(block.ln_1(x), attention_mask=mask)[0]
    return block.mlp(block.ln_2(x))


def _llama_skipless(block: Any, x: Tensor, **options: Any) -> Tensor:
    x = block.self_attn(
        block.input_layernorm(x), options["position_embeddings"], attention_mask=options["attention_mask"]
    )[0]
    return block.mlp(block.post_attention_layernorm(x))


def _maps(q: Any, k: Any, v: Any, o: Any, mlp: list[Any], eye: Tensor) -> dict[str, Tensor]:
    maps = {"q": q(eye), "k": k(eye), "v": v(eye), "o": o(eye)}
    return maps | {f"mlp{i}": layer(torch.eye(width)) for i, (layer, width) in enumerate(mlp)}


def _timm_linears(block: Any, eye: Tensor) -> dict[str, Tensor]:
    parts = [lambda x, i=i: block.attn.qkv(x).chunk(3, dim=-1)[i] for i in range(3)]
    return _maps(*parts, block.attn.proj, [(block.mlp.fc1, 32), (block.mlp.fc2, 128)], eye)


def _hf_vit_linears(block: Any, eye: Tensor) -> dict[str, Tensor]:
    a = block.attention
    return _maps(a.q_proj, a.k_proj, a.v_proj, a.o_proj, [(block.mlp.fc1, 32), (block.mlp.fc2, 128)], eye)


def _bert_linears(block: Any, eye: Tensor) -> dict[str, Tensor]:
    a = block.attention.self
    mlp = [(block.intermediate.dense, 32), (block.output.dense, 128)]
    return _maps(a.query, a.key, a.value, block.attention.output.dense, mlp, eye)


def _gpt2_linears(block: Any, eye: Tensor) -> dict[str, Tensor]:
    parts = [lambda x, i=i: block.attn.c_attn(x).split(32, dim=-1)[i] for i in range(3)]
    return _maps(*parts, block.attn.c_proj, [(block.mlp.c_fc, 32), (block.mlp.c_proj, 128)], eye)


def _llama_linears(block: Any, eye: Tensor) -> dict[str, Tensor]:
    a, m = block.self_attn, block.mlp
    return _maps(a.q_proj, a.k_proj, a.v_proj, a.o_proj, [(m.gate_proj, 32), (m.up_proj, 32), (m.down_proj, 88)], eye)


ZOO = {
    "vit": Specimen("timm VisionTransformer", vit, images, _timm_skipless, _timm_linears),
    "deit": Specimen("timm VisionTransformer", deit, images, _timm_skipless, _timm_linears),
    "dinov2": Specimen("timm VisionTransformer", dinov2, images, _timm_skipless, _timm_linears),
    "convmixer": Specimen(
        "timm ConvMixer", convmixer, images, _convmixer_skipless, skips=("attention",), names="blocks.{}.0"
    ),
    "hf_vit": Specimen(
        "HuggingFace ViT", hf_vit, pixel_values, _hf_vit_skipless, _hf_vit_linears, names="vit.layers.{}"
    ),
    "bert": Specimen("HuggingFace BERT", bert, tokens, _bert_skipless, _bert_linears, names="bert.encoder.layer.{}"),
    "gpt2": Specimen("HuggingFace GPT-2", gpt2, tokens, _gpt2_skipless, _gpt2_linears, names="transformer.h.{}"),
    "llama": Specimen("HuggingFace Llama", llama, tokens, _llama_skipless, _llama_linears, names="model.layers.{}"),
}
ATTENTIVE = {name: specimen for name, specimen in ZOO.items() if name != "convmixer"}


def block_calls(specimen: Specimen, model: nn.Module) -> list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]]:
    """Each block of `model` with the arguments it was called with and what it returned."""
    calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]] = []

    def record(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        calls.append((module, arguments, options, output))

    blocks = [model.get_submodule(specimen.names.format(i)) for i in range(2)]
    handles = [block.register_forward_hook(record, with_kwargs=True) for block in blocks]
    specimen.output(model)
    for handle in handles:
        handle.remove()
    assert len(calls) == 2
    return calls


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def library_classes(model: nn.Module) -> list[type]:
    return [library_class(module) for module in model.modules()]
