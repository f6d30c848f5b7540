"""What DreamBooth learns from: pictures of a subject and of its class, as latents that are made once.

Shapes: N pictures, B in a batch, P parts of each (the subject and, with prior preservation, one of its class), C
channels of latents, h by w. Moments are mean and standard deviation of a latent, side by side: 2 C channels.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wellposed.data import Dataset, ImageSet, Loader
from wellposed.data.pictures import picture_files, read_picture
from wellposed.runs import atomic_path, tracked, writing_to

_DRAWN = "drawn-"
"""What the names of pictures begin with that were not there before."""


def read_pictures(folder: Path, image_size: int, limit: int | None = None) -> ImageSet:
    """The pictures in `folder`, upright, the shorter side brought to `image_size` and the middle cut out."""
    from torchvision.transforms import v2

    fit = v2.Compose([v2.Resize(image_size, antialias=True), v2.CenterCrop(image_size)])
    files = picture_files([folder])[:limit]
    images = torch.stack([fit(read_picture(file, upright=True)) for file in tracked(files, "reading pictures")])
    return ImageSet(folder.name, ("subject",), images, torch.zeros(len(files), dtype=torch.long))


def complete_class(
    folder: Path, count: int, draw: Callable[[Sequence[int]], Tensor], *, first_seed: int, batch_size: int
) -> None:
    """Unless `folder` holds what its owner has put there, draw `count` of them, or those that are missing."""
    from torchvision.transforms.v2.functional import to_pil_image

    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if any(not name.startswith((_DRAWN, ".")) for name in there):
        return
    missing = [number for number in range(count) if _drawn_name(number) not in there]
    batches = [missing[start : start + batch_size] for start in range(0, len(missing), batch_size)]
    for numbers in tracked(batches, "drawing pictures of the class"):
        pictures = draw([first_seed + number for number in numbers])
        for number, picture in zip(numbers, pictures, strict=True):
            with writing_to(folder), atomic_path(folder / _drawn_name(number)) as temporary:
                to_pil_image(picture).save(temporary, "PNG")


def _drawn_name(number: int) -> str:
    return f"{_DRAWN}{number:05}.png"


@torch.no_grad()
def moments_of(vae: Any, images_N3HW: Tensor, *, flip: bool, batch_size: int) -> Tensor:
    """Mean and standard deviation of the scaled latents, (N, 1 or 2, 2 C, h, w): of each picture and its mirror."""
    scale = vae.config.scaling_factor
    ways = [images_N3HW, images_N3HW.flip(-1)] if flip else [images_N3HW]
    found = []
    for batch in tracked(torch.stack(ways, 1).flatten(0, 1).split(batch_size), "encoding pictures"):
        latents = vae.encode(batch.to(vae.device, vae.dtype) / 127.5 - 1).latent_dist
        found.append(scale * torch.cat([latents.mean, latents.std], 1))
    return torch.cat(found).unflatten(0, (-1, len(ways)))


@dataclass(frozen=True)
class Latents:
    """The moments of the pictures; an image set to the loaders, which ask for no more than this."""

    name: str
    subject: Tensor
    of_class: Tensor | None
    repeats: int
    scheduler: Any
    """Adds noise: diffusers' DDPMScheduler with the betas and the kind of prediction of the pipeline."""
    classes: tuple[str, ...] = ()
    image_shape: tuple[int, int, int] = (1, 1, 1)

    def __len__(self) -> int:
        return len(self.subject) * self.repeats

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raise NotImplementedError("read by LatentLoader")

    @property
    def parts(self) -> int:
        """The subject alone, or it and one of its class."""
        return 1 if self.of_class is None else 2


class LatentLoader(Loader):
    """Batches of noisy latents with their timestep at the end, (B, P, C h w + 1), and what to predict, (B, P, C h w).

    All random numbers of a batch are drawn by every process, which then takes its part.
    """

    def _open(self, data: Dataset) -> tuple[Tensor, Tensor]:
        assert isinstance(data, Latents)
        self._latents = data
        return torch.zeros(1), torch.ones(1)

    def _read(self, shares: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        for share in shares:
            chosen = share % len(self._latents.subject)
            yield self._latents.subject.index_select(0, chosen), chosen

    def _finished(self, images_NCHW: Tensor, labels_N: Tensor, count: int) -> tuple[Tensor, Tensor]:
        data, part = self._latents, self._part(count)
        ways, channels, height, width = images_NCHW.shape[1:]
        way_BP = self._below(ways, count, data.parts)[part]
        moments = [images_NCHW]
        if data.of_class is not None:
            moments.append(data.of_class.index_select(0, self._below(len(data.of_class), count)[part]))
        rows = torch.arange(len(images_NCHW), device=self.device)
        moments_BP = torch.stack([each[rows, way_BP[:, place]] for place, each in enumerate(moments)], 1)
        shape = (2, count, data.parts, channels // 2, height, width)
        spread, noise = torch.randn(shape, generator=self._generator, device=self.device)[:, part]
        mean, std = moments_BP.chunk(2, 2)
        steps_BP = self._below(data.scheduler.config.num_train_timesteps, count, data.parts)[part]
        return noisy(data.scheduler, mean + std * spread, noise, steps_BP)

    def _below(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, generator=self._generator, device=self.device)


def noisy(scheduler: Any, latents: Tensor, noise: Tensor, steps_BP: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs (B, P, C h w + 1) and targets (B, P, C h w) for latents and noise (B, P, C, h, w) at some timesteps."""
    flat = latents.flatten(0, 1), noise.flatten(0, 1), steps_BP.flatten()
    made = scheduler.add_noise(*flat).view_as(latents)
    targets = noise
    if scheduler.config.prediction_type == "v_prediction":
        targets = scheduler.get_velocity(*flat).view_as(latents)
    return torch.cat([made.flatten(2), steps_BP[..., None].to(made)], 2), targets.flatten(2)
