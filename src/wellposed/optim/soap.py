"""SOAP: Adam in the eigenbasis of Shampoo's Kronecker factors (arXiv 2409.11321), like-shaped parameters together.

For a matrix gradient G with factors L = E[G G^T], R = E[G^T G] and their eigenbases Q_L, Q_R, Adam runs on Q_L^T G Q_R
and its update is rotated back. Every `precondition_frequency` steps the bases take one step of orthogonal iteration
towards those of the current factors.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from wellposed.errors import InvalidArgumentError
from wellposed.optim.batch import Batch, Layout, copy_gradients_
from wellposed.optim.graph import Graphs
from wellposed.optim.refresh import refresh
from wellposed.optim.rotation import accumulate_factor_, eigenbasis
from wellposed.optim.step import Constants, gradients_to_updates_, precise


class SOAP(Optimizer):
    """SOAP with the argument names of its reference implementation.

    A parameter's first gradient only builds its bases; it is not stepped. Steps are counted per parameter. State is
    kept in float32, in float64 for float64 parameters; the momentum lives in the rotated basis and turns with it, which
    is the same as keeping it unrotated. Sharded (DTensor) parameters are gathered: every rank holds the whole state.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: decay of the momentum and of the second moment.
        shampoo_beta: decay of the factors; betas[1] if negative.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay, times lr.
        precondition_frequency: steps between two refreshes of the bases.
        max_precond_dim: dimensions larger than this are not rotated.
        merge_dims: merge neighbouring dimensions as long as their product stays within max_precond_dim.
        precondition_1d: rotate vectors too, which otherwise get Adam.
        normalize_grads: scale every parameter's update to root mean square 1.
        data_format: "channels_first" or "channels_last", how merge_dims is to read 4-d tensors.
        correct_bias: Adam's bias correction.
        spread_refresh: refresh a part of the bases at each step instead of all of them at once, so that steps take
            more nearly equally long. Changes the result.
        tf32: rotate and accumulate factors in TF32 on GPUs that have it; bases are refreshed in float32 all the same.
            Changes the result.
        cuda_graph: on a GPU, capture the work of a step and of a refresh in CUDA graphs once nothing changes any more,
            so that the host need not launch every kernel and independent ones run side by side. The result stays the
            same. The memory that they need for themselves, some 2 GiB for large models, stays allocated between steps.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float = -1,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        max_precond_dim: int = 10000,
        merge_dims: bool = False,
        precondition_1d: bool = False,
        normalize_grads: bool = False,
        data_format: str = "channels_first",
        correct_bias: bool = True,
        *,
        spread_refresh: bool = False,
        tf32: bool = False,
        cuda_graph: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "shampoo_beta": shampoo_beta,
            "eps": eps,
            "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
            "max_precond_dim": max_precond_dim,
            "merge_dims": merge_dims,
            "precondition_1d": precondition_1d,
            "normalize_grads": normalize_grads,
            "data_format": data_format,
            "correct_bias": correct_bias,
            "spread_refresh": spread_refresh,
            "tf32": tf32,
            "cuda_graph": cuda_graph,
        }
        super().__init__(params, defaults)
        self._forget_batches()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, once its options and the defaults it leaves are known to make sense."""
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_batches()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, bit for bit: torch alone would cast the state to the parameters' dtype."""
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(saved, params, strict=True):
            if number in state_dict["state"]:
                self.state[param] = _moved(state_dict["state"][number], param)
        self._forget_batches()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                _check_steppable(param)
            if not params:
                continue
            started = [param for param in params if self.state[param]]
            new = [param for param in params if not self.state[param]]
            with precise(params[0].device, tf32=group["tf32"]):
                batches = self._batches_of(number, group, started)
                if batches:
                    self._step_batches(number, group, batches)
                for layout, alike in self._alike(group, new):
                    self._start(group, layout, alike)
            with precise(params[0].device, tf32=False):
                due = [(batch, batch.due(group, offset)) for offset, batch in enumerate(batches)]
                self._refresh(number, group, [(batch, members) for batch, members in due if members])
        return loss

    def _forget_batches(self) -> None:
        self._batches: dict[int, list[Batch]] = {}
        self._graphs = Graphs()

    def _batches_of(self, number: int, group: dict[str, Any], params: list[Tensor]) -> list[Batch]:
        """`params` in batches; those of the last step where they hold the same parameters and states."""
        batches = self._batches.get(number, [])
        held = [id(param) for batch in batches for param in batch.params]
        if sorted(held) != sorted(map(id, params)) or not all(batch.is_current(self.state) for batch in batches):
            self._graphs.forget(("step", number))
            self._graphs.forget(("refresh", number))
            for param in {p for batch in batches for p in batch.params} - set(params):
                _let_go_(self.state[param])
            batches = [Batch(layout, alike, self.state) for layout, alike in self._alike(group, params)]
            batches.sort(key=lambda batch: -batch.work.numel())
            self._batches[number] = batches
        return batches

    def _alike(self, group: dict[str, Any], params: list[Tensor]) -> list[tuple[Layout, list[Tensor]]]:
        """`params` by layout, device and number of steps taken."""
        alike: dict[Any, list[Tensor]] = {}
        for param in params:
            key = (Layout.of(param, group), param.device, self.state[param].get("step"))
            alike.setdefault(key, []).append(param)
        return [(key[0], members) for key, members in alike.items()]

    def _start(self, group: dict[str, Any], layout: Layout, params: list[Tensor]) -> None:
        """Build factors and bases from the first gradient."""
        gradients = layout.gradients(params)
        factors: list[Tensor | None] = []
        for i, size in enumerate(layout.shape):
            factor = gradients.new_zeros(len(params), size, size) if layout.rotates[i] else None
            if factor is not None:
                accumulate_factor_(factor, gradients, i, Constants.of(group).shampoo_beta)
            factors.append(factor)
        with precise(gradients.device, tf32=False):
            bases = [None if factor is None else eigenbasis(factor) for factor in factors]
        for j, param in enumerate(params):
            self.state[param] = {
                "step": 0,
                "exp_avg": torch.zeros_like(gradients[j]),
                "exp_avg_sq": torch.zeros_like(gradients[j]),
                "GG": [None if factor is None else factor[j].clone() for factor in factors],
                "Q": [None if basis is None else basis[j].clone() for basis in bases],
            }

    def _step_batches(self, number: int, group: dict[str, Any], batches: list[Batch]) -> None:
        """One step of these batches; the part that is the same at every step is captured where that is possible."""
        steps = [batch.advance() for batch in batches]
        params = [param for batch in batches for param in batch.params]
        copy_gradients_([view for batch in batches for view in batch.work_views], params)
        constants = Constants.of(group)
        if _can_be_captured(group, batches):
            function, device = partial(gradients_to_updates_, batches, constants), batches[0].work.device
            self._graphs.run(("step", number), function, (*batches, constants), device)
        else:
            gradients_to_updates_(batches, constants)
        lr, (beta1, beta2) = float(group["lr"]), constants.betas
        rates = [-lr] * len(steps)
        if group["correct_bias"]:
            rates = [-lr * math.sqrt(1 - beta2**step) / (1 - beta1**step) for step in steps]
        if len(set(rates)) > 1:
            torch._foreach_mul_([batch.work for batch in batches], rates)
            rates = [1.0]
        updates = [update for batch in batches for update in batch.updates()]
        _add_(params, updates, rates[0], 1 - lr * group["weight_decay"])

    def _refresh(self, number: int, group: dict[str, Any], due: list[tuple[Batch, slice]]) -> None:
        """Refresh these bases; captured where the same are due every time."""
        batches = [batch for batch, _ in due]
        if due and not group["spread_refresh"] and _can_be_captured(group, batches):
            self._graphs.run(("refresh", number), partial(refresh, due), tuple(batches), batches[0].work.device)
        elif due:
            refresh(due)


