"""What a sine adapter costs: forward and backward of one adapted layer against PEFT's LoRA and DoRA.

Counted for T tokens through an in x out layer with 16-bit numbers, r in the tens. LoRA: two products of full size
(y and dx), 4 T in out operations, and six thin ones; W0 is read twice. A sine adapter: dy^T x as well, 6 T in out
operations; W0 is read twice and W0 + s sin(omega B A) written twice, dy^T x written and read once, which is 6 in out
numbers of 2 bytes where LoRA moves 2. The floor beside the times is measured: the three products, and a copy of W0.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import sqrt
from statistics import median
from typing import TYPE_CHECKING, Any

from wellposed.bench.table import Table
from wellposed.bench.timing import queued_seconds, seconds
from wellposed.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_LORA, _FUNCTION, _LAYER = "PEFT LoRA", "sine_linear", "SineLoraConfig in PEFT"


@dataclass(frozen=True, kw_only=True)
class AdaptersBench:
    """Forward and backward of one bfloat16 layer with an adapter, without dropout: milliseconds and peak memory."""

    layers: tuple[tuple[int, int], ...] = ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096))
    """In and out of each layer: those of Llama-3-8B."""
    ranks: tuple[int, ...] = (8, 32)
    tokens: tuple[int, ...] = (2048, 4096, 8192)
    windows: int = 10
    """Timed windows of ten runs, after three to warm up; the median is reported."""
    device: str = "cuda"
    seed: int = 0

    def run(self) -> Table:
        """Measure every way on every layer, rank and number of tokens."""
        import torch

        from wellposed.runs import device_named, provenance

        device = device_named(self.device)
        sizes = {"layers": sum(self.layers, ()), "ranks": self.ranks, "tokens": self.tokens, "windows": (self.windows,)}
        for name, each in sizes.items():
            if not each or min(each) < 1:
                raise InvalidArgumentError(f"{name}={getattr(self, name)}: expected at least one, and each at least 1")
        rows = []
        for cols, outs in self.layers:
            for tokens in self.tokens:
                for r in self.ranks:
                    torch.manual_seed(self.seed)
                    rows.append((f"{cols} -> {outs}", f"{tokens}", f"{r}", *self._cells(cols, outs, tokens, r, device)))
        return Table(
            title="One adapted layer, forward + backward, bfloat16: ms, as called (on the GPU alone), and peak MiB",
            columns=("layer", "tokens", "r", "one product", "floor", *_WAYS, *_RATIOS),
            rows=tuple(rows),
            facts={
                "floor": "the three products x W^T, dy W and dy^T x, and a copy of W",
                "as called": "ten runs follow one another, and Python may be what takes the time",
                "on the GPU alone": "by its own clock, with all calls queued before",
                _RATIOS[2]: f"peak of {_FUNCTION} less that of {_LORA}, in bfloat16 weights",
                **provenance(device, seed=self.seed),
            },
        )

    def _cells(self, cols: int, outs: int, tokens: int, r: int, device: "torch.device") -> list[str]:
        import torch

        half: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        weight0 = torch.randn(outs, cols, **half) / sqrt(cols)
        x, dy = torch.randn(tokens, cols, **half, requires_grad=True), torch.randn(tokens, outs, **half)
        product = self._milliseconds(partial(_products, x.detach(), weight0, dy, 1), device)
        floor = self._milliseconds(partial(_products, x.detach(), weight0, dy, 3), device)
        times, on_gpu, peaks = {}, {}, {}
        for name, way in _WAYS.items():
            forward, within = way(weight0, r)
            with within:
                work = partial(_forward_and_backward, forward, x, dy)
                times[name] = self._milliseconds(work, device)
                if device.type == "cuda":
                    on_gpu[name] = 1e3 * queued_seconds(work, device, repeats=2 * self.windows)[0]
                    peaks[name] = _peak(work, device)
        cells = [
            f"{times[name]:.3f}" + (f" ({on_gpu[name]:.3f}), {peaks[name] / 2**20:.0f}" if on_gpu else "")
            for name in _WAYS
        ]
        ratios = [
            f"{times[name] / times[_LORA]:.2f}" + (f" ({on_gpu[name] / on_gpu[_LORA]:.2f})" if on_gpu else "")
            for name in (_FUNCTION, _LAYER)
        ]
        over = f"{(peaks[_FUNCTION] - peaks[_LORA]) / (2 * weight0.numel()):.2f}" if peaks else ""
        return [f"{product:.3f}", f"{floor:.3f}", *cells, *ratios, over]

    def _milliseconds(self, work: Callable[[], Any], device: "torch.device") -> float:
        """Of one run, among ten that follow one another without waiting."""

        def window() -> None:
            for _ in range(10):
                work()

        return 100 * median(seconds(window, device, repeats=self.windows, warm_up=3))


def _products(x: "Tensor", weight0: "Tensor", dy: "Tensor", count: int) -> None:
    """The first `count` of a layer's three products, and if it is all of them a copy of the weight."""
    x @ weight0.T
    if count == 3:
        dy @ weight0
        dy.T @ x
        weight0.clone()


