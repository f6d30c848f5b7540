"""Launches that are kept: Triton is asked once, and each is for one kind of arguments alone."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from wellposed.spectrum.launch import Launch

pytest.importorskip("triton", reason="Triton is not installed")


def test_triton_is_asked_once_for_each_kind_of_launch() -> None:
    seen: list[tuple[object, ...]] = []

    class Found:
        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
            return lambda *given: seen.append(("kept", grid, given))

    class Kernel:
        def __init__(self, found: Found | None) -> None:
            self.found = found

        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Found | None]:
            def run(*given: object, **named: object) -> Found | None:
                seen.append(("Triton", grid, given, named))
                return self.found

            return run

    x, beside = torch.ones(4), torch.zeros(9)[1:5]
    assert x.data_ptr() % 16 == 0
    assert beside.data_ptr() % 16 == 4
    launch = Launch(Kernel(Found()), (3, 2, 1), (5, 7), {"ADD": True}, num_warps=8)
    for first in (beside, x, x, beside, x):
        launch((first, x), 0.5, 2.0, described=("q",))
    named = {"ADD": True, "num_warps": 8}
    asked = [("Triton", (3, 2, 1), ("q", each, x, 0.5, 2.0, 5, 7), named) for each in (beside, x)]
    kept = ("kept", (3, 2, 1), ("q", x, x, 0.5, 2.0, 5, 7, True))
    assert list(map(str, seen)) == list(map(str, [*asked, kept, asked[0], kept]))
    seen.clear()
    in_the_interpreter = Launch(Kernel(None), (1, 1, 1), (), {})
    for _ in range(3):
        in_the_interpreter((x,))
    assert [each[0] for each in seen] == ["Triton"] * 3


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> dict[Launch, set[tuple[Any, ...]]]:
    """What each launch was given, as far as Triton compiles another kernel for it; nothing is launched."""
    given: dict[Launch, set[tuple[Any, ...]]] = {}

    def call(launch: Launch, tensors: tuple[Tensor, ...], *factors: float, described: tuple[Any, ...] = ()) -> None:
        types = (*(each.dtype for each in tensors), *(type(each) for each in factors))
        blocks = tuple((each.base.dtype, *each.block_shape) for each in described)
        given.setdefault(launch, set()).add((*types, *blocks))

    monkeypatch.setattr(Launch, "__call__", call)
    return given


def test_a_launch_of_sine_layers_is_for_one_kind(kinds: dict[Launch, set[tuple[Any, ...]]]) -> None:
    from wellposed.lowrank import kernels

    types = (torch.float32, torch.bfloat16)
    for of_a, of_b, of_weight, out in product(types, repeat=4):
        a, b = torch.ones(3, 48, dtype=of_a), torch.ones(32, 3, dtype=of_b)
        kernels.sine_weight(torch.ones(32, 48, dtype=of_weight), a, b, 2, 1, out)
        kernels.factor_gradients(torch.ones(32, 48, dtype=of_weight), a, b, 2, 1)
    assert len(kinds) == 16 + 8
    assert all(len(each) == 1 for each in kinds.values())


def test_a_launch_of_attention_is_for_one_kind(
    kinds: dict[Launch, set[tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from wellposed.attention import kernels
    from wellposed.attention.kernels_settings import Problem

    monkeypatch.setattr(kernels, "_fitting", {})
    scales, counts = torch.ones(2), torch.ones(1, 40)
    for dtype, phi, head_scale, count in product(
        (torch.float32, torch.bfloat16, torch.float16), ("power3", "sigmoid"), (None, scales), (None, counts)
    ):
        x = torch.ones(1, 2, 40, 32, dtype=dtype)
        problem = Problem(phi, 1, None, head_scale, False, count)
        kernels.forward(x, x, x, x, problem)
        kernels.backward_queries(x, x, x, x, x, problem)
        kernels.backward_keys(x, x, x, x, x, x, problem)
    assert len(kinds) == 3 * 24
    assert all(len(each) == 1 for each in kinds.values())
    assert all(float in each for kind in kinds.values() for each in kind)
    assert not any(int in each for kind in kinds.values() for each in kind)