def _can_be_captured(group: dict[str, Any], batches: list[Batch]) -> bool:
    work = batches[0].work
    return group["cuda_graph"] and work.is_cuda and all(batch.work.device == work.device for batch in batches)


def _let_go_(state: dict[str, Any]) -> None:
    """Give a parameter that leaves its batch tensors of its own, so that they do not hold on to the batch's."""
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = value.clone()
        elif isinstance(value, list):
            state[name] = [None if item is None else item.clone() for item in value]


def _add_(params: list[Tensor], updates: list[Tensor], rate: float, shrink: float) -> None:
    """Add to each parameter its update times `rate`, then multiply by `shrink`; of a sharded one, this rank's part."""
    updates = [_shard_of(update, param) for update, param in zip(updates, params, strict=True)]
    params = [param.to_local() if isinstance(param, DTensor) else param for param in params]
    torch._foreach_add_(params, updates, alpha=rate)
    if shrink != 1:
        torch._foreach_mul_(params, shrink)


def _shard_of(whole: Tensor, param: Tensor) -> Tensor:
    """The part of `whole`, which every rank has, that belongs to this rank's shard of `param`."""
    if not isinstance(param, DTensor):
        return whole
    everywhere = [Replicate()] * param.device_mesh.ndim
    shared = DTensor.from_local(whole, param.device_mesh, everywhere, run_check=False)
    return shared.redistribute(placements=param.placements).to_local()


def _check_steppable(param: Tensor) -> None:
    if param.is_complex() or (param.grad is not None and param.grad.is_sparse):
        kind = "complex parameters" if param.is_complex() else "sparse gradients"
        raise InvalidArgumentError(f"SOAP cannot step {kind}; give those parameters to another optimizer")


def _moved(value: Any, param: Tensor) -> Any:
    """`value` with its tensors where `param` is, in the precision its state is kept in."""
    if isinstance(value, Tensor):
        return value.to(param.device, torch.promote_types(param.dtype, torch.float32))
    if isinstance(value, list):
        return [_moved(item, param) for item in value]
    if isinstance(value, dict):
        return {key: _moved(item, param) for key, item in value.items()}
    return value


def _check_options(options: dict[str, Any]) -> None:
    """Raise where an option is outside what it is defined for."""
    formats = ("channels_first", "channels_last")
    expected = {
        "lr": (options["lr"] >= 0, ">= 0"),
        "betas": (len(options["betas"]) == 2 and all(0 <= b < 1 for b in options["betas"]), "two numbers in [0, 1)"),
        "shampoo_beta": (options["shampoo_beta"] < 1, "< 1"),
        "eps": (options["eps"] >= 0, ">= 0"),
        "weight_decay": (options["weight_decay"] >= 0, ">= 0"),
        "precondition_frequency": (options["precondition_frequency"] >= 1, ">= 1"),
        "max_precond_dim": (options["max_precond_dim"] >= 0, ">= 0"),
        "data_format": (options["data_format"] in formats, f"one of {formats}"),
    }
    for name, (valid, what) in expected.items():
        if not valid:
            raise InvalidArgumentError(f"{name}={options[name]!r}: expected {what}")
