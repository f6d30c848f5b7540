"""Optimizers by name and their learning rates over a run."""

import math

import pytest
import torch
from torch import nn

import wellposed as wp
from wellposed.errors import InvalidArgumentError
from wellposed.optim import cosine_with_warmup, make_optimizer
from zoo import vit


@pytest.mark.parametrize("name", ["adamw", "soap", "muon"])
def test_what_is_decayed(name: str) -> None:
    """With no gradient to follow, one step multiplies decayed weights by 1 - lr * decay and leaves the others alone."""
    model = vit()
    before = {key: param.detach().clone() for key, param in model.named_parameters()}
    optimizer = make_optimizer(name, model, lr=0.1, weight_decay=0.5)
    for _ in range(2 if name == "soap" else 1):  # SOAP's first step only builds its bases
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
    for key, param in model.named_parameters():
        decayed = param.ndim > 1 and key not in {"pos_embed", "cls_token"}
        torch.testing.assert_close(param.detach(), before[key] * (0.95 if decayed else 1), msg=key)


def test_soap_gets_its_options_and_others_ignore_them() -> None:
    options = {"precondition_frequency": 3, "max_precond_dim": 7}
    soap = make_optimizer("soap", vit(), **options)
    assert isinstance(soap, wp.SOAP)
    assert {group["precondition_frequency"] for group in soap.param_groups} == {3}
    assert {group["lr"] for group in soap.param_groups} == {3e-3}
    assert {group["betas"] for group in make_optimizer("adamw", vit(), **options).param_groups} == {(0.9, 0.999)}


def test_muon_is_that_of_torch_on_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    ours = nn.Linear(24, 16, bias=False)
    theirs = nn.Linear(24, 16, bias=False)
    theirs.load_state_dict(ours.state_dict())
    start = ours.weight.detach().clone()
    optimizers = [
        make_optimizer("muon", ours, lr=0.01, weight_decay=0.1),
        torch.optim.Muon(theirs.parameters(), lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ]
    for _ in range(5):
        gradient = torch.randn(16, 24, generator=generator)
        for layer, optimizer in zip((ours, theirs), optimizers, strict=True):
            layer.weight.grad = gradient.clone()
            optimizer.step()
    moved = (theirs.weight - start).norm()
    assert (ours.weight - theirs.weight).norm() < 0.02 * moved  # Newton-Schulz in bfloat16 on both sides


def test_unknown_names() -> None:
    with pytest.raises(InvalidArgumentError, match=r"optimizer='sgd': expected one of adamw, soap, muon"):
        make_optimizer("sgd", vit())


def test_the_cosine_is_that_of_torch() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    for step in range(50):
        assert math.isclose(cosine_with_warmup(step, steps=50, warmup=0), scheduler.get_last_lr()[0], abs_tol=1e-12)
        optimizer.step()
        scheduler.step()


def test_the_warm_up_is_a_line_to_the_top() -> None:
    factors = [cosine_with_warmup(step, steps=30, warmup=10) for step in range(30)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(factors) == 1
    assert sorted(factors[10:], reverse=True) == factors[10:]
