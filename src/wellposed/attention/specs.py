"""What an attention layer applies to its logits, as data."""

from dataclasses import asdict, dataclass, field
from math import isfinite
from numbers import Real
from typing import Any

from wellposed.attention.functional import checked_degree
from wellposed.errors import InvalidArgumentError


@dataclass(frozen=True)
class Polynomial:
    """s x^p, with s = 1 / sqrt(n) for a row that sees n keys (arXiv 2410.18613).

    Example:
        >>> Polynomial(3)
        Polynomial(degree=3, scale=None, learnable=False)
    """

    degree: int = 3
    """p, 1, 2 or 3."""
    scale: float | None = field(default=None, kw_only=True)
    """The same s for every row; 1 leaves the powers unscaled."""
    learnable: bool = field(default=False, kw_only=True)
    """Multiply s by exp(t) with a parameter t for each head, `log_scale_bias`, that starts at 0."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "degree", checked_degree(self.degree))
        number = isinstance(self.scale, Real) and not isinstance(self.scale, bool)
        if self.scale is not None and not (number and isfinite(self.scale) and self.scale > 0):
            raise InvalidArgumentError(f"scale={self.scale!r}: expected a number above 0, or None for 1 / sqrt(n)")
        if not isinstance(self.learnable, bool):
            raise InvalidArgumentError(f"learnable={self.learnable!r}: expected True or False")


@dataclass(frozen=True)
class Relu:
    """max(x, 0) / n for a row that sees n keys."""


@dataclass(frozen=True)
class Sigmoid:
    """sigmoid(x - log n) for a row that sees n keys."""


@dataclass(frozen=True)
class Softmax:
    """Softmax, as the library that made the model computes it."""


Spec = Polynomial | Relu | Sigmoid | Softmax

KINDS: dict[str, type[Spec]] = {"polynomial": Polynomial, "relu": Relu, "sigmoid": Sigmoid, "softmax": Softmax}


def phi_of(spec: Spec) -> str:
    """The name under which `wellposed.attention.eager` knows the function."""
    return f"power{spec.degree}" if isinstance(spec, Polynomial) else _kind(spec)


def to_json(spec: Spec) -> dict[str, Any]:
    """`spec` as a JSON-able dict with its kind."""
    return {"kind": _kind(spec), **asdict(spec)}


def from_json(kind: str, **arguments: Any) -> Spec:
    """The spec that `to_json` gave; raises InvalidArgumentError for one that cannot be."""
    if kind not in KINDS:
        raise InvalidArgumentError(f"kind={kind!r}: expected {', '.join(KINDS)}")
    try:
        return KINDS[kind](**arguments)
    except TypeError as error:
        raise InvalidArgumentError(f"{kind} has no such arguments: {arguments}") from error


def _kind(spec: Spec) -> str:
    return next(name for name, kind in KINDS.items() if kind is type(spec))
