"""The linear layers of a field: full-rank, low-rank or sine low-rank (arXiv 2403.19243)."""

from typing import Literal, get_args

from torch import nn

from wellposed.errors import InvalidArgumentError
from wellposed.lowrank import LowRankLinear, SineLinear
from wellposed.lowrank.frequency import Omega

Kind = Literal["full", "low-rank", "sine"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def field_linear(
    in_features: int,
    out_features: int,
    rank: int | None,
    kind: Kind,
    omega: Omega = "auto",
    bias: bool = True,
    gain: float | None = None,
) -> nn.Module:
    """A linear layer of the kind that is asked for.

    Args:
        in_features: width of its input.
        out_features: width of its output.
        rank: k of "low-rank" and "sine", from 1 to the smaller width; of no meaning for "full".
        kind: "full" for W, "low-rank" for U V^T, "sine" for sin(omega U V^T) / g.
        omega: the frequency of "sine".
        bias: whether there is one.
        gain: g of "sine"; sqrt(in_features) if None, the paper's.

    Example:
        >>> [parameter_count(field_linear(256, 256, 5, kind)) for kind in KINDS]
        [65792, 2816, 2816]
    """
    if kind not in KINDS:
        raise InvalidArgumentError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
    if kind == "full":
        return nn.Linear(in_features, out_features, bias=bias)
    if rank is None:
        raise InvalidArgumentError(f"rank=None: expected the rank of a {kind} layer")
    if kind == "low-rank":
        return LowRankLinear(in_features, out_features, rank, bias=bias)
    return SineLinear(in_features, out_features, rank, omega=omega, gain=gain, bias=bias)


def parameter_count(network: nn.Module) -> int:
    """Numbers that are learned."""
    return sum(parameter.numel() for parameter in network.parameters())
