"""SOAP against pytorch_optimizer's, and against itself one parameter at a time."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.errors import InvalidArgumentError
from wellposed.optim.batch import _merged, due_members
from wellposed.optim.graph import Graph

SHAPES = [(), (1,), (10,), (8, 8), (16, 12), (40, 8), (8, 40), (4, 3, 5), (4, 3, 5, 5)]


def gradient(shape: tuple[int, ...], step: int) -> Tensor:
    """A stochastic gradient with a spectrum on every side: SOAP sorts by eigenvalues, and rounding decides ties."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(step))
    for side in range(len(shape)):
        drawn = (drawn.movedim(side, -1) * torch.logspace(0, -0.7, shape[side])).movedim(-1, side)
    return drawn


def train(make: Callable[[list[nn.Parameter]], Any], params: list[nn.Parameter], steps: range) -> Any:
    optimizer = make(params)
    advance(optimizer, params, steps)
    return optimizer


def advance(optimizer: Any, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for number, param in enumerate(params):
            param.grad = gradient(tuple(param.shape), 1000 * number + step).to(param)
        optimizer.step()


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def share_bases(mine: dict[str, Any], peer: dict[str, Any]) -> None:
    """Give the peer our bases, once it is sure that both are eigenvectors of its factors.

    One gradient leaves the factor of its longer side without full rank, and what spans the rest is up to rounding.
    """
    for factor, own, theirs in zip(peer["GG"], mine.get("Q", ()), peer["Q"], strict=False):
        if len(factor):
            for basis in (own, theirs):
                turned = basis.T @ factor @ basis
                assert (turned - turned.diagonal().diag()).norm() < 1e-5 * turned.norm()
                assert (turned.diagonal().diff() < 1e-5 * turned.norm()).all()
            theirs.copy_(own)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"correct_bias": False, "weight_decay": 0.3, "eps": 1e-4}], ids=str)
def test_equals_pytorch_optimizer(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    ours, theirs, start = (parameters(shape or (1,)) for _ in range(3))
    mine = train(lambda params: wp.SOAP(params, lr=1e-2, **options), ours, range(1))
    peer = train(lambda params: pytorch_optimizer.SOAP(params, lr=1e-2, **options), theirs, range(1))
    share_bases(mine.state[ours[0]], peer.state[theirs[0]])
    advance(mine, ours, range(1, 60))
    advance(peer, theirs, range(1, 60))
    moved = (theirs[0] - start[0]).norm()
    assert (ours[0] - theirs[0]).norm() < 1e-4 * moved


def test_equals_pytorch_optimizer_with_vectors_rotated_and_large_dimensions_left() -> None:
    ours, theirs = parameters((10,), (16, 12)), parameters((10,), (16, 12))
    train(lambda p: wp.SOAP(p, precondition_1d=True, max_precond_dim=12, shampoo_beta=0.9), ours, range(40))
    options = {"precondition_1d": True, "max_precondition_dim": 12, "shampoo_beta": 0.9}
    train(lambda p: pytorch_optimizer.SOAP(p, **options), theirs, range(40))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-3)


def test_first_gradient_only_builds_the_basis() -> None:
    params = parameters((4, 4))
    before = params[0].detach().clone()
    train(wp.SOAP, params, range(1))
    assert torch.equal(params[0], before)


def test_stepping_together_is_stepping_apart() -> None:
    shapes = [(6, 5)] * 4 + [(5,)] * 3 + [(6, 5)]
    together, apart = parameters(*shapes), parameters(*shapes)
    train(wp.SOAP, together, range(25))
    for number, param in enumerate(apart):
        optimizer = wp.SOAP([param])
        for step in range(25):
            param.grad = gradient(tuple(param.shape), 1000 * number + step)
            optimizer.step()
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_refreshing_in_parts_is_refreshing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = parameters(*[(6, 5)] * 5), parameters(*[(6, 5)] * 5)
    train(wp.SOAP, whole, range(25))
    monkeypatch.setattr("wellposed.optim.refresh._REFRESH_ENTRIES", 2 * 5**2)
    train(wp.SOAP, parts, range(25))
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other)


