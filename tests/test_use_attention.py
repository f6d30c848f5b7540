"""Models without softmax, family by family, against their attention layers written out by hand."""

import copy
import json
import logging
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import wellposed as wp
from wellposed.attention import Polynomial, Relu, Sigmoid, Softmax, use_attention
from wellposed.attention.sites import Attend
from wellposed.diagnosis.watching import attention_seen
from wellposed.errors import (
    InvalidArgumentError,
    ModelFileError,
    RecipeMismatchError,
    UnknownFamilyError,
    UnsuitableModelError,
)
from wellposed.families import IMPLEMENTATION, LOG_GAIN, attentions, set_sites, sites_of
from wellposed.recipes import replay
from zoo import (
    ZOO,
    bert,
    classes,
    convmixer,
    deit,
    gpt2,
    hf_vit,
    images,
    library_classes,
    llama,
    pixel_values,
    tokens,
    vit,
)

SMALL_SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (2, 1), "num_heads": (2, 4)}
SMALL_XCIT = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
ENTRY = {"change": "use_attention", "kind": "polynomial", "degree": 3, "scale": None, "learnable": False}


def swin(**arguments: Any) -> nn.Module:
    return timm.create_model("swin_tiny_patch4_window7_224", **(SMALL_SWIN | {"num_classes": 5} | arguments))


def xcit(**arguments: Any) -> nn.Module:
    return timm.create_model("xcit_nano_12_p8_224", **(SMALL_XCIT | arguments))


def normed_vit() -> nn.Module:
    return vit(qk_norm=True)


def heads(x_BND: Tensor, count: int) -> Tensor:
    return x_BND.unflatten(-1, (count, -1)).transpose(1, 2)


def cubed(s: Tensor, visible: Tensor | None = None) -> Tensor:
    """x^3 / sqrt(n), n the number of keys in sight."""
    if visible is None:
        return s**3 / math.sqrt(s.shape[-1])
    visible = visible.expand(s.shape)
    return torch.where(visible, s**3 / visible.sum(-1, keepdim=True).clamp(min=1).sqrt(), 0.0)


def _timm(layer: Any, x: Tensor, **_: Any) -> Tensor:
    q, k, v = (heads(part, 4) for part in layer.qkv(x).chunk(3, -1))
    o = cubed(layer.q_norm(q) @ layer.k_norm(k).mT / math.sqrt(8)) @ v
    return layer.proj(o.transpose(1, 2).flatten(2))


