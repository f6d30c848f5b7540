"""What a diagnosis costs, against the forward pass it watches."""

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from wellposed.bench.table import Table
from wellposed.bench.timing import seconds
from wellposed.errors import InvalidArgumentError

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class DiagnoseBench:
    """Seconds of wellposed.diagnose against one forward pass of the same model on the same images, in float32."""

    models: tuple[str, ...] = ("vit_tiny_patch16_224", "vit_base_patch16_224")
    """Names of timm VisionTransformers."""
    image_size: int = 224
    batch_size: int = 64
    repeats: int = 5
    """Timed runs, after one to warm up; the median is reported."""
    device: str = "cuda"
    seed: int = 0

    def run(self) -> Table:
        """Measure every model."""
        import timm
        import torch

        from wellposed.diagnosis import diagnose
        from wellposed.runs import device_named, provenance

        device = device_named(self.device)
        if self.repeats < 1 or self.batch_size < 1:
            raise InvalidArgumentError(f"repeats={self.repeats}, batch_size={self.batch_size}: expected at least 1")
        torch.manual_seed(self.seed)
        rows = []
        for name in self.models:
            model = timm.create_model(name, img_size=self.image_size).to(device).eval()
            images = torch.randn(self.batch_size, 3, self.image_size, self.image_size, device=device)
            with torch.inference_mode():
                forward = median(seconds(partial(model, images), device, repeats=self.repeats))
            whole = median(seconds(partial(diagnose, model, images), device, repeats=self.repeats))
            rows.append((name, f"{1e3 * forward:.1f}", f"{1e3 * whole:.1f}", f"{whole / forward:.2f}"))
        return Table(
            title=f"Diagnosis of {self.batch_size} images of {self.image_size} px, float32",
            columns=("model", "forward pass, ms", "diagnose, ms", "x forward pass"),
            rows=tuple(rows),
            facts=provenance(device, seed=self.seed),
        )