def test_missing_gradients_do_not_count_as_steps() -> None:
    """A parameter without a gradient for a while goes on as if the others' steps had not been."""
    params, alone = parameters((6, 5), (6, 5)), parameters((6, 5))
    optimizer = wp.SOAP(params, lr=1e-2)
    for step in range(40):
        params[1].grad = gradient((6, 5), 1000 + step)
        params[0].grad = gradient((6, 5), step) if step < 7 or step >= 20 else None
        optimizer.step()
    optimizer_alone = wp.SOAP(alone, lr=1e-2)
    for step in [*range(7), *range(20, 40)]:
        alone[0].grad = gradient((6, 5), step)
        optimizer_alone.step()
    torch.testing.assert_close(params[0], alone[0], rtol=1e-4, atol=1e-5)
    assert optimizer.state[params[0]]["step"] == 26
    assert optimizer.state[params[1]]["step"] == 39


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    params, exact = parameters((7, 7), (6,), dtype=dtype), parameters((7, 7), (6,))
    optimizer = train(lambda p: wp.SOAP(p, lr=1e-2), params, range(30))
    train(lambda p: wp.SOAP(p, lr=1e-2), exact, range(30))
    state = optimizer.state[params[0]]
    assert params[0].dtype == dtype
    assert state["Q"][0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = {torch.bfloat16: 0.03, torch.float16: 0.01, torch.float64: 1e-5}[dtype]
    assert (params[0].float() - exact[0]).norm() < tolerance * exact[0].norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"spread_refresh": True}], ids=str)
def test_state_dict_round_trip_is_exact(dtype: torch.dtype, options: dict[str, Any]) -> None:
    shapes = [(6, 5)] * 3 + [(4, 3, 2, 2), (7,), ()]
    whole, halved = parameters(*shapes, dtype=dtype), parameters(*shapes, dtype=dtype)
    train(lambda p: wp.SOAP(p, **options), whole, range(37))
    first = train(lambda p: wp.SOAP(p, **options), halved, range(17))
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second = wp.SOAP(halved, lr=1.0, **options)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    advance(second, halved, range(17, 37))
    assert all(torch.equal(one, other) for one, other in zip(whole, halved, strict=True))


def test_leaving_parameters_do_not_hold_on_to_their_batch() -> None:
    params = parameters(*[(16, 16)] * 12)
    optimizer = wp.SOAP(params)
    advance(optimizer, params, range(3))
    sizes = []
    for frozen in range(12):
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        sizes.append(len(buffer.getvalue()))
        for param in params:
            param.grad = torch.randn(16, 16)
        for param in params[: frozen + 1]:
            param.grad = None
        optimizer.step()
    assert max(sizes) < 1.2 * min(sizes)


def test_state_of_another_precision_or_model() -> None:
    params, precise, other = parameters((6, 5)), parameters((6, 5), dtype=torch.float64), parameters((7, 5))
    state = train(wp.SOAP, params, range(5)).state_dict()
    optimizer = wp.SOAP(precise)
    optimizer.load_state_dict(state)
    advance(optimizer, precise, range(5, 8))
    wrong = wp.SOAP(other)
    wrong.load_state_dict(state)
    with pytest.raises(InvalidArgumentError, match=r"shape \(7, 5\) is that of another: it is \(6, 5\)"):
        advance(wrong, other, range(5, 6))


def test_an_older_state_dict_takes_the_defaults_for_newer_options() -> None:
    params = parameters((6, 5))
    state = train(wp.SOAP, params, range(3)).state_dict()
    del state["param_groups"][0]["tf32"]
    optimizer = wp.SOAP(params)
    optimizer.load_state_dict(state)
    advance(optimizer, params, range(3, 5))


def test_precision_settings_are_left_as_they_were() -> None:
    params = parameters((6, 5))
    optimizer = train(lambda p: wp.SOAP(p, tf32=True), params, range(3))
    general = torch.backends.fp32_precision
    try:
        torch.backends.fp32_precision = "tf32"
        advance(optimizer, params, range(3, 5))
        torch.backends.fp32_precision = "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision = general