def _forward_and_backward(forward: "Callable[[Tensor], Tensor]", x: "Tensor", dy: "Tensor") -> None:
    forward(x).backward(dy)
    x.grad = None


def _peak(work: Callable[[], Any], device: "torch.device") -> int:
    """Bytes, with all that was there before."""
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return torch.cuda.max_memory_allocated(device)


Way = tuple["Callable[[Tensor], Tensor]", AbstractContextManager[None]]
"""What takes x to y, and within what it runs."""


def _in_peft(config: "Callable[[int], Any]", weight0: "Tensor", r: int) -> Way:
    """A layer of W0 with the adapter that PEFT makes of a config."""
    import torch

    try:
        import peft
    except ImportError as error:
        raise InvalidArgumentError("PEFT is missing: pip install 'wellposed[peft]'") from error

    outs, cols = weight0.shape
    model = torch.nn.Sequential(torch.nn.Linear(cols, outs, bias=False, device="meta"))
    model[0].weight = torch.nn.Parameter(weight0)
    adapted: nn.Module = peft.get_peft_model(model, config(r))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    return model[0], nullcontext()


def _lora(r: int, **more: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=r, lora_alpha=2 * r, lora_dropout=0.0, target_modules=["0"], **more)


def _sine_lora(r: int) -> Any:
    from wellposed.adapters import SineLoraConfig

    return SineLoraConfig(r=r, lora_alpha=2 * r, lora_dropout=0.0, target_modules=["0"])


def _naive(weight0: "Tensor", r: int) -> Way:
    """The formula with torch's autograd, which keeps what it needs."""
    from torch.nn import functional as F

    from wellposed.lowrank import sine_delta

    a, b, omega, scale = _factors(weight0, r)
    return lambda x: F.linear(x, weight0 + sine_delta(a, b, omega, scale, weight0.dtype)), nullcontext()


def _sine_linear(kernels: bool, weight0: "Tensor", r: int) -> Way:
    from wellposed.lowrank import sine_linear
    from wellposed.lowrank.passes import kernels_allowed

    a, b, omega, scale = _factors(weight0, r)
    return lambda x: sine_linear(x, weight0, None, a, b, omega, scale), kernels_allowed(kernels)


def _factors(weight0: "Tensor", r: int) -> "tuple[Tensor, Tensor, float, float]":
    """A, B, omega and s of an adapter in float32, B as large as training makes it."""
    import torch

    outs, cols = weight0.shape
    a = torch.nn.init.kaiming_uniform_(torch.empty(r, cols, device=weight0.device), a=sqrt(5)).requires_grad_()
    b = torch.nn.init.normal_(torch.empty(outs, r, device=weight0.device), std=0.01).requires_grad_()
    return a, b, sqrt(3 * cols / r) / 0.01, 2 / sqrt(cols)


_WAYS: dict[str, Callable[["Tensor", int], Way]] = {
    _LORA: partial(_in_peft, _lora),
    "PEFT DoRA": partial(_in_peft, partial(_lora, use_dora=True)),
    "sine, torch's autograd": _naive,
    "sine_linear, no kernels": partial(_sine_linear, False),
    _FUNCTION: partial(_sine_linear, True),
    _LAYER: partial(_in_peft, _sine_lora),
}
_RATIOS = (f"{_FUNCTION} / LoRA", "its layer in PEFT / LoRA", "weights over LoRA")
