"""How many images a second training takes in, against a plain loop of timm and torch on the same model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from wellposed.bench.plain import plain_step
from wellposed.bench.table import Table
from wellposed.bench.timing import seconds
from wellposed.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from wellposed.data import ImageSet
    from wellposed.training import TrainConfig


@dataclass(frozen=True)
class TrainBench:
    """Images per second of `wellposed train` against a plain timm + torch loop: AdamW, images in memory."""

    model: str = "vit_small_patch16_224"
    """Name of a timm VisionTransformer."""
    image_size: int = 224
    batch_size: int = 256
    compile: bool = True
    windows: int = 10
    """Timed windows of ten steps, after three to warm up; the median is reported."""
    device: str = "cuda"
    seed: int = 0

    def run(self) -> Table:
        """Measure the plain loop, ours with skips and without, and the loader alone."""
        import torch

        from wellposed.runs import device_named, provenance
        from wellposed.training import TrainConfig
        from wellposed.training.guards import repeatable
        from wellposed.training.models import fitted_to_data

        device = device_named(self.device)
        if self.windows < 1:
            raise InvalidArgumentError(f"windows={self.windows}: expected at least 1")
        torch.manual_seed(self.seed)
        data = _random_images(self.image_size, self.batch_size, 10 * (self.windows + 3))
        config = TrainConfig(
            model=self.model,
            batch_size=self.batch_size,
            compile=self.compile,
            device=self.device,
            epochs=1,
            lr=1e-3,
            betas=(0.9, 0.999),
            crop="pad",
            flip=True,
        )
        config = fitted_to_data(config, data)
        plain = self._plain_rate(_plain_model(config, data), data, device)
        rates = {"plain timm + torch": plain}
        if self.compile and device.type == "cuda":
            graphs = self._plain_rate(_plain_model(config, data), data, device, mode="reduce-overhead")
            rates["plain, mode reduce-overhead"] = graphs
        with repeatable(device):
            rates["plain, repeatable kernels"] = self._plain_rate(_plain_model(config, data), data, device)
        rates |= {
            "wellposed train": self._our_rate(config, data),
            "wellposed train, no skips": self._our_rate(replace(config, skips=False), data),
            "wellposed train --no-repeatable": self._our_rate(replace(config, repeatable=False), data),
        }
        loader = self._loader_rate(data, device)
        flops, peak = _flops_per_image(config, data), _matmul_flops(device)
        rows = [
            (way, f"{rate:,.0f}", f"{rate / plain:.2f}", f"{rate * flops / 1e12:.0f}", f"{rate * flops / peak:.0%}")
            for way, rate in rates.items()
        ]
        rows.append(("the loader alone", f"{loader:,.0f}", f"{loader / plain:.1f}", "", ""))
        compiled = "compiled" if self.compile else "not compiled"
        return Table(
            title=f"Training {self.model} at {self.image_size} px, batch {self.batch_size}, {compiled}, AdamW",
            columns=("way", "images/s", "x plain", "TFLOP/s", "of a large matmul"),
            rows=tuple(rows),
            facts=provenance(device, seed=self.seed),
        )

    def _plain_rate(
        self, model: "nn.Module", data: "ImageSet", device: "torch.device", mode: str | None = None
    ) -> float:
        import torch

        images = torch.randn(self.batch_size, *data.image_shape, device=device)
        labels = torch.randint(0, len(data.classes), (self.batch_size,), device=device)
        return self._rate(plain_step(model, images, labels, compiled=self.compile, mode=mode), device)

    def _our_rate(self, config: "TrainConfig", data: "ImageSet") -> float:
        """What the run itself writes into its metrics."""
        import torch

        from wellposed.runs import read_journal
        from wellposed.training.accelerators import make_accelerator
        from wellposed.training.classification import Classification
        from wellposed.training.display import Display
        from wellposed.training.guards import repeatable
        from wellposed.training.loop import Loop

        torch.compiler.reset()
        accelerator = make_accelerator(config.device)
        few = replace(data, images=data.images[: self.batch_size], labels=data.labels[: self.batch_size])
        with TemporaryDirectory() as folder, repeatable(accelerator.device, wanted=config.repeatable):
            task = Classification(config, data, few, accelerator)
            nowhere = Display(visible=False)
            Loop(
                task, Path(folder), accelerator, nowhere, epochs=1, log_every=10, checkpoint_minutes=60.0, identity={}
            ).run()
            return median(event["images_per_second"] for event in read_journal(Path(folder), "train")[3:])

    def _loader_rate(self, data: "ImageSet", device: "torch.device") -> float:
        from wellposed.data import Augment, DeviceLoader

        loader = iter(DeviceLoader(data, self.batch_size, device=device, augment=Augment(crop="pad", flip=True)))
        return self._rate(lambda: next(loader), device)

    def _rate(self, step: Callable[[], Any], device: "torch.device") -> float:
        def window() -> None:
            for _ in range(10):
                step()

        return 10 * self.batch_size / median(seconds(window, device, repeats=self.windows, warm_up=3))


def _random_images(size: int, batch_size: int, batches: int) -> "ImageSet":
    """One batch of noise as often as a run needs it."""
    import torch

    from wellposed.data import ImageSet

    images = torch.randint(0, 256, (batch_size, 3, size, size), dtype=torch.uint8).repeat(batches, 1, 1, 1)
    labels = torch.randint(0, 10, (batch_size,)).repeat(batches)
    return ImageSet("random", tuple(map(str, range(10))), images, labels)


def _plain_model(config: "TrainConfig", data: "ImageSet") -> "nn.Module":
    import timm

    from wellposed.training.models import model_arguments

    return timm.create_model(config.model, **model_arguments(config, data))


def _flops_per_image(config: "TrainConfig", data: "ImageSet") -> float:
    """Of matrix products, forward and backward: three times those of the forward pass."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        _plain_model(config, data)(torch.empty(1, *data.image_shape))
    return 3.0 * counter.get_total_flops()


def _matmul_flops(device: "torch.device") -> float:
    """What a large matrix product reaches, the best of ten: bfloat16 on a GPU, float32 and not as large on the CPU."""
    import torch

    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / min(seconds(lambda: a @ b, device, repeats=9))