def test_copies_go_on_alike() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 5))
    optimizer = wp.SOAP(model.parameters())
    advance(optimizer, list(model.parameters()), range(12))
    model_copy, optimizer_copy = copy.deepcopy((model, optimizer))
    for each, params in ((optimizer, model.parameters()), (optimizer_copy, model_copy.parameters())):
        advance(each, list(params), range(12, 24))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), model_copy.parameters(), strict=True))


def test_merge_dims() -> None:
    assert _merged((384, 3, 4, 4), 10000) == (4608, 4)
    assert _merged((8, 3, 2, 2), 10000) == (96,)
    assert _merged((20000, 5, 3), 10000) == (20000, 15)
    assert _merged((3, 20000), 10000) == (3, 20000)
    assert _merged((1, 1), 10) == (1,)
    merged, flat = parameters((8, 3, 2, 2)), [nn.Parameter(parameters((8, 3, 2, 2))[0].detach().reshape(24, 4))]
    optimizer, other = wp.SOAP(merged, merge_dims=True, max_precond_dim=24), wp.SOAP(flat, max_precond_dim=24)
    for step in range(25):
        merged[0].grad = gradient((8, 3, 2, 2), step)
        flat[0].grad = merged[0].grad.reshape(24, 4)
        optimizer.step()
        other.step()
    torch.testing.assert_close(merged[0].reshape(24, 4), flat[0], rtol=1e-4, atol=1e-5)


def test_channels_last() -> None:
    first, last = parameters((8, 3, 2, 2)), [nn.Parameter(parameters((8, 3, 2, 2))[0].detach().permute(0, 2, 3, 1))]
    optimizer = wp.SOAP(first, merge_dims=True, max_precond_dim=24)
    other = wp.SOAP(last, merge_dims=True, max_precond_dim=24, data_format="channels_last")
    for step in range(25):
        first[0].grad = gradient((8, 3, 2, 2), step)
        last[0].grad = first[0].grad.permute(0, 2, 3, 1)
        optimizer.step()
        other.step()
    torch.testing.assert_close(first[0].permute(0, 2, 3, 1), last[0], rtol=1e-4, atol=1e-5)


def test_normalized_updates_have_the_size_of_the_learning_rate() -> None:
    params = parameters((8, 6))
    optimizer = train(
        lambda p: wp.SOAP(p, lr=0.1, normalize_grads=True, weight_decay=0, correct_bias=False), params, range(3)
    )
    before = params[0].detach().clone()
    advance(optimizer, params, range(3, 4))
    assert (params[0] - before).square().mean().sqrt().item() == pytest.approx(0.1, rel=1e-4)


def test_learns_as_the_peer_does() -> None:
    def losses(make: Callable[[Any], Any]) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
        teacher, optimizer, seen = torch.randn(20, 4), make(model.parameters()), []
        for _ in range(150):
            x = torch.randn(64, 20)
            loss = nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    ours = losses(lambda p: wp.SOAP(p, lr=1e-2))
    theirs = losses(lambda p: pytorch_optimizer.SOAP(p, lr=1e-2))
    assert sum(ours[-20:]) / 20 == pytest.approx(sum(theirs[-20:]) / 20, rel=0.1)
    assert ours[-1] < 0.5 * ours[0]


def test_spread_refresh_visits_every_member_once() -> None:
    for count, frequency in ((12, 10), (3, 10), (1, 10), (25, 7), (10, 1)):
        visits = [0] * count
        for step in range(frequency):
            due = due_members(count, step, frequency, spread=True)
            for member in range(count)[due] if due else ():
                visits[member] += 1
        assert visits == [1] * count
        assert [bool(due_members(count, step, frequency, spread=False)) for step in range(frequency)] == [
            step == 0 for step in range(frequency)
        ]


# --- with the rest of the ecosystem


