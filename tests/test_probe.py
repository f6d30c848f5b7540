"""A look at every block, against what can be computed by hand."""

import pytest
import torch
from torch.nn import functional as F

import wellposed as wp
from wellposed.diagnosis import probe
from wellposed.diagnosis.probe import mean_cosine
from zoo import IMAGE, convmixer, vit

IMAGES = torch.randn(IMAGE, generator=torch.Generator().manual_seed(3))
LABELS = torch.tensor([1, 3])


def test_against_the_definitions() -> None:
    model = vit(depth=3).eval()
    states = probe(model, IMAGES, LABELS)
    assert [state.name for state in states] == ["blocks.0", "blocks.1", "blocks.2"]
    x = model._pos_embed(model.patch_embed(IMAGES))
    F.cross_entropy(model(IMAGES), LABELS).backward()
    for state, block in zip(states, model.blocks, strict=True):
        q, k, _ = block.attn.qkv(block.norm1(x)).detach().chunk(3, -1)
        heads = [(q[..., i : i + 8] @ k[..., i : i + 8].mT / 8**0.5).softmax(-1) for i in range(0, 32, 8)]
        diagonal = torch.stack(heads).diagonal(dim1=-2, dim2=-1).mean()
        assert state.attention_diagonal == pytest.approx(float(diagonal), rel=1e-5)
        x = block(x).detach()
        conditions = [torch.linalg.cond(tokens.detach().double()) for tokens in x]
        assert state.token_condition == pytest.approx(float(torch.stack(conditions).median()), rel=1e-3)
        cosines = [
            F.cosine_similarity(a, b, dim=0) for t in x for i, a in enumerate(t) for j, b in enumerate(t) if i != j
        ]
        assert state.token_cosine == pytest.approx(float(torch.stack(cosines).mean()), rel=1e-4)
        first, second = x.mean(1)
        assert state.image_difference == pytest.approx(1 - float(F.cosine_similarity(first, second, dim=0)), rel=1e-4)
        norm = torch.stack([param.grad.norm() for param in block.parameters()]).norm()
        assert state.gradient_norm == pytest.approx(float(norm), rel=1e-4)


def test_neither_gradients_nor_hooks_are_left() -> None:
    model = vit()
    probe(model, IMAGES, LABELS)
    assert all(param.grad is None for param in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_cutting_the_skips_makes_tokens_alike_and_conditioning_helps() -> None:
    default, conditioned = (wp.cut_skips(vit(depth=6, embed_dim=64).eval()) for _ in range(2))
    wp.condition_(conditioned)
    last, better = (probe(model, IMAGES, LABELS)[0] for model in (default, conditioned))
    assert last.token_cosine > 0.99
    assert better.token_cosine < 0.9
    assert better.token_condition < last.token_condition
    assert better.attention_diagonal is not None
    assert last.attention_diagonal is not None
    assert better.attention_diagonal > 2 * last.attention_diagonal


def test_a_model_without_attention() -> None:
    states = probe(convmixer().eval(), IMAGES, LABELS)
    assert {state.attention_diagonal for state in states} == {None}
    assert all(state.token_condition > 1 for state in states)


def test_tokens_that_are_all_the_same() -> None:
    assert float(mean_cosine(torch.ones(2, 5, 3))) == pytest.approx(1)
    assert float(mean_cosine(torch.eye(4)[None])) == pytest.approx(0, abs=1e-6)
