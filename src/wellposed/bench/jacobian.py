"""How long the spectrum of a block's Jacobian takes, against curvlinops' products in scipy's sparse SVD."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from wellposed.bench.table import Table
from wellposed.errors import InvalidArgumentError

if TYPE_CHECKING:
    from torch import Tensor

    from wellposed.spectrum import JacobianSpectrum


@dataclass(frozen=True)
class JacobianBench:
    """Time wellposed.jacobian_spectrum on a block of a ViT against scipy's svds on curvlinops' Jacobian."""

    model: str = "vit_base_patch16_224"
    """Name of a timm VisionTransformer; its first block is measured, and the attention in it by itself."""
    tokens: int = 197
    """Standard normal ones, into the block; attention gets them through the block's first norm."""
    k: int = 8
    """How many of the largest singular values."""
    tol: float = 1e-3
    """How well svds and which="largest" are to know them, relative to the largest."""
    repeats: int = 3
    """Timed runs after one to warm up; the median is reported."""
    device: str = "cuda"
    seed: int = 0

    def run(self) -> Table:
        """Measure svds, then the largest singular values alone, then both ends and the density."""
        import timm
        import torch

        from wellposed.runs import device_named, provenance

        if self.model not in timm.list_models("vit_*"):
            raise InvalidArgumentError(f"model={self.model!r}: expected one of timm.list_models('vit_*')")
        if min(self.tokens, self.k, self.repeats) < 1 or not 0 < self.tol < 1:
            raise InvalidArgumentError(
                f"tokens={self.tokens}, k={self.k}, repeats={self.repeats}, tol={self.tol}: expected at least 1 of "
                "each, and a tolerance between 0 and 1"
            )
        device = device_named(self.device)
        torch.manual_seed(self.seed)
        model = timm.create_model(self.model, depth=1).eval().to(device)
        block, x = model.blocks[0], torch.randn(1, self.tokens, model.embed_dim, device=device)
        with torch.no_grad():
            parts = {"attention": (block.attn, block.norm1(x)), "block": (block, x)}
        return Table(
            title=f"Jacobians in {self.model} at {self.tokens} tokens, {x.numel():,} x {x.numel():,}, k = {self.k}",
            columns=(
                *("of", "way", "seconds", "times faster", "peak, GB", "products"),
                *("largest", "within", "smallest, at most"),
            ),
            rows=tuple(row for part, (module, at) in parts.items() for row in self._rows(part, module, at)),
            facts=provenance(device, seed=self.seed),
        )

    def _rows(self, part: str, module: Any, x: "Tensor") -> list[tuple[str, ...]]:
        from wellposed.spectrum import jacobian_spectrum

        (peer, count), slow, peak = self._measured(lambda: singular_values_by_svds(module, x, self.k, self.tol), x)
        rows: list[tuple[str, ...]] = [
            (part, "svds, curvlinops", f"{slow:.2f}", "1.0", peak, str(count), f"{peer[0]:.4f}", "", "")
        ]
        for which in ("largest", "both"):

            def ours(which: Any = which) -> "JacobianSpectrum":
                return jacobian_spectrum(module, x, self.k, which, tol=self.tol)

            found, seconds, peak = self._measured(ours, x)
            smallest = f"{found.smallest[0]:.2e}" if len(found.smallest) else ""
            within = f"{found.largest_errors[0]:.1e}"
            cells = (f"{seconds:.2f}", f"{slow / seconds:.1f}", peak, str(found.products), f"{found.largest[0]:.4f}")
            rows.append((part, f'which="{which}"', *cells, within, smallest))
        return rows

    def _measured(self, work: Callable[[], Any], x: "Tensor") -> tuple[Any, float, str]:
        """What `work` returns, the median of its seconds, and on a GPU the most gigabytes it held."""
        import torch

        on_gpu = x.device.type == "cuda"
        times = []
        for _ in range(self.repeats + 1):
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(x.device)
            start = time.perf_counter()
            result = work()
            if on_gpu:
                torch.cuda.synchronize(x.device)
            times.append(time.perf_counter() - start)
        peak = f"{torch.cuda.max_memory_allocated(x.device) / 1e9:.2f}" if on_gpu else ""
        return result, median(times[1:]), peak


def singular_values_by_svds(module: Any, x: "Tensor", k: int, tol: float) -> tuple[list[float], int]:
    """The k largest singular values of the Jacobian of `module` at `x`, the largest first, and the products taken."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        # Torch warns of itself in forward-mode derivatives, and of what curvlinops imports.
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        jacobian, products = curvlinops_jacobian(module, x).to_scipy(), 0

        def counted(product: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def counting(vector: Any) -> Any:
                nonlocal products
                products += 1
                return product(vector)

            return counting

        from scipy.sparse.linalg import LinearOperator, svds

        both = {"matvec": counted(jacobian.matvec), "rmatvec": counted(jacobian.rmatvec)}
        operator = LinearOperator(jacobian.shape, dtype=jacobian.dtype, **both)
        values = svds(operator, k=k, tol=tol, return_singular_vectors=False)
    return sorted(map(float, values), reverse=True), products


def curvlinops_jacobian(module: Any, x: "Tensor") -> Any:
    """The Jacobian of `module` at `x` as curvlinops' operator; that is with respect to parameters, so x is made one."""
    from torch import nn

    try:
        from curvlinops import JacobianLinearOperator
    except ImportError as error:
        raise InvalidArgumentError("the peer is missing: pip install curvlinops-for-pytorch") from error

    class AtInput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.x = module, nn.Parameter(x.clone())

        def forward(self, _: Any) -> Any:
            return self.module(self.x)

    at_input = AtInput()
    nothing = [(x.new_zeros(len(x), 1), x.new_zeros(len(x)))]
    return JacobianLinearOperator(at_input, [at_input.x], nothing, check_deterministic=False)