def test_schedulers_groups_and_closures() -> None:
    slow, fast = parameters((6, 5), (6, 5))
    optimizer = wp.SOAP([{"params": [slow], "lr": 0.0}, {"params": [fast]}], lr=1e-2, weight_decay=0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (slow - fast).square().sum()
        loss.backward()
        return loss

    before = slow.detach().clone()
    for _ in range(3):
        assert optimizer.step(closure) > 0
        scheduler.step()
    assert torch.equal(slow, before)
    assert not torch.equal(fast, parameters((6, 5), (6, 5))[1])
    assert optimizer.param_groups[1]["lr"] == pytest.approx(1e-2 / 8)


def test_accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(5, 3)
    before = model.weight.detach().clone()
    model, optimizer = accelerator.prepare(model, wp.SOAP(model.parameters()))
    for _ in range(3):
        accelerator.backward(model(torch.randn(8, 5)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(model.weight, before)


def fit(model: nn.Module, steps: int, part: slice = slice(None)) -> None:
    """Steps with SOAP on the given part of a batch of 16 that is the same for everybody."""
    optimizer = wp.SOAP(model.parameters(), lr=1e-2)
    for step in range(steps):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        model(x[part]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))


def sharded(model: nn.Module, ranks: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    return model


def test_fsdp2_equals_plain(process_group: None) -> None:
    plain, whole, partly = small_model(), sharded(small_model(), 1), small_model()
    sharded(partly[0], 1)
    for model in (plain, whole, partly):
        fit(model, 15)
    for one, other, third in zip(plain.parameters(), whole.parameters(), partly.parameters(), strict=True):
        torch.testing.assert_close(one, other.full_tensor())
        torch.testing.assert_close(one, third.full_tensor() if hasattr(third, "full_tensor") else third)


def _fit_one_of_two(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = sharded(small_model()[0], 2)
    fit(model, 12, slice(8 * rank, 8 * rank + 8))
    whole = [param.full_tensor() for param in model.parameters()]
    if rank == 0:
        torch.save(whole, f"{folder}/weights.pt")
    torch.distributed.destroy_process_group()


def test_fsdp2_on_two_processes_equals_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_fit_one_of_two, args=(str(tmp_path),), nprocs=2)
    model = small_model()[0]
    fit(model, 12)
    theirs = torch.load(tmp_path / "weights.pt", weights_only=True)
    for one, other in zip(model.parameters(), theirs, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1},
        {"betas": (0.9, 1.0)},
        {"betas": (0.9,)},
        {"shampoo_beta": 1},
        {"eps": -1e-8},
        {"weight_decay": -1},
        {"precondition_frequency": 0},
        {"max_precond_dim": -1},
        {"data_format": "NCHW"},
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(options))):
        wp.SOAP(parameters((2, 2)), **options)
    with pytest.raises(InvalidArgumentError, match=next(iter(options))):
        wp.SOAP([{"params": parameters((2, 2)), **options}])


def test_unsuitable_gradients() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(InvalidArgumentError, match="sparse"):
        wp.SOAP(embedding.parameters()).step()
    broken = parameters((3, 3))
    broken[0].grad = torch.full((3, 3), torch.nan)
    with pytest.raises(InvalidArgumentError, match="not finite"):
        wp.SOAP(broken).step()
    param = nn.Parameter(torch.randn(2, 2, dtype=torch.complex64))
    param.grad = torch.ones_like(param)
    with pytest.raises(InvalidArgumentError, match="complex"):
        wp.SOAP([param]).step()


# --- on a GPU

MIXED = [(30, 24)] * 3 + [(24, 30), (24,), (4, 3, 2, 2), ()]


def on_gpu(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().cuda()) for param in params]


