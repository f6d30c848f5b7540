"""What Token Graying costs: a training step with and without it, and the transforms alone against an SVD."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from wellposed.bench.plain import plain_step
from wellposed.bench.table import Table
from wellposed.bench.timing import seconds
from wellposed.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class GrayingBench:
    """Time a training step of a ViT, plain and grayed, and wellposed.gray alone against torch.linalg.svd."""

    model: str = "vit_base_patch16_224"
    """Name of a timm VisionTransformer."""
    at: Literal["patches", "tokens"] = "patches"
    """Where to gray."""
    batch_size: int = 256
    svd_images: int = 16
    """How many of the batch's images torch.linalg.svd is timed on; its time is taken to grow with their number."""
    compile: bool = True
    repeats: int = 20
    """Timed steps after three to warm up; the median is reported."""
    device: str = "cuda"
    seed: int = 0

    def run(self) -> Table:
        """Measure all of them in turn and return the table."""
        import timm
        import torch

        from wellposed.graying import gray
        from wellposed.runs import device_named, provenance

        if self.model not in timm.list_models("*vit_*"):
            raise InvalidArgumentError(f"model={self.model!r}: expected one of timm.list_models('*vit_*')")
        if self.repeats < 1:
            raise InvalidArgumentError(f"repeats={self.repeats}: expected at least 1")
        if not 1 <= self.svd_images <= self.batch_size:
            raise InvalidArgumentError(f"svd_images={self.svd_images}: expected 1 to {self.batch_size}, the batch size")
        device = device_named(self.device)
        torch.manual_seed(self.seed)
        steps = {kind: self._step_seconds(kind, device) for kind in (None, "dct", "svd")}
        tokens_BND = self._tokens(device)
        few_BND = tokens_BND[: self.svd_images]
        by_svd = self._seconds(lambda: gray_by_svd(few_BND), device) * self.batch_size / self.svd_images
        alone = {
            "dct": self._seconds(lambda: gray(tokens_BND, "dct"), device),
            "svd": self._seconds(lambda: gray(tokens_BND, "svd"), device),
        }
        rows = [("training step, not grayed", _ms(steps[None]), "1.00", "")]
        rows += [(f"training step, {kind}", _ms(steps[kind]), f"{steps[kind] / steps[None]:.3f}", "") for kind in alone]
        rows += [
            (f"gray alone, {kind}", _ms(t), f"{t / steps[None]:.3f}", f"{by_svd / t:.1f}") for kind, t in alone.items()
        ]
        rows.append(("torch.linalg.svd, float32", _ms(by_svd), f"{by_svd / steps[None]:.3f}", "1.0"))
        compiled = "compiled" if self.compile else "not compiled"
        n, d = tokens_BND.shape[1:]
        return Table(
            title=f"Graying the {self.at} of {self.model}, {n} x {d}, batch {self.batch_size}, {compiled}, AdamW",
            columns=("way", "ms", "x step", "x faster than the SVD"),
            rows=tuple(rows),
            facts=provenance(device, seed=self.seed),
        )

    def _seconds(self, work: Callable[[], Any], device: "torch.device") -> float:
        return median(seconds(work, device, repeats=self.repeats, warm_up=3))

    def _step_seconds(self, kind: Any, device: "torch.device") -> float:
        import timm
        import torch

        from wellposed.graying import gray_tokens

        model = timm.create_model(self.model)
        if kind is not None:
            gray_tokens(model, kind, at=self.at)
        labels = torch.randint(0, model.num_classes, (self.batch_size,), device=device)
        return self._seconds(plain_step(model, self._images(model, device), labels, compiled=self.compile), device)

    def _images(self, model: Any, device: "torch.device") -> "Tensor":
        """Noise, smoothed on every scale as natural images are, of mean 0 and variance 1."""
        import torch
        from torch.nn import functional as F

        size = model.patch_embed.img_size[0]
        scales = [torch.randn(self.batch_size, 3, size // 2**k, size // 2**k, device=device) for k in range(6)]
        images = sum(2.0**k * F.interpolate(noise, size=size, mode="bilinear") for k, noise in enumerate(scales))
        assert isinstance(images, torch.Tensor)
        return (images - images.mean()) / images.std()

    def _tokens(self, device: "torch.device") -> "Tensor":
        """What is grayed in a step."""
        import timm
        import torch
        from torch.nn import functional as F

        model = timm.create_model(self.model).to(device)
        images, size = self._images(model, device), model.patch_embed.patch_size
        if self.at == "patches":
            return F.unfold(images, size, stride=size).mT.contiguous()
        with torch.no_grad():
            return model.patch_embed(images)


def gray_by_svd(x_BND: "Tensor", eps: float = 0.7, tol: float = 1e-3) -> "Tensor":
    """The definition, written down from the paper without further thought."""
    import torch

    left, values, right = torch.linalg.svd(x_BND, full_matrices=False)
    shares = (values / values[..., :1]).clamp(min=tol)
    return (left * (values * shares ** (eps - 1))[..., None, :]) @ right


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
