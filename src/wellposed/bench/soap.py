"""How long a SOAP step takes, alone and within training, against pytorch_optimizer's SOAP and fused AdamW."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from wellposed.bench.table import Table
from wellposed.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SoapBench:
    """Time wellposed.SOAP against pytorch_optimizer's SOAP and torch's fused AdamW on a ViT at 32 px with patch 4."""

    models: tuple[str, ...] = ("vit_tiny_patch16_224", "vit_small_patch16_224")
    """Names of timm VisionTransformers."""
    batch_size: int = 512
    """Images in a training step, which runs compiled and in bfloat16 autocast."""
    precondition_frequency: int = 10
    """Steps between two refreshes of the bases."""
    windows: int = 5
    """Timed windows of precondition_frequency steps, after three to warm up; the median of their means is reported."""
    device: str = "cuda"
    seed: int = 0

    def run(self) -> Table:
        """Measure every optimizer on every model, alone and in a whole training step."""
        from wellposed.runs import device_named, provenance

        device = device_named(self.device)
        if device.type != "cuda":
            raise InvalidArgumentError(f"device={self.device!r}: this comparison is about GPUs, expected 'cuda'")
        rows: list[tuple[str, ...]] = []
        for name in self.models:
            times = {label: self._times(name, make, device) for label, make in _contenders(self).items()}
            peer, adamw = times["pytorch_optimizer SOAP"], times["torch AdamW, fused"]
            rows += [
                (name, label, f"{alone:.2f}", f"{peer[0] / alone:.1f}", f"{whole:.1f}", f"{whole / adamw[1]:.2f}")
                for label, (alone, whole) in times.items()
            ]
        return Table(
            title=f"SOAP at 32 px, patch 4, batch {self.batch_size}, refresh every {self.precondition_frequency} steps",
            columns=("model", "optimizer", "step, ms", "times faster than peer", "training step, ms", "x AdamW"),
            rows=tuple(rows),
            facts=provenance(device, seed=self.seed),
        )

    def _times(self, name: str, make: Callable[[Iterable[Any]], Any], device: "torch.device") -> tuple[float, float]:
        """Milliseconds of the optimizer's step within training, and of the whole training step."""
        import timm
        import torch

        torch.manual_seed(self.seed)
        model = timm.create_model(name, img_size=32, patch_size=4, num_classes=10, global_pool="avg").to(device)
        # As `wellposed train --compile` does on a GPU: else the time to start kernels hides what the optimizer takes.
        compiled, optimizer = torch.compile(model, mode="reduce-overhead"), make(model.parameters())
        images = torch.randn(self.batch_size, 3, 32, 32, device=device)
        labels = torch.randint(0, 10, (self.batch_size,), device=device)
        alone, whole = [], []
        for _ in range(self.windows + 3):
            marks = []
            for _ in range(self.precondition_frequency):
                start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
                start.record()
                with torch.autocast(device.type, dtype=torch.bfloat16):
                    loss = torch.nn.functional.cross_entropy(compiled(images), labels)
                optimizer.zero_grad()
                loss.backward()
                middle.record()
                optimizer.step()
                end.record()
                marks.append((start, middle, end))
            torch.cuda.synchronize()
            alone.append(sum(middle.elapsed_time(end) for _, middle, end in marks) / len(marks))
            whole.append(marks[0][0].elapsed_time(marks[-1][2]) / len(marks))
        return median(alone[3:]), median(whole[3:])


def _contenders(config: SoapBench) -> dict[str, Callable[[Iterable[Any]], Any]]:
    import torch

    from wellposed.optim import SOAP

    try:
        import pytorch_optimizer
    except ImportError as error:
        raise InvalidArgumentError("the peer is missing: pip install pytorch_optimizer") from error
    every: dict[str, Any] = {"precondition_frequency": config.precondition_frequency}
    return {
        "torch AdamW, fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
        "pytorch_optimizer SOAP": lambda params: pytorch_optimizer.SOAP(params, lr=1e-3, **every),
        "wellposed SOAP": lambda params: SOAP(params, lr=1e-3, **every),
        "wellposed SOAP, no graphs": lambda params: SOAP(params, lr=1e-3, cuda_graph=False, **every),
        "wellposed SOAP, spread": lambda params: SOAP(params, lr=1e-3, spread_refresh=True, **every),
        "wellposed SOAP, tf32": lambda params: SOAP(params, lr=1e-3, tf32=True, **every),
        "wellposed SOAP, tf32, spread": lambda params: SOAP(params, lr=1e-3, tf32=True, spread_refresh=True, **every),
    }