def all_equal(some: list[nn.Parameter], others: list[nn.Parameter]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"tf32": True}, {"spread_refresh": True}], ids=str)
def test_on_a_gpu(options: dict[str, Any]) -> None:
    shapes = [(30, 30)] * 3 + [(24,)]
    cpu, gpu = parameters(*shapes), on_gpu(parameters(*shapes))
    before = torch.backends.cuda.matmul.fp32_precision
    train(lambda p: wp.SOAP(p, lr=1e-2, **(options | {"tf32": False})), cpu, range(30))
    train(lambda p: wp.SOAP(p, lr=1e-2, **options), gpu, range(30))
    assert torch.backends.cuda.matmul.fp32_precision == before
    tolerance = 2e-2 if "tf32" in options else 1e-3
    moved = (cpu[0] - parameters(*shapes)[0]).norm()
    assert (cpu[0] - gpu[0].cpu()).norm() < tolerance * moved


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"tf32": True}, {"spread_refresh": True}, {"normalize_grads": True, "merge_dims": True}], ids=str
)
def test_graphed_steps_are_the_same_steps(options: dict[str, Any], dtype: torch.dtype) -> None:
    graphed, eager = (on_gpu(parameters(*MIXED, dtype=dtype)) for _ in range(2))
    optimizer = train(lambda p: wp.SOAP(p, lr=1e-2, **options), graphed, range(45))
    train(lambda p: wp.SOAP(p, lr=1e-2, cuda_graph=False, **options), eager, range(45))
    assert len(optimizer._graphs.captured()) == (1 if options.get("spread_refresh") else 2)
    assert all_equal(graphed, eager)


@pytest.mark.gpu
def test_graphed_steps_after_a_reload_and_in_a_copy() -> None:
    whole, halved = (nn.ParameterList(on_gpu(parameters(*MIXED))) for _ in range(2))
    train(wp.SOAP, list(whole), range(37))
    optimizer = train(wp.SOAP, list(halved), range(17))
    copied, optimizer_copy = copy.deepcopy((halved, optimizer))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, params in ((optimizer, list(halved)), (optimizer_copy, list(copied))):
        advance(each, params, range(17, 37))
        assert len(each._graphs.captured()) == 2
        assert all_equal(params, list(whole))


@pytest.mark.gpu
def test_graphed_steps_follow_what_changes() -> None:
    """Options, gradients that are missing for a while, parameters that move in memory."""
    graphed, eager = on_gpu(parameters(*MIXED)), on_gpu(parameters(*MIXED))
    for params, cuda_graph in ((graphed, True), (eager, False)):
        optimizer = wp.SOAP(params, lr=1e-2, cuda_graph=cuda_graph)
        group = optimizer.param_groups[0]
        advance(optimizer, params, range(8))
        group["lr"] = 0.0
        before = [param.detach().clone() for param in params]
        advance(optimizer, params, range(8, 9))
        assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True))
        group.update(lr=1e-3, weight_decay=0.5, betas=(0.8, 0.9))
        advance(optimizer, params, range(9, 14))
        params[1].grad = None
        advance(optimizer, [params[0], *params[2:]], range(14, 24))
        advance(optimizer, params, range(24, 34))
        for param in params:
            param.data = param.data.clone()
        advance(optimizer, params, range(34, 44))
        assert cuda_graph == bool(optimizer._graphs.captured())
    assert all_equal(graphed, eager)


@pytest.mark.gpu
def test_steps_within_a_capture_of_somebody_else() -> None:
    params = on_gpu(parameters((30, 24), (24,)))
    optimizer = train(wp.SOAP, params, range(8))
    before, graph = params[0].detach().clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    assert torch.equal(params[0], before)
    graph.replay()
    assert not torch.equal(params[0], before)


@pytest.mark.gpu
def test_what_cannot_be_captured_runs_all_the_same() -> None:
    x, graph = torch.zeros((), device="cuda"), Graph()
    stream = torch.cuda.current_stream()

    def function() -> None:
        x.add_(1)
        x.item()

    for _ in range(4):
        graph.run(function, "key", x.device)
    assert x.item() == 4
    assert not graph.is_captured
    assert torch.cuda.current_stream() == stream


@pytest.mark.gpu
def test_captures_become_rarer_where_the_key_keeps_changing() -> None:
    x, graph, captured = torch.zeros((), device="cuda"), Graph(), []
    for call in range(24):
        graph.run(lambda: x.add_(1), call // 4, x.device)
        captured.append(graph.is_captured)
    assert x.item() == 24
    assert captured == [False, True, True, True] + [False, False, True, True] + [False] * 16
