"""How fast element-wise attention is, against torch's fused softmax attention on the same device in the same run."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from wellposed.bench.table import Table
from wellposed.bench.timing import queued_seconds, seconds
from wellposed.bench.train import _matmul_flops
from wellposed.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Shape = tuple[int, int, int, int]
NAMES = {"power3": "degree 3", "power2": "degree 2", "relu": "ReLU / N", "sigmoid": "sigmoid"}


@dataclass(frozen=True)
class AttentionBench:
    """Time wellposed's attention of degree 3 against the best of torch's flash and cuDNN softmax attention."""

    shapes: tuple[Shape, ...] = (
        (16, 16, 1024, 64),
        (4, 16, 4096, 64),
        (1, 16, 16384, 64),
        (4, 16, 4096, 128),
        (64, 12, 197, 64),
    )
    """Batch, heads, tokens and width of a head. On the first also degree 2, ReLU / N and sigmoid are timed."""
    causal: tuple[bool, ...] = (False, True)
    """Without a causal mask, with one, or both."""
    tune: bool = False
    """Time each kernel with all the tiles it may use instead, the fastest first."""
    repeats: int = 20
    """Timed windows of five calls, after three to warm up; the median is reported."""
    device: str = "cuda"
    """On a GPU in bfloat16; on the CPU, where there are no kernels, in float32 against softmax's definition."""
    seed: int = 0

    def run(self) -> Table:
        """Measure everything in turn and return the table."""
        import torch

        from wellposed.runs import device_named, provenance

        if self.repeats < 1:
            raise InvalidArgumentError(f"repeats={self.repeats}: expected at least 1")
        if not self.shapes or not self.causal or any(size < 1 for shape in self.shapes for size in shape):
            raise InvalidArgumentError(
                f"shapes={self.shapes}, causal={self.causal}: expected at least one of each, of sizes above 0"
            )
        device = device_named(self.device)
        if self.tune and device.type != "cuda":
            raise InvalidArgumentError(f"device={self.device!r}: tiles are of kernels on a GPU, expected 'cuda'")
        torch.manual_seed(self.seed)
        peak = _matmul_flops(device)
        settings = [(shape, causal) for shape in self.shapes for causal in self.causal]
        rows = [
            row for setting in settings for row in (self._tiles if self.tune else self._rows)(*setting, device, peak)
        ]
        facts = {**provenance(device, seed=self.seed), "matmul": f"{peak / 1e12:.3g} TFLOP/s"}
        of_pass = ("ms", "x torch", "TFLOP/s", "of matmul")
        of_both = (*of_pass, "ms to ask for it")
        both = (*(f"forward, {what}" for what in of_pass), *(f"forward + backward, {what}" for what in of_both))
        return Table(
            title=f"Attention in {_dtype(device)}".replace("torch.", ""),
            columns=(
                "B, H, N, d",
                "causal",
                *(("kernel", "tiles", *of_pass[::2]) if self.tune else ("attention", *both)),
            ),
            rows=tuple(rows),
            facts=facts,
        )

    def _rows(self, shape: Shape, causal: bool, device: "torch.device", peak: float) -> list[tuple[str, ...]]:
        from wellposed.attention.ops import elementwise_attention

        tensors = _tensors(shape, device)
        flops = _forward_flops(shape, causal)
        theirs = {name: self._times(how, tensors, device) for name, how in _fused(causal, device).items()}
        best = tuple(min(times[i] for times in theirs.values()) for i in range(2))
        times = {f"softmax, {name}": each for name, each in theirs.items()}
        for phi in NAMES if shape == self.shapes[0] else ("power3",):

            def ours(q: "Tensor", k: "Tensor", v: "Tensor", phi: str = phi) -> "Tensor":
                return elementwise_attention(q, k, v, phi=phi, logit_scale=shape[-1] ** -0.5, causal=causal)

            times[NAMES[phi]] = self._times(ours, tensors, device)
        return [
            (
                *(", ".join(map(str, shape)), "yes" if causal else "no", name),
                *_cells(each[0], best[0], flops, peak),
                *_cells(each[1], best[1], 3.5 * flops, peak),
                f"{1e3 * each[2]:.3f}",
            )
            for name, each in times.items()
        ]

    def _times(
        self, how: Callable[..., "Tensor"], tensors: tuple["Tensor", ...], device: "torch.device"
    ) -> tuple[float, float, float]:
        """Seconds of the forward pass, of both, and of the host to ask for both."""
        import torch

        *inputs, do = tensors
        forward, _ = self._seconds(lambda: how(*(x.detach() for x in inputs)), device)
        return forward, *self._seconds(lambda: torch.autograd.grad(how(*inputs), inputs, do), device)

    def _seconds(self, work: Callable[[], Any], device: "torch.device") -> tuple[float, float]:
        if device.type == "cuda":
            return queued_seconds(work, device, repeats=self.repeats)
        taken = median(seconds(work, device, repeats=self.repeats, warm_up=3))
        return taken, taken

    def _tiles(self, shape: Shape, causal: bool, device: "torch.device", peak: float) -> list[tuple[str, ...]]:
        import torch
        from triton.runtime.errors import OutOfResources  # type: ignore[import-untyped]

        from wellposed.attention import kernels
        from wellposed.attention.kernels_settings import Problem
        from wellposed.attention.kernels_tiles import WIDTHS, candidates, span_of

        q, k, v, do = (x.detach() for x in _tensors(shape, device))
        problem = Problem("power3", shape[-1] ** -0.5, None, None, causal, None)
        works: dict[Any, tuple[float, Callable[[], Any]]] = {
            "forward": (1.0, lambda: kernels.forward(torch.empty_like(q), q, k, v, problem)),
            "queries": (1.5, lambda: kernels.backward_queries(torch.empty_like(q), do, q, k, v, problem)),
            "keys": (
                2.0,
                lambda: kernels.backward_keys(torch.empty_like(k), torch.empty_like(v), do, q, k, v, problem),
            ),
        }
        rows = []
        width = next(width for width in WIDTHS if width >= shape[-1])
        for kernel, (products, work) in works.items():
            times = {}
            for tiles in candidates(kernel, width, single=False, causal=causal, span=span_of(shape[2])):
                try:
                    with kernels.with_tiles(kernel, tiles):
                        times[tiles], _ = self._seconds(work, device)
                except OutOfResources:
                    continue
            flops = products * _forward_flops(shape, causal)
            rows += [
                (
                    ", ".join(map(str, shape)),
                    "yes" if causal else "no",
                    kernel,
                    str(tiles),
                    *_cells(t, t, flops, peak)[::2],
                )
                for tiles, t in sorted(times.items(), key=lambda each: each[1])
            ]
        return rows


