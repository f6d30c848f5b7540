"""The parts of DINO, each against something independent."""

import math

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from wellposed.training.dino_loss import dino_loss, information, spread
from wellposed.training.dino_network import Head, Network, UnitLinear
from wellposed.training.dino_schedules import cosine, line, warmed_up
from wellposed.training.dino_task import clip_each_


def by_loops(student: Tensor, teacher: Tensor, center: Tensor, tau_s: float, tau_t: float) -> Tensor:
    """The loss as the paper's pseudo-code has it, pair by pair."""
    terms = []
    for g in range(teacher.shape[1]):
        wanted = F.softmax((teacher[:, g] - center) / tau_t, dim=-1)
        for v in range(student.shape[1]):
            if v != g:
                terms.append((-wanted * F.log_softmax(student[:, v] / tau_s, dim=-1)).sum(-1).mean())
    return torch.stack(terms).mean()


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 5), st.integers(2, 3), st.integers(0, 4), st.integers(2, 40))
def test_the_loss_is_that_of_all_pairs(images: int, large: int, small: int, outputs: int) -> None:
    student = torch.randn(images, large + small, outputs, requires_grad=True)
    teacher, center = torch.randn(images, large, outputs, requires_grad=True), torch.randn(outputs)
    found = dino_loss(student, teacher, center, student_temp=0.1, teacher_temp=torch.tensor(0.05))
    expected = by_loops(student, teacher, center, 0.1, 0.05)
    torch.testing.assert_close(found.loss, expected, rtol=1e-4, atol=1e-5)
    ours, theirs = (torch.autograd.grad(loss, student, retain_graph=True)[0] for loss in (found.loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert torch.autograd.grad(found.loss, teacher, allow_unused=True)[0] is None
    said = torch.distributions.Categorical(logits=(teacher.detach() - center) / 0.05)
    assert found.entropy.item() == pytest.approx(said.entropy().mean().item() / math.log(outputs), abs=1e-4)
    assert found.kl.item() == pytest.approx(found.loss.item() - said.entropy().mean().item(), abs=1e-3)
    torch.testing.assert_close(found.probability_mean_K, said.probs.mean((0, 1)), rtol=1e-4, atol=1e-6)


def test_a_student_that_says_the_same_has_no_kl() -> None:
    same = torch.randn(1, 1, 9)
    found = dino_loss(
        same.expand(4, 5, 9), same.expand(4, 2, 9), torch.zeros(9), student_temp=0.1, teacher_temp=torch.tensor(0.1)
    )
    assert found.kl.item() == pytest.approx(0, abs=1e-5)
    mean_entropy = found.entropy * math.log(9)
    assert information(found.probability_mean_K, mean_entropy).item() == pytest.approx(0, abs=1e-5)


def test_half_precision_outputs_are_compared_in_single() -> None:
    student, teacher = torch.randn(3, 4, 500), torch.randn(3, 2, 500)
    settings = {"student_temp": 0.1, "teacher_temp": torch.tensor(0.04)}
    exact = dino_loss(student.bfloat16().float(), teacher.bfloat16().float(), torch.zeros(500), **settings)
    rounded = dino_loss(student.bfloat16(), teacher.bfloat16(), torch.zeros(500), **settings)
    assert rounded.loss.dtype == torch.float32
    assert torch.equal(exact.loss, rounded.loss)


def test_information_in_closed_form() -> None:
    """Four images, each with an output of its own, tell two bits; all alike or all on one output tell none."""
    for probabilities, expected in (
        (torch.eye(4), math.log(4)),
        (torch.full((4, 4), 0.25), 0.0),
        (torch.eye(4)[:1].expand(4, 4), 0.0),
    ):
        entropy = torch.special.entr(probabilities).sum(-1).mean()
        assert information(probabilities.mean(0), entropy).item() == pytest.approx(expected, abs=1e-6)


def test_spread_in_closed_form() -> None:
    directions = torch.linalg.qr(torch.randn(8, 8)).Q
    both_ways = torch.cat([directions, -directions]) * torch.rand(16, 1)  # of any length
    std, rank = spread(both_ways)
    assert std.item() == pytest.approx(1.0, abs=1e-5)
    assert rank.item() == pytest.approx(8.0, rel=1e-4)
    line_alone = torch.cat([directions[:1], -directions[:1]]).repeat(20, 1)
    assert spread(line_alone)[1].item() == pytest.approx(1.0, rel=1e-4)
    same = torch.randn(1, 8).expand(5, 8)
    assert spread(same)[0].item() == pytest.approx(0.0, abs=1e-6)
    assert spread(same)[1].isfinite()
    wide = torch.randn(6, 50)
    torch.testing.assert_close(spread(wide)[1], spread(torch.cat([wide] * 20))[1], rtol=1e-3, atol=0)


def test_the_last_layer_is_torchs_weight_norm() -> None:
    ours, theirs = UnitLinear(6, 9), weight_norm(nn.Linear(6, 9, bias=False))
    with torch.no_grad():
        theirs.parametrizations.weight.original1.copy_(ours.weight_v)
        theirs.parametrizations.weight.original0.fill_(1.0)
    x = torch.randn(4, 6)
    torch.testing.assert_close(ours(x), theirs(x))
    ours(x).square().sum().backward()
    theirs(x).square().sum().backward()
    assert ours.weight_v.grad is not None
    expected = theirs.parametrizations.weight.original1.grad
    torch.testing.assert_close(ours.weight_v.grad, expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ours(x), ours(x.float()))
        assert ours(x).dtype == torch.float32


def test_outputs_are_cosines() -> None:
    head = Head(5, 7, 4, 30)
    outputs = head(100 * torch.randn(10, 5))
    assert outputs.abs().max() <= 1 + 1e-6
    assert outputs.std() > 0.1


VITS = {
    "class token": ("vit_tiny_patch16_224", {}),
    "mean of patches": ("vit_tiny_patch16_224", {"global_pool": "avg"}),
    "registers": ("vit_tiny_patch16_224", {"reg_tokens": 2}),
    "no position of the class token": ("vit_tiny_patch16_224", {"no_embed_class": True}),
    "two class tokens": ("deit_tiny_distilled_patch16_224", {}),
    "no positions": ("vit_tiny_patch16_224", {"pos_embed": "none"}),
    "rotary positions": ("vit_small_patch16_rope_224", {}),
}


@pytest.mark.parametrize("kind", VITS)
def test_crops_of_another_size_are_seen_as_timm_sees_them(kind: str) -> None:
    name, more = VITS[kind]
    small = {"img_size": 32, "patch_size": 4, "depth": 2, "embed_dim": 48, "num_heads": 3}
    backbone = timm.create_model(name, num_classes=0, dynamic_img_size=True, **small, **more).eval()
    large, local = torch.randn(3, 2, 3, 32, 32), torch.randn(3, 4, 3, 12, 12)
    with torch.no_grad():
        expected = [backbone(views.flatten(0, 1)).unflatten(0, views.shape[:2]) for views in (large, local)]
    network = Network(backbone, Head(backbone.num_features, 16, 8, 20)).eval()
    network.expect(12, 12)
    outputs_NVK, features_NVD = network(large, local)
    assert outputs_NVK.shape == (3, 6, 20)
    torch.testing.assert_close(features_NVD.detach(), torch.cat(expected, 1), atol=1e-5, rtol=1e-4)
    local_alone = network(local)[1]
    torch.testing.assert_close(local_alone, features_NVD[:, 2:], atol=1e-5, rtol=1e-4)
    outputs_NVK.sum().backward()
    if getattr(backbone, "pos_embed", None) is not None:
        assert backbone.pos_embed.grad.abs().sum() > 0
    assert not [key for key in network.state_dict() if "positions" in key]


@pytest.mark.parametrize("class_token", [True, False])
def test_positions_are_as_exact_under_autocast(class_token: bool) -> None:
    """As timm resamples them: in single precision, and so the residual stream is that of a global crop."""
    small = {"img_size": 32, "patch_size": 4, "depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 0}
    more = {"class_token": class_token, "global_pool": "token" if class_token else "avg"}
    backbone = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **small, **more).eval()
    local, seen = torch.randn(4, 3, 12, 12), []
    backbone.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = backbone(local)
        network = Network(backbone, Head(48, 16, 8, 20)).eval()
        network.expect(12, 12)
        found = network.features(local)
    assert [tokens.dtype for tokens in seen] == [torch.float32] * 2
    torch.testing.assert_close(seen[1], seen[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.float(), expected.float(), atol=2e-3, rtol=2e-3)


def test_position_gradients_are_timms() -> None:
    small = {"img_size": 16, "patch_size": 4, "depth": 1, "embed_dim": 8, "num_heads": 2, "num_classes": 0}
    local, found = torch.randn(2, 1, 3, 8, 8), []
    for ours in (True, False):
        torch.manual_seed(3)
        backbone = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **small)
        network = Network(backbone, Head(8, 4, 4, 4))
        network.expect(8, 8)
        if not ours:
            backbone.dynamic_img_size, backbone.patch_embed.flatten = True, False
        features = network.features(local.flatten(0, 1)) if ours else backbone(local.flatten(0, 1))
        features.square().sum().backward()
        found.append(backbone.pos_embed.grad.clone())
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=1e-4)


def test_every_gradient_is_clipped_by_itself() -> None:
    gradients = [torch.randn(4, 5) * 10, torch.randn(3) * 0.1, torch.zeros(2)]
    expected = [gradient.clone() for gradient in gradients]
    total = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    assert clip_each_(gradients, 3.0).item() == pytest.approx(total)
    assert gradients[0].norm().item() == pytest.approx(3.0, rel=1e-5)
    torch.testing.assert_close(gradients[0] / 3, expected[0] / expected[0].norm())
    assert torch.equal(gradients[1], expected[1])
    before = [gradient.clone() for gradient in gradients]
    clip_each_(gradients, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(gradients, before, strict=True))


def test_schedules_begin_and_end_where_they_should() -> None:
    steps, warmup = 100, 10
    rates = [warmed_up(step, steps, warmup, 1.0, 0.01) for step in range(steps)]
    assert rates[:warmup] == pytest.approx([(step + 1) / warmup for step in range(warmup)])
    assert rates[warmup] == 1.0
    assert rates == sorted(rates[:warmup]) + sorted(rates[warmup:], reverse=True)
    assert 0.01 < rates[-1] < 0.011
    assert cosine(0, steps, 0.996, 1.0) == pytest.approx(0.996)
    assert cosine(steps - 1, steps, 0.996, 1.0) == 1.0
    assert cosine(0, 1, 0.5, 1.0) == 0.5
    assert line(0, 0, 0.04, 0.07) == 0.07
    assert line(15, 30, 0.04, 0.07) == pytest.approx(0.055)
