"""Fitting an image: a network from places to colours, trained on some pixels and judged on all.

Shapes: P pixels, H rows, W columns.
"""

import io
from collections.abc import Collection
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.data.pictures import read_picture
from wellposed.errors import DataError
from wellposed.fields.files import FieldSpec
from wellposed.fields.image_config import ImageConfig
from wellposed.fields.quality import WINDOW, decibels, psnr, ssim
from wellposed.fields.results import FITTED, TRUTH, FieldResult
from wellposed.fields.training import FieldTask, fit_field
from wellposed.runs import atomic_path, writing_to
from wellposed.training.accelerators import compiled

_AT_A_TIME = 2**18
"""Pixels that are rendered together: 256 MiB for each activation of width 256."""


def fit_image(config: ImageConfig, *, quiet: bool = False, given: Collection[str] | None = None) -> FieldResult:
    """Fit a network to a picture as `config` says; see `wellposed.fields.training.fit_field` for what a run leaves.

    Beside that the folder holds fitted.png and truth.png.

    Raises:
        DataError: the file is no picture of 8 bits without transparency, or too small for SSIM.
        InvalidArgumentError, RunError, DivergedError: as for every run.
    """
    config = config.begun(given)
    truth_HW3 = open_image(Path(config.data))
    size = truth_HW3.shape[0] * truth_HW3.shape[1]
    note = "" if quiet else f"; {_other_sizes(truth_HW3)}"
    task, result = fit_field(
        config, lambda place: ImageTask(config, truth_HW3, place), size=size, note=note, quiet=quiet
    )
    fitted_HW3 = render_image(task.model, *truth_HW3.shape[:2])
    with writing_to(config.folder):
        for name, picture in ((FITTED, fitted_HW3), (TRUTH, truth_HW3)):
            with atomic_path(config.folder / name) as file:
                file.write_bytes(encoded(picture, "PNG"))
    return result


def open_image(path: Path) -> Tensor:
    """The picture in `path` as uint8 (H, W, 3); DataError unless it has 8 bits, no transparency and a window's size."""
    from PIL import Image

    try:
        with Image.open(path) as file:
            mode, layout, size = file.mode, str(file.tile), file.size
            is_clear = "transparency" in file.info or "A" in file.getbands()
            is_clear = is_clear and file.convert("RGBA").getextrema()[-1] != (255, 255)
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file; expected a picture") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as a picture: {error}") from error
    if mode.startswith("I") or mode == "F" or ";16" in layout:
        raise DataError(f"{path} has more than 8 bits per channel ({mode}); expected 8: save it as an 8-bit PNG first")
    if is_clear:
        raise DataError(f"{path} has transparent pixels; expected none: flatten it onto a background first")
    if min(size) < WINDOW:
        raise DataError(f"{path} is {size[0]} x {size[1]}; expected at least {WINDOW} x {WINDOW}, the window of SSIM")
    return read_picture(path, upright=True).permute(1, 2, 0)


def pixel_places(height: int, width: int, device: torch.device | str = "cpu") -> Tensor:
    """The middle of every pixel, (H W, 2) as (row, column): the longer side spans -1 to 1.

    Example:
        >>> pixel_places(1, 2).tolist()
        [[0.0, -0.5], [0.0, 0.5]]
    """
    rows, columns = (
        (2 * torch.arange(count, device=device) + 1 - count) / max(height, width) for count in (height, width)
    )
    return torch.cartesian_prod(rows, columns)


@torch.no_grad()
def render_image(network: nn.Module, height: int, width: int) -> Tensor:
    """The picture that a network has learned, uint8 (H, W, 3), at any size of about the same shape."""
    return (colours_of(network, height, width) * 255).round().to(torch.uint8).cpu()


def encoded(picture_HW3: Tensor, kind: str, **options: int) -> bytes:
    """The uint8 picture as the bytes of a PNG or JPEG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture_HW3.numpy()).save(file, kind, **options)
    return file.getvalue()


def _other_sizes(truth_HW3: Tensor) -> str:
    """What the picture takes as a PNG and as a JPEG."""
    from PIL import Image
    from torchvision.transforms.v2.functional import pil_to_tensor

    jpeg = encoded(truth_HW3, "JPEG", quality=75)
    with Image.open(io.BytesIO(jpeg)) as file:
        quality = psnr(pil_to_tensor(file) / 255, truth_HW3.permute(2, 0, 1) / 255)
    png = len(encoded(truth_HW3, "PNG", optimize=True))
    return f"as PNG it has {png:,} bytes, as JPEG of quality 75 {len(jpeg):,} ({quality:.1f} dB)"


class ImageTask(FieldTask):
    """A picture that is learned from some of its pixels."""

    def __init__(self, config: ImageConfig, truth_HW3: Tensor, accelerator: Accelerator) -> None:
        self._size = height, width = truth_HW3.shape[:2]
        arguments = {"in_features": 2, "out_features": 3, "depth": config.depth, **config.layers}
        arguments |= {"activation": config.activation, "scale": config.scale}
        spec = FieldSpec("coordinates", arguments, {"field": "image", "height": height, "width": width})
        device = accelerator.device
        network = spec.build().to(device)
        self._forward = compiled(network, accelerator) if config.compile else network
        self._truth_P3 = (truth_HW3.float() / 255).reshape(-1, 3).to(device)
        count = len(self._truth_P3)
        chosen = torch.randperm(count)[: max(1, round(config.fraction * count))].to(device)
        self._places, self._colours = pixel_places(height, width, device)[chosen], self._truth_P3[chosen]
        self._batch = min(config.batch_size, len(chosen))
        super().__init__(network, spec, config, accelerator, batch_size=self._batch, unit="pixels")

    def loss(self, step: int) -> dict[str, Tensor]:
        """Of all the pixels that are trained on or, if they are more than a batch, of some."""
        places, colours = self._places, self._colours
        if self._batch < len(places):
            drawn = torch.randint(len(places), (self._batch,), device=self.device)
            places, colours = places[drawn], colours[drawn]
        error = F.mse_loss(self._forward(places).float(), colours)
        return {"loss": error, "psnr": decibels(error.detach())}

    def scores(self) -> dict[str, float]:
        """PSNR and SSIM of the whole picture."""
        pair = colours_of(self.model, *self._size), self._truth_P3.unflatten(0, self._size)
        found_3HW, truth_3HW = (picture.permute(2, 0, 1) for picture in pair)
        return {"psnr": float(psnr(found_3HW, truth_3HW)), "ssim": float(ssim(found_3HW, truth_3HW))}


def colours_of(network: nn.Module, height: int, width: int) -> Tensor:
    """What the network gives for every pixel, (H, W, 3) in [0, 1], on its device."""
    device = next(network.parameters()).device
    places = pixel_places(height, width, device).split(_AT_A_TIME)
    return torch.cat([network(part).float().clamp(0, 1) for part in places]).unflatten(0, (height, width))
