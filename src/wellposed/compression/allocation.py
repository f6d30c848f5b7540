"""How many bits each factor gets, from what they do to the error of dW."""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from wellposed.compression.packed import PackedTensor
from wellposed.compression.quantizers import MOST_BITS
from wellposed.compression.updates import Layer, as_matrix, update_error
from wellposed.errors import InvalidArgumentError

Quantizer = Callable[[str, int], PackedTensor]
"""The factor of a name, with so many bits."""


@dataclass
class Path:
    """A layer on its way from one bit to eight for each factor, each step that which lowers the error most per byte."""

    layer: Layer
    quantizer: Quantizer
    bits: dict[str, int] = field(init=False)
    error: float = field(init=False)

    def __post_init__(self) -> None:
        self.bits = {self.layer.a_key: 1, self.layer.b_key: 1}
        self.error = self._error(self.bits)

    @property
    def nbytes(self) -> int:
        """Of the layer's factors as they are now."""
        return self._nbytes(self.bits)

    def step(self) -> tuple[float, dict[str, int], float, int] | None:
        """The next one as what it wins per byte, the bits and the error after it and its bytes; None at the end."""
        steps = []
        for key, bits in self.bits.items():
            if bits < MOST_BITS:
                after = self.bits | {key: bits + 1}
                error, price = self._error(after), self._nbytes(after) - self.nbytes
                steps.append(((self.error**2 - error**2) / price, after, error, price))
        return max(steps, key=lambda step: (step[0], -max(step[1].values())), default=None)

    def measure_whole(self) -> float:
        """The error on all entries of dW, where it was measured on some of them on the way."""
        return self._error(self.bits, sampled=False)

    def _error(self, bits: dict[str, int], sampled: bool = True) -> float:
        a, b = (as_matrix(self.quantizer(key, bits[key]).values()) for key in (self.layer.a_key, self.layer.b_key))
        return update_error(self.layer, a, b, sampled=sampled)

    def _nbytes(self, bits: dict[str, int]) -> int:
        return sum(self.quantizer(key, count).nbytes for key, count in bits.items())


def bits_for_error(layers: list[Layer], quantizer: Quantizer, most: float) -> dict[str, int]:
    """Bits with which the error of every layer's dW is at most `most`."""
    chosen: dict[str, int] = {}
    for layer in layers:
        path = Path(layer, quantizer)
        while path.error > most or path.measure_whole() > most:
            step = path.step()
            if step is None:
                raise InvalidArgumentError(
                    f"max_error={most}: with {MOST_BITS} bits the error of {layer.name} is {path.measure_whole():.3g} "
                    "still. Expected a larger one."
                )
            _, path.bits, path.error, _ = step
        chosen |= path.bits
    return chosen


def bits_for_size(layers: list[Layer], quantizer: Quantizer, most: int) -> dict[str, int]:
    """Bits with which the factors take at most `most` bytes, the sum of the layers' squared errors as small as it gets.

    One bit each is the least; each further bit goes where it lowers that sum most for its bytes.
    """
    paths = [Path(layer, quantizer) for layer in layers]
    left = most - sum(path.nbytes for path in paths)
    if left < 0:
        raise InvalidArgumentError(f"the budget is {-left} bytes below what the adapter takes with one bit per number")
    waiting = [(-step[0], i, step) for i, path in enumerate(paths) if (step := path.step())]
    heapify(waiting)
    while waiting:
        _, i, (_, bits, error, price) = heappop(waiting)
        if price > left:
            continue
        left -= price
        paths[i].bits, paths[i].error = bits, error
        if following := paths[i].step():
            heappush(waiting, (-following[0], i, following))
    return {key: bits for path in paths for key, bits in path.bits.items()}
