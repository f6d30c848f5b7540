"""What keeps a run safe."""

import pytest
import torch
from torch import nn

from wellposed.training.guards import FirstFailure, flushed_denormals, is_repeatable, repeatable


def share_of_zeros() -> float:
    """Of products that are denormal, over a tensor large enough that every thread of the pool computes some."""
    return float((torch.full((2_000_000,), 1.2e-38) * 0.5 == 0).float().mean())


def test_denormals_are_flushed_in_every_thread() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert share_of_zeros() == 0
        with flushed_denormals():
            assert share_of_zeros() == 1
        assert share_of_zeros() == 0
    finally:
        torch.set_num_threads(threads)


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.LogSoftmax(1))


def test_the_first_failure_of_a_forward_pass() -> None:
    model = small_net()
    with FirstFailure(model) as failure:
        model(torch.ones(2, 4)).sum().backward()
        assert failure.where is None
        model(torch.full((2, 4), torch.inf))
        assert failure.where == "the output of 0"
    with torch.no_grad():
        model[2].weight[1, 1] = torch.nan
    with FirstFailure(model) as failure:
        model(torch.ones(2, 4)).sum().backward()
    assert failure.where == "a weight of 2"


def test_the_first_failure_of_a_backward_pass() -> None:
    model = small_net()
    with FirstFailure(model) as failure:
        (model(torch.ones(2, 4)) * torch.tensor(3e38)).mul(1e38).sum().backward()
    assert failure.where in {"the gradient of 2.weight", "the gradient of 2.bias"}


def test_nothing_is_watched_afterwards() -> None:
    model = small_net()
    with FirstFailure(model) as failure:
        pass
    model(torch.full((2, 4), torch.nan)).sum().backward()
    assert failure.where is None


@pytest.mark.gpu
def test_what_has_no_repeatable_kernel_is_noticed() -> None:
    images = torch.zeros(2, 3, 8, 8, device="cuda")
    repeatable_model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)).cuda()
    other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, 5)).cuda()
    with repeatable(images.device):
        assert is_repeatable(repeatable_model, images)
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not is_repeatable(other, images)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert all(param.grad is None for param in other.parameters())
