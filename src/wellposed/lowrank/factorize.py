"""Replacing the linear layers of a model by low-rank ones."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from wellposed.errors import InvalidArgumentError, UnsuitableModelError
from wellposed.families import drop_compiled_code, readable_name, unwrapped
from wellposed.lowrank.frequency import Omega, check_gain, check_omega, check_rank
from wellposed.lowrank.linear import LowRankLinear, SineLinear
from wellposed.lowrank.targets import ALL, check_targets, is_target, none_of

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class ParameterCounts:
    """How many parameters a model has, and had before any of its layers was factorized."""

    before: int
    now: int

    def __str__(self) -> str:
        return f"{self.before:,} -> {self.now:,} parameters ({self.now / max(self.before, 1):.1%})"


def factorize(
    model: Model,
    rank: int,
    targets: str | Sequence[str] = ALL,
    omega: Omega = "auto",
    activation: Literal["sine", "none"] = "sine",
    gain: float | None = None,
) -> Model:
    """Put low-rank layers in the place of linear ones, in place, and return the model.

    The new matrices are drawn afresh: this is a change of architecture before training, not a compression of trained
    weights. Biases, device and type stay. `parameter_counts(model)` says what it saves; so does the recipe.

    Args:
        model: any model with torch.nn.Linear layers.
        rank: k of every new layer, at most the smaller side of each matrix.
        targets: which layers, as PEFT's target_modules: ends of names (["mlp.fc1", "mlp.fc2"]), a regular expression
            for the whole name, or "all-linear", every one.
        omega: the frequency, above 0; "auto" for 6 sqrt(in) of each layer.
        activation: "sine" for W = sin(omega U V^T) / g, "none" for W = U V^T, the baseline.
        gain: g; sqrt(in) of each layer if None.

    Raises:
        InvalidArgumentError: an argument out of its range, or targets that no layer has (close names are listed).
        UnsuitableModelError: a weight is tied, sharded or quantized. The model is untouched in every case.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> print(parameter_counts(factorize(model, rank=4, targets=["0", "2"])))
        33,088 -> 2,880 parameters (8.7%)
    """
    check_targets(targets)
    inside = unwrapped(model)
    linears = {name: module for name, module in inside.named_modules() if type(module) is nn.Linear}
    chosen = [name for name in linears if is_target(readable_name(name), targets)]
    if not chosen:
        names = [readable_name(name) for name in linears]
        raise InvalidArgumentError(f"targets={targets!r} match no torch.nn.Linear. {none_of(targets, names)}")
    _replace(inside, chosen, rank, omega, activation, gain)
    return model


def parameter_counts(model: nn.Module) -> ParameterCounts:
    """The parameters of `model`, and those it would have with dense layers in the place of its low-rank ones."""
    now = sum(parameter.numel() for parameter in model.parameters())
    saved = sum(
        module.in_features * module.out_features - module.U.numel() - module.Vt.numel()
        for module in model.modules()
        if isinstance(module, LowRankLinear)
    )
    return ParameterCounts(now + saved, now)


def read_factorizations(model: nn.Module) -> list[dict[str, Any]]:
    """The arguments with which `replay_factorization` makes a fresh model like `model`, with omegas as numbers."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    saved: Counter[tuple[Any, ...]] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, LowRankLinear):
            sine = isinstance(module, SineLinear)
            # The paper's gain follows from the width; only another one is worth a word.
            own_gain = module.gain if sine and module.gain != sqrt(module.in_features) else None
            key = (module.rank, module.omega if sine else None, own_gain)
            groups.setdefault(key, []).append(readable_name(name))
            saved[key] += module.in_features * module.out_features - module.rank * (
                module.in_features + module.out_features
            )
    return [
        {"rank": rank, "targets": names, "activation": "none" if omega is None else "sine"}
        | ({} if omega is None else {"omega": omega})
        | ({} if gain is None else {"gain": gain})
        | {"parameters_saved": saved[rank, omega, gain]}
        for (rank, omega, gain), names in groups.items()
    ]


def replay_factorization(
    model: nn.Module,
    rank: int,
    targets: list[str],
    activation: Literal["sine", "none"],
    omega: Omega = "auto",
    gain: float | None = None,
    parameters_saved: int = 0,
) -> None:
    """Make one of the entries that `read_factorizations` gave; `targets` are full names here."""
    inside = unwrapped(model)
    linears = {readable_name(name): name for name, module in inside.named_modules() if type(module) is nn.Linear}
    missing = [name for name in targets if name not in linears]
    if missing:
        raise InvalidArgumentError(f"there is no torch.nn.Linear {missing[0]!r}. {none_of(missing[:1], list(linears))}")
    _replace(inside, [linears[name] for name in targets], rank, omega, activation, gain)


def _replace(model: nn.Module, names: list[str], rank: int, omega: Omega, activation: str, gain: float | None) -> None:
    if activation not in {"sine", "none"}:
        raise InvalidArgumentError(f"activation={activation!r}: expected 'sine' or 'none'")
    check_omega(omega)
    check_gain(gain)
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    places: dict[str, nn.Linear] = {name: model.get_submodule(name) for name in names}  # type: ignore[misc]
    for name, linear in places.items():
        check_rank(rank, linear.in_features, linear.out_features, name)
        _check_replaceable(name, linear, uses)
    for name, linear in places.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, _low_rank(linear, rank, omega, activation, gain))
    drop_compiled_code()


def _check_replaceable(name: str, linear: nn.Linear, uses: Counter[int]) -> None:
    weight = linear.weight
    if type(weight) is not nn.Parameter or not weight.is_floating_point():
        raise UnsuitableModelError(
            f"cannot factorize {name}: its weight is a {type(weight).__name__} of {weight.dtype}, expected a plain "
            "parameter. Factorize the model before it is quantized, sharded or parametrized."
        )
    if uses[id(weight)] > 1:
        raise UnsuitableModelError(
            f"cannot factorize {name}: its weight is that of another layer too (tied). Untie it, or leave it out of "
            "targets."
        )


def _low_rank(linear: nn.Linear, rank: int, omega: Omega, activation: str, gain: float | None) -> LowRankLinear:
    """A fresh low-rank layer in the place of `linear`, with its bias, device, type and mode."""
    size = (linear.in_features, linear.out_features, rank)
    where: dict[str, Any] = {"device": linear.weight.device, "dtype": linear.weight.dtype}
    bias = linear.bias is not None
    layer = (
        SineLinear(*size, omega=omega, gain=gain, bias=bias, **where)
        if activation == "sine"
        else LowRankLinear(*size, bias=bias, **where)
    )
    if layer.bias is not None and not layer.bias.is_meta:
        with torch.no_grad():
            layer.bias.copy_(linear.bias)
    return layer.train(linear.training)
