"""Which omega a layer gets, and what an omega, a gain and a rank may be.

The control variable is std(omega B A): below 1 the sine is all but linear, so that the layer is an ordinary low-rank
one of another scale; the gain in rank starts at 1 and is all there at about 4.
"""

from math import isfinite, sqrt
from numbers import Integral, Real
from typing import Any, Literal

from wellposed.errors import InvalidArgumentError

Omega = float | Literal["auto"]

_AIM_OF_A_LAYER = 2.0
_TRAINED_STD = 0.01
"""Standard deviation that training gives the factor of an adapter that starts at zero."""


def layer_omega(in_features: int) -> float:
    """2 * 3 sqrt(in), for which std(omega U V^T) = 2 at the start of a dense layer, whatever the rank.

    Both factors are Kaiming-uniform with a = sqrt 5, so that std(U V^T) = 1 / (3 sqrt(in)).

    Example:
        >>> layer_omega(256)
        96.0
    """
    return _AIM_OF_A_LAYER * 3 * sqrt(in_features)


def adapter_omega(rank: int, init_std: float) -> float:
    """1 / (0.01 init_std sqrt(r)), for which std(omega B A) = 1 once training has brought the other factor to 0.01.

    Args:
        rank: r.
        init_std: standard deviation of the factor that starts random. LoRA's A has 1 / sqrt(3 in), which makes this
            sqrt(3 in) / (0.01 sqrt(r)).

    Example:
        >>> round(adapter_omega(16, (3 * 4096) ** -0.5))
        2771
    """
    return 1 / (_TRAINED_STD * init_std * sqrt(rank))


def check_positive(name: str, value: Any, otherwise: str) -> None:
    """InvalidArgumentError unless `value` is a finite number above 0; `otherwise` is what else is allowed."""
    known = isinstance(value, Real) and not isinstance(value, bool)
    if not known or not isfinite(value) or value <= 0:
        raise InvalidArgumentError(f"{name}={value!r}: expected a number above 0, or {otherwise}")


def check_omega(omega: Any, name: str = "omega") -> None:
    """InvalidArgumentError unless `omega` is "auto" or a finite number above 0."""
    if not (isinstance(omega, str) and omega == "auto"):
        check_positive(name, omega, "'auto'")


def check_gain(gain: Any) -> None:
    """InvalidArgumentError unless `gain` is None or a finite number above 0."""
    if gain is not None:
        check_positive("gain", gain, "None for sqrt(in_features)")


def check_rank(rank: Any, in_features: int, out_features: int, name: str = "") -> None:
    """InvalidArgumentError unless `rank` is a whole number from 1 to the smaller side of the matrix."""
    largest = min(in_features, out_features)
    where = f" for {name}" if name else ""
    if not isinstance(rank, Integral) or isinstance(rank, bool) or not 1 <= int(rank) <= largest:
        raise InvalidArgumentError(
            f"rank={rank!r}{where}: expected a whole number from 1 to {largest}, the most that a "
            f"{out_features} x {in_features} matrix can have"
        )
