"""How many images a second DINO takes in, against a plain loop of timm, torch and torchvision on the same shapes."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from wellposed.bench.table import Table
from wellposed.bench.timing import seconds
from wellposed.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

    from wellposed.data import ImageSet
    from wellposed.training import DinoConfig


@dataclass(frozen=True)
class DinoBench:
    """Images per second of `wellposed pretrain` against a plain torch + torchvision loop: AdamW, images in memory."""

    model: str = "vit_small_patch16_224"
    """Name of a timm VisionTransformer."""
    image_size: int = 224
    """Pixels a side of the images, and of global crops."""
    local_size: int = 96
    local_crops: int = 8
    batch_size: int = 64
    out_dim: int = 65536
    compile: bool = True
    workers: int | None = None
    """Processes that make views for the plain loop; one per CPU if None."""
    steps: int = 10
    """Steps in a timed window."""
    windows: int = 5
    """Timed windows, after two to warm up; the median is reported. Of the plain loop two long ones, for its workers."""
    device: str = "cuda"
    seed: int = 0

    def run(self) -> Table:
        """Measure the plain loop, its step alone, ours, and our views alone."""
        import torch

        from wellposed.runs import device_named, provenance

        for name in ("windows", "steps", "batch_size"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name}={getattr(self, name)}: expected at least 1")
        device = device_named(self.device)
        torch.manual_seed(self.seed)
        data = self._images()
        config = self._config(data)
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = cpus if self.workers is None else self.workers
        rates = self._plain_rates(config, data, workers, device) | {
            "wellposed pretrain": self._our_rate(config, data),
            "wellposed pretrain, no skips": self._our_rate(replace(config, skips=False), data),
            "our views alone": self._views_rate(config, data, device),
        }
        plain = rates["plain torch + torchvision"]
        compiled = "compiled" if self.compile else "not compiled"
        return Table(
            title=f"DINO with {self.model}: 2 x {self.image_size} + {self.local_crops} x {self.local_size} px, batch "
            f"{self.batch_size}, {self.out_dim} outputs, {compiled}, {workers} workers for the plain loop",
            columns=("way", "images/s", "x plain"),
            rows=tuple((way, f"{rate:,.1f}", f"{rate / plain:.2f}") for way, rate in rates.items()),
            facts=provenance(device, seed=self.seed),
        )

    def _images(self) -> "ImageSet":
        """As many images of noise as fit in a moment, as often as a run needs them."""
        import torch

        from wellposed.data import ImageSet

        few = max(self.batch_size, 256)
        count = self.batch_size * self.steps * (self.windows + 2)
        images = torch.randint(0, 256, (few, 3, self.image_size, self.image_size), dtype=torch.uint8)
        images = images.repeat(-(-count // few), 1, 1, 1)[:count]
        return ImageSet("random", ("nothing",), images, torch.zeros(count, dtype=torch.int64))

    def _config(self, data: "ImageSet") -> "DinoConfig":
        from wellposed.training import DinoConfig
        from wellposed.training.dino_models import resolved

        return resolved(
            DinoConfig(
                model=self.model,
                batch_size=self.batch_size,
                global_size=self.image_size,
                local_size=self.local_size,
                local_crops=self.local_crops,
                out_dim=self.out_dim,
                compile=self.compile,
                device=self.device,
                epochs=1,
                freeze_last_epochs=0.0,  # the plain loop trains its last layer at every step
                drop_path=0.0,
                collapse="warn",
                seed=self.seed,
            ),
            data,
        )

    def _plain_rates(
        self, config: "DinoConfig", data: "ImageSet", workers: int, device: "torch.device"
    ) -> dict[str, float]:
        """The plain loop, and its step on views that are there already."""
        import torch

        from wellposed.bench.plain_dino import Views, plain_batches, plain_dino_step
        from wellposed.training.dino_models import backbone_arguments

        views = Views(data.images[:256], 3 * self.batch_size * self._round(workers), config)
        step = plain_dino_step(config, backbone_arguments(config, data), device, compiled=self.compile)
        sizes = [self.image_size] * config.global_crops + [self.local_size] * self.local_crops
        noise = [torch.randn(self.batch_size, 3, size, size, device=device) for size in sizes]
        alone = self._rate(lambda: step(noise), device)
        batches = plain_batches(views, self.batch_size, workers, device)
        together = self._rate_of_stream(lambda: step(next(batches)), workers, device)
        return {"plain torch + torchvision": together, "its step alone": alone}

    def _our_rate(self, config: "DinoConfig", data: "ImageSet") -> float:
        """What the run itself writes into its metrics."""
        import torch

        from wellposed.runs import read_journal
        from wellposed.training.accelerators import make_accelerator
        from wellposed.training.dino_task import Dino
        from wellposed.training.display import Display
        from wellposed.training.guards import repeatable
        from wellposed.training.loop import Loop

        torch.compiler.reset()
        accelerator = make_accelerator(config.device)
        with TemporaryDirectory() as folder, repeatable(accelerator.device):
            task = Dino(config, data, None, accelerator)
            Loop(
                *(task, Path(folder), accelerator, Display(visible=False)),
                epochs=1,
                log_every=self.steps,
                checkpoint_minutes=60.0,
                identity={},
            ).run()
            return median(event["images_per_second"] for event in read_journal(Path(folder), "train")[2:])

    def _views_rate(self, config: "DinoConfig", data: "ImageSet", device: "torch.device") -> float:
        import torch

        from wellposed.training.dino_task import crops_of

        crops = crops_of(config)
        made = torch.compile(crops) if config.compile else crops
        images = data.images[: self.batch_size].to(device)
        return self._rate(lambda: made(images, torch.rand(len(images), crops.columns, device=device)), device)

    def _rate_of_stream(self, step: Callable[[], Any], workers: int, device: "torch.device") -> float:
        """Workers make a batch each and deliver in bursts: two windows of whole bursts are timed, after a first."""
        count = self._round(workers)
        taken = seconds(lambda: [step() for _ in range(count)], device, repeats=2)
        return 2 * count * self.batch_size / sum(taken)

    def _round(self, workers: int) -> int:
        """At least `steps` batches, as many from each worker."""
        return max(workers, 1) * -(-self.steps // max(workers, 1))

    def _rate(self, step: Callable[[], Any], device: "torch.device") -> float:
        def window() -> None:
            for _ in range(self.steps):
                step()

        return self.steps * self.batch_size / median(seconds(window, device, repeats=self.windows, warm_up=2))
