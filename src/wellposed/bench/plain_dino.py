"""DINO as one writes it first, which ours is compared with: views by torchvision in workers, a loop in torch."""

import random
from collections.abc import Callable, Generator
from copy import deepcopy
from typing import Any

import timm
import torch
from PIL import Image, ImageFilter
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils import data as torch_data
from torchvision.transforms import v2

from wellposed.training import DinoConfig


class Views(torch_data.Dataset[list[Tensor]]):
    """All views of an image as tensors, large ones first; images are kept as PIL's, as torchvision's folders give."""

    def __init__(self, images_NCHW: Tensor, length: int, config: DinoConfig) -> None:
        self._images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images_NCHW]
        self._length, self._count = length, (config.global_crops, config.local_crops)
        size, local = config.global_size, config.local_size
        self._transforms = [
            _transform(size, config.global_scale, blurred=1.0, solarized=0.0),
            _transform(size, config.global_scale, blurred=0.1, solarized=config.solarize),
            _transform(local, config.local_scale, blurred=0.5, solarized=0.0),
        ]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> list[Tensor]:
        image = self._images[index % len(self._images)]
        first, second, local = self._transforms
        large = [first(image), *(second(image) for _ in range(self._count[0] - 1))]
        return large + [local(image) for _ in range(self._count[1])]


class _Blur:
    def __init__(self, probability: float) -> None:
        self._probability = probability

    def __call__(self, image: Image.Image) -> Image.Image:
        if random.random() >= self._probability:
            return image
        return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))


def _transform(size: int | None, scale: tuple[float, float], *, blurred: float, solarized: float) -> Any:
    return v2.Compose(
        [
            v2.RandomResizedCrop(size, scale, interpolation=v2.InterpolationMode.BICUBIC),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
            v2.RandomGrayscale(0.2),
            _Blur(blurred),
            v2.RandomSolarize(128, solarized),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )


def plain_batches(
    views: Views, batch_size: int, workers: int, device: torch.device
) -> Generator[list[Tensor], None, None]:
    """Batches of views on the device, made by `workers` processes."""
    loader = torch_data.DataLoader(
        views,
        batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        multiprocessing_context="forkserver" if workers else None,
        prefetch_factor=4 if workers else None,
    )
    for batch in loader:
        yield [view.to(device, non_blocking=True) for view in batch]


class _PlainNetwork(nn.Module):
    def __init__(self, backbone: Any, config: DinoConfig) -> None:
        super().__init__()
        self.backbone = backbone
        width, hidden, bottleneck = backbone.num_features, config.hidden_dim, config.bottleneck_dim
        self.mlp = nn.Sequential(
            *(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck))
        )
        self.last = weight_norm(nn.Linear(bottleneck, config.out_dim, bias=False))

    def forward(self, views: list[Tensor]) -> Tensor:
        sizes = {view.shape[-1]: [other for other in views if other.shape == view.shape] for view in views}
        features = torch.cat([self.backbone(torch.cat(same)) for same in sizes.values()])
        return self.last(F.normalize(self.mlp(features), dim=-1))


def plain_dino_step(
    config: DinoConfig, arguments: dict[str, Any], device: torch.device, *, compiled: bool
) -> Callable[[list[Tensor]], Tensor]:
    """A step on a list of views, which returns its loss: bf16 on a GPU, fused AdamW, clipping, EMA; no schedules."""
    torch.compiler.reset()
    student = _PlainNetwork(timm.create_model(config.model, **arguments), config).to(device).train()
    teacher = deepcopy(student).requires_grad_(False)
    forward, teach = (torch.compile(net) if compiled else net for net in (student, teacher))
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4, weight_decay=0.04, fused=device.type == "cuda")
    center = torch.zeros(config.out_dim, device=device)

    def step(views: list[Tensor]) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            with torch.no_grad():
                said = teach(views[: config.global_crops])
            guesses = (forward(views) / config.student_temp).chunk(len(views))
            wanted = F.softmax((said - center) / config.teacher_temp_start, -1).chunk(config.global_crops)
            terms = [
                -(want * F.log_softmax(guess, -1)).sum(-1).mean()
                for i, want in enumerate(wanted)
                for j, guess in enumerate(guesses)
                if i != j
            ]
            loss = torch.stack(terms).mean()
        optimizer.zero_grad()
        loss.backward()
        for param in student.parameters():
            if param.grad is not None:
                nn.utils.clip_grad_norm_([param], 3.0)
        optimizer.step()
        with torch.no_grad():
            center.lerp_(said.float().mean(0), 0.1)
            for kept, moved in zip(teacher.parameters(), student.parameters(), strict=True):
                kept.mul_(0.996).add_(moved, alpha=0.004)
        return loss.detach()

    return step