def _swin(layer: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k, v = (heads(part, layer.num_heads) for part in layer.qkv(x).chunk(3, -1))
    table, index = layer.relative_position_bias_table, layer.relative_position_index
    s = q @ k.mT / math.sqrt(q.shape[-1]) + table[index].permute(2, 0, 1)
    visible = None
    if mask is not None:  # windows of one image follow each other
        visible = torch.stack([mask[i % len(mask)] > -1 for i in range(len(x))])[:, None]
    return layer.proj((cubed(s, visible) @ v).transpose(1, 2).flatten(2))


def _xcit(layer: Any, x: Tensor) -> Tensor:
    if hasattr(layer, "qkv"):
        q, k, v = (heads(part, 4).mT for part in layer.qkv(x).chunk(3, -1))
        q, k = (each / each.norm(dim=-1, keepdim=True) for each in (q, k))
        o = (q @ k.mT * layer.temperature) ** 3 / math.sqrt(8) @ v  # 8 channels attend to each other
        return layer.proj(o.mT.transpose(1, 2).flatten(2))
    q, k, v = heads(layer.q(x[:, :1]), 4), heads(layer.k(x), 4), heads(layer.v(x), 4)
    return layer.proj((cubed(q @ k.mT / math.sqrt(8)) @ v).transpose(1, 2).flatten(2))


def in_sight(causal: bool) -> Tensor:
    visible = tokens()["attention_mask"].bool()[:, None, None]
    return visible & torch.ones(12, 12, dtype=torch.bool).tril() if causal else visible


def _hf_vit(layer: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    q, k, v = (heads(part(x), 4) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    return layer.o_proj((cubed(q @ k.mT / math.sqrt(8)) @ v).transpose(1, 2).flatten(2))


def _bert(layer: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    q, k, v = (heads(part(x), 4) for part in (layer.query, layer.key, layer.value))
    return (cubed(q @ k.mT / math.sqrt(8), in_sight(False)) @ v).transpose(1, 2).flatten(2)


def _gpt2(layer: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    q, k, v = (heads(part, 4) for part in layer.c_attn(x).chunk(3, -1))
    return layer.c_proj((cubed(q @ k.mT / math.sqrt(8), in_sight(True)) @ v).transpose(1, 2).flatten(2))


def _llama(layer: Any, hidden_states: Tensor, position_embeddings: Any, **__: Any) -> Tensor:
    q, k, v = (heads(part(hidden_states), n) for part, n in ((layer.q_proj, 4), (layer.k_proj, 2), (layer.v_proj, 2)))
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    k, v = (torch.stack([x[:, 0], x[:, 0], x[:, 1], x[:, 1]], 1) for x in (k, v))
    return layer.o_proj((cubed(q @ k.mT / math.sqrt(8), in_sight(True)) @ v).transpose(1, 2).flatten(2))


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    by_hand: Callable[..., Tensor]
    inputs: Callable[[], dict[str, Tensor]] = images

    def output(self, model: nn.Module) -> Tensor:
        result = model(**self.inputs())
        return result if isinstance(result, Tensor) else result.logits


CASES = {
    "vit": Case(vit, _timm),
    "normed_vit": Case(normed_vit, _timm),
    "deit": Case(deit, _timm),
    "swin": Case(swin, _swin),
    "xcit": Case(xcit, _xcit),
    "hf_vit": Case(hf_vit, _hf_vit, pixel_values),
    "bert": Case(bert, _bert, tokens),
    "gpt2": Case(gpt2, _gpt2, tokens),
    "llama": Case(llama, _llama, tokens),
}
every_family = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
causal_models = pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
SPECS = (Polynomial(1), Polynomial(2), Polynomial(3), Polynomial(3, scale=1.0), Relu(), Sigmoid())


def sharpened(model: nn.Module) -> nn.Module:
    """With larger weights: as libraries draw them, logits are small, and their cubes as good as nothing."""
    with torch.no_grad():
        for _, layer, _ in attentions(model):
            for name, weight in layer.named_parameters():
                if weight.ndim == 2 and "bias" not in name:
                    weight.normal_(std=0.2)
    return model.eval()


def layer_calls(case: Case, model: nn.Module) -> list[tuple[nn.Module, Tensor, Tensor]]:
    """Each attention layer with what it returned, and what it should have."""
    calls = []

    def record(layer: nn.Module, arguments: Any, options: Any, output: Any) -> None:
        own = output[0] if isinstance(output, tuple) else output
        calls.append((layer, own, case.by_hand(layer, *arguments, **options)))

    found = attentions(model)
    handles = [layer.register_forward_hook(record, with_kwargs=True) for _, layer, _ in found]
    case.output(model)
    for handle in handles:
        handle.remove()
    assert len(calls) == len(found)
    return calls


@every_family
def test_is_the_hand_written_layer(case: Case) -> None:
    model = sharpened(case.make())
    assert use_attention(model, Polynomial(3)) is model
    for _, output, expected in layer_calls(case, model):
        assert expected.abs().max() > 1e-3
        rows = tokens()["attention_mask"].bool() if case.inputs is tokens else slice(None)
        torch.testing.assert_close(output[rows], expected[rows], rtol=1e-4, atol=1e-5)


@every_family
def test_sited_forward_with_softmax_is_the_librarys(case: Case) -> None:
    """The forwards in `families` are copies of the libraries'; where a library changes its own, this notices."""
    model = sharpened(case.make())
    expected = case.output(model)
    for _, module, site in attentions(model):
        set_sites(module, site.forward(), replace(sites_of(module), attention=Attend(Softmax())))
        if hasattr(module, "config"):
            module.config._attn_implementation = IMPLEMENTATION
    torch.testing.assert_close(case.output(model), expected, rtol=1e-5, atol=1e-6)


@every_family
def test_softmax_gives_back_the_librarys_model(case: Case) -> None:
    model = sharpened(case.make())
    before, types, keys = case.output(model), classes(model), list(model.state_dict())
    parameters = list(model.parameters())
    outputs = [case.output(use_attention(model, spec)) for spec in SPECS]
    for i, output in enumerate(outputs):
        assert output.isfinite().all()
        assert not any(torch.allclose(output, other, atol=1e-5) for other in [before, *outputs[:i]])
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert library_classes(model) == types
    assert [t.__name__ for t in classes(model)] == [t.__name__ for t in types]
    use_attention(model, Softmax())
    assert classes(model) == types
    assert wp.recipe(model) == []
    assert torch.equal(case.output(model), before)


@every_family
def test_learnable_scale(case: Case) -> None:
    model = use_attention(sharpened(case.make()), Polynomial(3))
    fixed, keys = case.output(model), set(model.state_dict())
    use_attention(model, Polynomial(3, learnable=True))
    torch.testing.assert_close(case.output(model), fixed, rtol=0, atol=0)
    added = {f"{name}.{LOG_GAIN}" for name, _, _ in attentions(model)}
    assert set(model.state_dict()) == keys | added
    case.output(model).square().sum().backward()
    for _, layer, site in attentions(model):
        gain = layer.get_parameter(LOG_GAIN)
        assert gain.shape == (site.heads(layer),)
        assert gain.grad is not None
        assert gain.grad.any()
        gain.data.fill_(math.log(2))
    doubled = case.output(model)
    assert not torch.allclose(doubled, fixed, atol=1e-5)
    twice = Polynomial(3, scale=2 / math.sqrt(17))
    if case.by_hand is _timm and case.make is not deit:  # 17 tokens, without a mask
        torch.testing.assert_close(case.output(use_attention(model, twice)), doubled)
    assert set(use_attention(model, Relu()).state_dict()) == keys


@every_family
def test_saved_and_loaded(case: Case, tmp_path: Path) -> None:
    model = use_attention(sharpened(case.make()), Polynomial(2, learnable=True))
    for _, layer, _ in attentions(model):
        nn.init.normal_(layer.get_parameter(LOG_GAIN))
    arguments = {swin: SMALL_SWIN | {"num_classes": 5}, xcit: SMALL_XCIT}.get(case.make)
    wp.save(model, tmp_path, arguments)
    again = wp.load(tmp_path)
    assert wp.recipe(again) == [{**ENTRY, "degree": 2, "learnable": True}]
    assert torch.equal(case.output(again), case.output(model))
    with pytest.raises(RecipeMismatchError, match="'use_attention'"):
        wp.load(tmp_path, case.make())
    with pytest.raises(RecipeMismatchError, match="'degree': 3"):
        wp.load(tmp_path, use_attention(case.make(), Polynomial(3, learnable=True)))
    wp.load(tmp_path, use_attention(case.make(), Polynomial(2, learnable=True)))


@every_family
def test_copies(case: Case) -> None:
    model = use_attention(sharpened(case.make()), Polynomial(3))
    expected = case.output(model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert wp.recipe(again) == [ENTRY]
        assert torch.equal(case.output(again), expected)
        softmax = case.output(use_attention(again, Softmax()))
        assert not torch.allclose(softmax, expected, atol=1e-5)
    assert torch.equal(case.output(model), expected)


@every_family
def test_half_and_autocast(case: Case) -> None:
    model = use_attention(sharpened(case.make()), Polynomial(3, learnable=True))
    expected = case.output(model)
    near = 0.1 * expected.abs().max().item()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(case.output(model).float(), expected, rtol=0.1, atol=near)
    model.bfloat16()
    inputs = {name: x.bfloat16() if x.is_floating_point() else x for name, x in case.inputs().items()}
    output = replace(case, inputs=lambda: inputs).output(model)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=0.1, atol=near)


@pytest.mark.parametrize("name", ["vit", "llama"])
def test_compiles(name: str) -> None:
    case = CASES[name]
    model = sharpened(case.make())
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        plain = case.output(compiled)
        use_attention(compiled, Polynomial(3))
        output = case.output(compiled)
        torch.testing.assert_close(output, case.output(model), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(output, plain, atol=1e-3), "what was compiled before is compiled anew"
    torch.compiler.reset()


def test_composes_in_any_order() -> None:
    def build(*changes: Callable[[nn.Module], Any]) -> nn.Module:
        torch.manual_seed(0)
        model = vit().eval()
        for change in changes:
            torch.manual_seed(1)
            change(model)
        return model

    changes: list[Callable[[nn.Module], Any]] = [
        wp.cut_skips,
        lambda model: wp.gray_tokens(model, "dct"),
        lambda model: use_attention(model, Polynomial(3, learnable=True)),
        wp.condition_,
    ]
    one, other = build(*changes), build(*reversed(changes))
    assert wp.recipe(one) == wp.recipe(other)
    assert [entry["change"] for entry in wp.recipe(one)] == ["cut_skips", "gray_tokens", "use_attention", "condition_"]
    assert torch.equal(one(**images()), other(**images()))
    assert not one.blocks[0].attn.get_parameter(LOG_GAIN).any(), "condition_ leaves the scale of the rule"
    block, x = one.blocks[0], torch.randn(2, 17, 32)
    attended = _timm(block.attn, block.norm1(x))
    torch.testing.assert_close(block(x), block.mlp(block.norm2(attended)), rtol=1e-4, atol=1e-4)


def test_conditioned_skipless_llama_trains_a_step() -> None:
    model = use_attention(wp.condition_(wp.cut_skips(llama())), Polynomial(3, learnable=True))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    ids = tokens()["input_ids"]
    losses = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


# --- masks, caches and what else transformers hands over


def padded(ids: Tensor, left: int, right: int) -> dict[str, Tensor]:
    mask = F.pad(torch.ones_like(ids), (left, right))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": F.pad(ids, (left, right), value=5), "attention_mask": mask, "position_ids": positions}


@pytest.mark.parametrize("spec", SPECS, ids=str)
@causal_models
def test_padding_changes_nothing_in_causal_models(make: Callable[[], nn.Module], spec: Any) -> None:
    model = use_attention(sharpened(make()), spec)
    ids = tokens()["input_ids"][:1, :7]
    alone = model(input_ids=ids).logits
    for left, right in ((3, 0), (0, 4), (2, 2)):
        logits = model(**padded(ids, left, right)).logits[:, left : left + 7]
        torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-5)
    blind = model(input_ids=padded(ids, 3, 0)["input_ids"]).logits[:, 3:]
    assert not torch.allclose(blind, alone, atol=1e-3), "without its mask, padding is seen"


def test_padding_changes_nothing_in_bert() -> None:
    model = use_attention(sharpened(bert()), Polynomial(3))
    ids = tokens()["input_ids"][:1, :7]
    both = F.pad(ids, (0, 4), value=5), F.pad(torch.ones_like(ids), (0, 4))
    together = model(
        input_ids=torch.cat([both[0], tokens()["input_ids"][1:, :11]]),
        attention_mask=torch.cat([both[1], torch.ones(1, 11, dtype=torch.long)]),
    ).logits
    torch.testing.assert_close(together[:1], model(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


@causal_models
def test_cache(make: Callable[[], nn.Module]) -> None:
    model = use_attention(sharpened(make()), Polynomial(3))
    ids = tokens()["input_ids"]
    whole, past, steps = model(input_ids=ids).logits, None, []
    for first, last in ((0, 4), (4, 7), (7, 8), (8, 12)):  # also several tokens after others
        step = model(input_ids=ids[:, first:last], past_key_values=past, use_cache=True)
        past = step.past_key_values
        steps.append(step.logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@causal_models
def test_generation_of_a_padded_batch(make: Callable[[], nn.Module], cache: str) -> None:
    model: Any = use_attention(sharpened(make()), Polynomial(3))
    ids = tokens()["input_ids"][:1, :5]
    how = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
    expected = ids
    for _ in range(6):
        expected = torch.cat([expected, model(input_ids=expected).logits[:, -1:].argmax(-1)], 1)
    batch = padded(ids, 3, 0)
    longer = tokens()["input_ids"][1:, :8]
    both = torch.cat([batch["input_ids"], longer]), torch.cat([batch["attention_mask"], torch.ones_like(longer)])
    implementation = {} if cache == "dynamic" else {"cache_implementation": "static", "disable_compile": True}
    made = model.generate(input_ids=both[0], attention_mask=both[1], **how, **implementation)
    assert made[0, 3:].tolist() == expected[0].tolist()


def test_packed_sequences() -> None:
    model = use_attention(sharpened(llama()), Polynomial(3))
    first, second = tokens()["input_ids"][:1, :5], tokens()["input_ids"][1:, :7]
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    together = model(input_ids=torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits
    apart = torch.cat([model(input_ids=each).logits for each in (first, second)], 1)
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)


def test_a_mask_of_ones_own() -> None:
    model = use_attention(sharpened(gpt2()), Polynomial(3))
    ids = tokens()["input_ids"]
    visible = torch.ones(12, 12, dtype=torch.bool).tril()[None, None].expand(2, 1, 12, 12)
    added = torch.zeros(2, 1, 12, 12).masked_fill(~visible, torch.finfo(torch.float32).min)
    expected = model(input_ids=ids).logits
    for mask in (visible, added):
        torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits, expected, rtol=1e-4, atol=1e-5)


def test_timms_masks() -> None:
    model = use_attention(sharpened(vit()), Polynomial(3))
    layer, x = model.blocks[0].attn, torch.randn(2, 6, 32)
    visible = torch.ones(6, 6, dtype=torch.bool).tril()
    causal = layer(x, is_causal=True)
    torch.testing.assert_close(layer(x, attn_mask=visible), causal)
    torch.testing.assert_close(layer(x, attn_mask=torch.zeros(6, 6).masked_fill(~visible, -torch.inf)), causal)
    torch.testing.assert_close(layer(x[:, :1])[:, 0], causal[:, 0])


def test_gradient_checkpointing() -> None:
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model: Any = use_attention(sharpened(llama()), Polynomial(3)).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(**tokens(), use_cache=False).logits.square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])


def test_another_implementation_afterwards_is_not_silent() -> None:
    model: Any = use_attention(gpt2().eval(), Polynomial(3))
    model.set_attn_implementation("eager")
    with pytest.raises(UnsuitableModelError, match="'eager', which would compute softmax"):
        model(**tokens())
    model.set_attn_implementation(IMPLEMENTATION)
    expected = model(**tokens()).logits
    model.set_attn_implementation("eager")
    use_attention(model, Polynomial(3))
    assert torch.equal(model(**tokens()).logits, expected)
    model.set_attn_implementation("sdpa")
    assert use_attention(model, Softmax()).config._attn_implementation == "sdpa", "chosen since, and kept"


def test_the_implementation_before_comes_back() -> None:
    model: Any = gpt2().eval()
    model.set_attn_implementation("eager")
    use_attention(model, Polynomial(3))
    use_attention(model, Relu())
    assert model.config._attn_implementation == IMPLEMENTATION
    again = copy.deepcopy(model)
    for each in (model, again):
        use_attention(each, Softmax())
        assert each.config._attn_implementation == "eager"


def test_what_the_interface_does_not_know() -> None:
    from wellposed.families.interface import attend

    model: Any = use_attention(gpt2(), Polynomial(3))
    q = torch.randn(1, 4, 3, 8)
    with pytest.raises(UnsuitableModelError, match="softcap"):
        attend(model.transformer.h[0].attn, q, q, q, None, softcap=30.0)


def test_unpickling_alone_registers_with_transformers(tmp_path: Path) -> None:
    model = use_attention(sharpened(gpt2()), Polynomial(3))
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    code = (
        "import json, pickle, sys, torch\n"
        "model = pickle.load(open(sys.argv[1], 'rb'))\n"
        "inputs = {name: torch.tensor(value) for name, value in json.loads(sys.argv[2]).items()}\n"
        "print(json.dumps(model(**inputs).logits.tolist()))\n"
    )
    inputs = {name: value.tolist() for name, value in tokens().items()}
    arguments = [sys.executable, "-c", code, str(tmp_path / "model.pickle"), json.dumps(inputs)]
    answer = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    torch.testing.assert_close(torch.tensor(json.loads(answer)), model(**tokens()).logits, rtol=1e-4, atol=1e-5)


# --- some layers only


@every_family
def test_some_layers_only(case: Case) -> None:
    model = sharpened(case.make())
    name, layer, _ = attentions(model)[0]
    own, rest = [], []
    layer.register_forward_hook(lambda _, __, output: own.append(output[0] if isinstance(output, tuple) else output))
    last = attentions(model)[-1][1]
    last.register_forward_hook(lambda _, __, output: rest.append(output[0] if isinstance(output, tuple) else output))
    plain = case.output(model)
    use_attention(model, Polynomial(3), only=[name])
    changed = case.output(model)
    assert not torch.allclose(own[0], own[1], atol=1e-4)
    assert not torch.allclose(changed, plain, atol=1e-6)
    assert wp.recipe(model) == [{**ENTRY, "only": [name]}]
    fresh = case.make().eval()
    replay(fresh, wp.recipe(model))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(case.output(fresh), changed)
    # the layers without a site compute softmax as before, from the same mask
    layer.register_forward_hook(lambda _, __, output: (own[0], *output[1:]) if isinstance(output, tuple) else own[0])
    case.output(model)
    rows = tokens()["attention_mask"].bool() if case.inputs is tokens else slice(None)
    torch.testing.assert_close(rest[-1][rows], rest[0][rows], rtol=1e-4, atol=1e-5)


@causal_models
def test_layers_without_a_site_with_padding_and_cache(make: Callable[[], nn.Module]) -> None:
    model = sharpened(make())
    names = [name for name, _, _ in attentions(model)]
    use_attention(model, Polynomial(3), only=names[:1])
    ids = tokens()["input_ids"][:1, :7]
    alone = model(input_ids=ids).logits
    torch.testing.assert_close(model(**padded(ids, 3, 2)).logits[:, 3:10], alone, rtol=1e-4, atol=1e-5)
    first = model(input_ids=ids[:, :3], use_cache=True)
    second = model(input_ids=ids[:, 3:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(second, alone[:, 3:], rtol=1e-4, atol=1e-5)


def test_parts_of_a_model() -> None:
    model: Any = sharpened(gpt2())
    plain = model(**tokens()).logits
    use_attention(model.transformer.h[1], Polynomial(3))
    assert wp.recipe(model) == [{**ENTRY, "only": ["transformer.h.1.attn"]}]
    use_attention(model.transformer.h[1], Softmax())
    rows = tokens()["attention_mask"].bool()
    torch.testing.assert_close(model(**tokens()).logits[rows], plain[rows], rtol=1e-4, atol=1e-5)
    use_attention(model, Softmax())
    assert model.config._attn_implementation == "sdpa"
    two = nn.ModuleDict({"student": vit(), "teacher": vit()})
    use_attention(two["student"], Relu())
    assert [entry["only"] for entry in wp.recipe(two)] == [["student.blocks.0.attn", "student.blocks.1.attn"]]
    assert wp.recipe(two["teacher"]) == []


def test_several_specs_in_one_model() -> None:
    model = use_attention(vit(), Polynomial(3))
    use_attention(model, Sigmoid(), only=["blocks.1.attn"])
    assert [(entry["kind"], entry["only"]) for entry in wp.recipe(model)] == [
        ("polynomial", ["blocks.0.attn"]),
        ("sigmoid", ["blocks.1.attn"]),
    ]


# --- looking at it


@pytest.mark.parametrize("name", ["vit", "normed_vit", "hf_vit", "bert", "gpt2", "llama"])
def test_the_matrices_are_those_it_multiplies_by(name: str) -> None:
    case = CASES[name]
    model = use_attention(sharpened(case.make()), Polynomial(3, learnable=True))
    layers = [layer for _, layer, _ in attentions(model)]
    nn.init.normal_(layers[0].get_parameter(LOG_GAIN))
    with attention_seen(model) as seen:
        expected = case.output(model)
    assert all("wp_exposed" not in vars(layer) for layer in layers)
    values: list[Tensor] = []
    where = {"vit": "qkv", "normed_vit": "qkv", "gpt2": "c_attn", "bert": "value"}.get(name, "v_proj")
    layers[0].get_submodule(where).register_forward_hook(lambda _, __, output: values.append(output))
    outputs: list[Any] = []
    layers[0].register_forward_hook(lambda _, __, output: outputs.append(output))
    assert torch.equal(case.output(model), expected)
    v = heads(values[0].chunk(3, -1)[2] if values[0].shape[-1] == 96 else values[0], 2 if name == "llama" else 4)
    o = (seen[0] @ v.repeat_interleave(4 // v.shape[1], 1)).transpose(1, 2).flatten(2)
    last = {"vit": "proj", "normed_vit": "proj", "gpt2": "c_proj", "bert": ""}.get(name, "o_proj")
    result = layers[0].get_submodule(last)(o) if last else o
    own = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    torch.testing.assert_close(result, own, rtol=1e-4, atol=1e-5)


def test_the_matrices_of_a_mixed_model_are_softmax_where_it_is() -> None:
    model = sharpened(gpt2())
    use_attention(model, Polynomial(3), only=["transformer.h.0.attn"])
    ids = tokens()["input_ids"]
    with attention_seen(model) as seen:
        model(input_ids=ids)
    torch.testing.assert_close(seen[1].sum(-1), torch.ones(2, 4, 12))
    assert not seen[1].triu(1).any()
    assert not torch.allclose(seen[0].sum(-1), torch.ones(2, 4, 12), atol=1e-2)


def test_diagnosis() -> None:
    report = wp.diagnose(use_attention(sharpened(vit()), Polynomial(3)), images()["x"])
    measured = report.blocks[0].attention
    assert measured is not None
    assert 0 < measured.frobenius < math.inf


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("spec", [Polynomial(1), Polynomial(3), Sigmoid()], ids=str)
def test_jacobians(spec: Any, place: str) -> None:
    model: Any = use_attention(sharpened(vit()), spec)
    layer, x = model.blocks[0].attn, torch.randn(1, 4, 32)
    dense = torch.autograd.functional.jacobian(layer, x).reshape(128, 128)
    measured = wp.jacobian_spectrum(layer.to(place), x.to(place), k=8).largest
    torch.testing.assert_close(measured.double().cpu(), torch.linalg.svdvals(dense.double())[:8], rtol=1e-3, atol=1e-4)


# --- dropout


@pytest.mark.parametrize(
    "make",
    [lambda: gpt2(attn_pdrop=0.5, resid_pdrop=0, embd_pdrop=0), lambda: vit(attn_drop_rate=0.5)],
    ids=["gpt2", "vit"],
)
def test_dropout_says_what_it_costs_and_works(make: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    with caplog.at_level(logging.WARNING):
        use_attention(sharpened(model), Polynomial(3))
    said = [record for record in caplog.records if record.name == "wellposed.attention.replacing"]
    assert len(said) == 1
    assert "0.attn and 1 more drop 0.5 of their attention weights" in caplog.text
    inputs = tokens() if hasattr(model, "config") else images()

    def logits() -> Tensor:
        result = model(**inputs)
        return result if isinstance(result, Tensor) else result.logits

    assert torch.equal(logits(), logits())
    model.train()
    assert not torch.allclose(logits(), logits(), atol=1e-5)
    caplog.clear()
    replay(make(), wp.recipe(model))
    use_attention(model, Softmax())
    assert not caplog.records, "said once, not for every file that is written or read"


# --- refusals


@pytest.mark.parametrize("spec", ["polynomial", 3, None, Polynomial, Attend(Polynomial(3))], ids=str)
def test_no_spec(spec: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"expected Polynomial\(3\)"):
        use_attention(vit(), spec)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (convmixer, "ConvMixer has no known attention layer.*timm Swin"),
        (lambda: nn.Linear(2, 2), "Linear has no known attention layer"),
        (lambda: gpt2(add_cross_attention=True), "cross-attention"),
        (lambda: bert(is_decoder=True, add_cross_attention=True), "crossattention is cross-attention"),
        (lambda: timm.create_model("beit_base_patch16_224", depth=1), "Beit has no known attention layer"),
        (lambda: timm.create_model("cait_xxs24_224", depth=1, embed_dim=32, num_heads=4), "timm.models.cait"),
        (lambda: timm.create_model("swinv2_tiny_window8_256", depths=(1,), embed_dim=12, num_heads=(2,)), "no known"),
    ],
    ids=["convmixer", "linear", "cross", "bert cross", "beit", "cait", "swinv2"],
)
def test_unknown_models(make: Callable[[], nn.Module], message: str) -> None:
    with torch.device("meta"):
        model = make()
    types = classes(model)
    with pytest.raises(UnknownFamilyError, match=message):
        use_attention(model, Polynomial(3))
    assert classes(model) == types


def test_a_stranger_among_known_layers() -> None:
    model = vit()
    model.blocks[1].attn = timm.layers.AttentionRope(32, 4)
    with pytest.raises(UnknownFamilyError, match=r"blocks.1 has a timm.layers.attention.AttentionRope in its place"):
        use_attention(model, Polynomial(3))
    assert wp.recipe(model) == []


def test_a_forward_on_the_instance() -> None:
    model = vit()
    model.blocks[1].attn.forward = model.blocks[1].attn.forward
    with pytest.raises(UnsuitableModelError, match="forward replaced on the instance"):
        use_attention(model, Polynomial(3))
    assert wp.recipe(model) == []


def test_names_that_are_none() -> None:
    with pytest.raises(InvalidArgumentError, match=r"blocks.0.attn, blocks.1.attn"):
        use_attention(vit(), Polynomial(3), only=["blocks.7.attn"])
    with pytest.raises(InvalidArgumentError, match="expected a torch"):
        use_attention("vit", Polynomial(3))


@pytest.mark.parametrize(
    "arguments",
    [{"kind": "elu"}, {"kind": "polynomial", "degree": 4}, {"kind": "relu", "degree": 1}, {"degree": 3}, {"kind": 3}],
    ids=str,
)
def test_entries_that_do_not_fit_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match="recipe entry"):
        replay(vit(), [{"change": "use_attention", **arguments}])


def test_every_family_with_attention_is_covered() -> None:
    assert {specimen.family for specimen in ZOO.values()} - {"timm ConvMixer"} <= {
        site.models for case in CASES.values() for _, _, site in attentions(case.make())
    }