def _tensors(shape: Shape, device: "torch.device") -> "tuple[Tensor, ...]":
    """q, k and v with gradients, and one for the output."""
    import torch

    q, k, v, do = (torch.randn(shape, device=device).to(_dtype(device)) for _ in range(4))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def _dtype(device: "torch.device") -> "torch.dtype":
    import torch

    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _fused(causal: bool, device: "torch.device") -> "dict[str, Callable[..., Tensor]]":
    """Softmax attention of torch by each of the ways that run here."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    backends = {"torch flash": SDPBackend.FLASH_ATTENTION, "torch cuDNN": SDPBackend.CUDNN_ATTENTION}
    if device.type != "cuda":
        backends = {"torch math": SDPBackend.MATH}
    ways = {}
    for name, backend in backends.items():

        def way(q: "Tensor", k: "Tensor", v: "Tensor", backend: SDPBackend = backend) -> "Tensor":
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=causal)

        try:
            x = torch.ones(1, 1, 64, 64, dtype=_dtype(device), device=device)
            way(x, x, x)
        except RuntimeError:
            continue
        ways[name] = way
    if not ways:
        raise InvalidArgumentError(f"none of torch's {', '.join(backends)} attention runs on {device}")
    return ways


def _forward_flops(shape: Shape, causal: bool) -> float:
    """Of two products over all pairs of tokens, half of them if causal; the backward pass needs five."""
    b, h, n, d = shape
    return 4.0 * b * h * n * n * d / (2 if causal else 1)


def _cells(taken: float, best: float, flops: float, peak: float) -> tuple[str, ...]:
    rate = flops / taken
    return f"{1e3 * taken:.3f}", f"{best / taken:.2f}", f"{rate / 1e12:.3g}", f"{rate / peak:.0%}"
