"""What a pipeline draws without its adapter, with it, and with it in k bits; sizes, and likeness to the subject."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.compression import compress, load_adapter
from wellposed.compression.files import PACKED
from wellposed.compression.folders import WEIGHTS
from wellposed.evaluation.backbones import Backbone
from wellposed.evaluation.extraction import fitted
from wellposed.evaluation.features import layer_features
from wellposed.reporting import markdown_table, text_table
from wellposed.reporting.contact_sheet import Group, Pixels, contact_sheet
from wellposed.runs import atomic_path, tracked, writing_to
from wellposed.training.finetuning.dreambooth_task import TEXT_ENCODER, DreamboothTask
from wellposed.training.finetuning.image_config import ImageConfig

BASE, WHOLE = "no adapter", "adapter"
SHEET, PICTURES = "pictures.png", "pictures"
_COLUMNS = ["version", "bytes", "error of dW", "difference of pictures", "similarity to the subject"]


@dataclass(frozen=True)
class Version:
    """The pipeline with one form of the adapter, and what it draws."""

    name: str
    bits: int | None
    """Of every number of the factors; None where they are not quantized."""
    size: int
    """Bytes of the adapter's files with weights."""
    error: float | None
    """||dW' - dW||_F / ||dW||_F, the mean over the layers; None where nothing was quantized."""
    difference: float
    """Root mean square of the difference of its pictures, in [0, 1], from those with the whole adapter."""
    similarity: float | None
    """Mean cosine of the features of all pairs of a picture that it draws and one of the subject."""


def compared(task: DreamboothTask, config: ImageConfig, backbone: Backbone | None) -> list[Version]:
    """Draw every prompt and seed with every version of the adapter in the run's folder, and write what comes of it.

    The pictures go to pictures/, side by side in pictures.png, and quantized adapters to adapter-3bit/ and the like.
    """
    adapter, out = config.folder / "adapter", config.folder
    forms: list[tuple[str, int | None]] = [(BASE, None), (WHOLE, None), *((f"{b}-bit", b) for b in config.bits)]
    sizes = {BASE: 0, WHOLE: sum(path.stat().st_size for path in adapter.rglob(WEIGHTS))}
    errors, pictures = dict[str, float](), dict[str, Tensor]()
    for name, bits in forms[2:]:
        sizes[name], errors[name] = _quantized(adapter, out / _folder(name), bits, config.device)
    batches = [(prompt, seeds) for prompt in config.prompts for seeds in _split(config.seeds, config.test_batch_size)]
    for name, _ in forms:
        with _in_use(task, name, out / _folder(name)):
            pictures[name] = torch.cat([task.draw(*batch) for batch in tracked(batches, f"drawing, {name}")])
    with writing_to(out):
        _write(out, config, pictures, task.pictures.images)
    likeness = _likeness(backbone, pictures, task.pictures.images)
    return [
        Version(
            name=name,
            bits=bits,
            size=sizes[name],
            error=errors.get(name),
            difference=_difference(pictures[name], pictures[WHOLE]),
            similarity=likeness.get(name),
        )
        for name, bits in forms
    ]


def versions_table(versions: list[Version]) -> str:
    """The versions as text."""
    return text_table(_COLUMNS, [_cells(version) for version in versions])


def versions_markdown(versions: list[Version], config: ImageConfig) -> str:
    """A section for the card: the table, and how it was measured."""
    how = {
        "prompts": "; ".join(config.prompts),
        "seeds": ", ".join(map(str, config.seeds)),
        "drawing": f"{config.sampling_steps} steps, guidance {config.guidance:g}",
    }
    how |= {"features": config.features} if config.features else {}
    return f"## Pictures\n\n{markdown_table(_COLUMNS, [_cells(version) for version in versions], how)}"


def _cells(version: Version) -> list[str]:
    numbers = (version.error, version.difference, version.similarity)
    return [version.name, f"{version.size:,}", *("-" if value is None else f"{value:.4f}" for value in numbers)]


def _folder(name: str) -> str:
    """Where the version "3-bit" of the adapter goes."""
    return f"adapter-{name.replace('-', '')}"


def _split(seeds: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    return [seeds[start : start + size] for start in range(0, len(seeds), size)]


def _quantized(adapter: Path, folder: Path, bits: int | None, device: str) -> tuple[int, float]:
    """Write the adapter, and that of the text encoder if there is one, in `bits` bits; bytes and mean error of dW."""
    shutil.rmtree(folder, ignore_errors=True)
    done = [compress(adapter, bits, out=folder, device=device)]
    if (adapter / TEXT_ENCODER).is_dir():
        done.append(compress(adapter / TEXT_ENCODER, bits, out=folder / TEXT_ENCODER, device=device))
    layers = [layer for each in done for layer in each.layers]
    size = sum(path.stat().st_size for path in folder.rglob(PACKED))
    return size, sum(layer.error for layer in layers) / len(layers)


@contextmanager
def _in_use(task: DreamboothTask, name: str, folder: Path) -> Iterator[None]:
    """The pipeline without an adapter, with the one that was trained, or with the one in `folder`."""
    models = [(task.model.unet, folder)]
    if task.model.text_encoder is not None:
        models.append((task.model.text_encoder, folder / TEXT_ENCODER))
    with ExitStack() as stack:
        for model, place in models if name != WHOLE else []:
            stack.enter_context(model.disable_adapter() if name == BASE else _loaded(model, place))
        yield


@contextmanager
def _loaded(model: Any, folder: Path) -> Iterator[None]:
    """The adapter in `folder` in place of the one that was trained."""
    load_adapter(model, folder, "quantized")
    try:
        model.set_adapter("quantized")
        yield
    finally:
        model.set_adapter("default")
        model.delete_adapter("quantized")


def _difference(pictures: Tensor, whole: Tensor) -> float:
    return float(((pictures.float() - whole.float()) / 255).square().mean().sqrt())


def _likeness(backbone: Backbone | None, pictures: dict[str, Tensor], subject: Tensor) -> dict[str, float]:
    """The mean cosine of the features of all pairs, as DreamBooth measures what is kept of a subject."""
    if backbone is None:
        return {}
    wanted = _features(backbone, subject)
    return {name: float((_features(backbone, drawn) @ wanted.T).mean()) for name, drawn in pictures.items()}


def _features(backbone: Backbone, images: Tensor, batch_size: int = 32) -> Tensor:
    """What stands for each image at the backbone's last layer, of length 1."""
    found = []
    for batch in images.split(batch_size):
        pixels = backbone.standardized(fitted(batch.to(backbone.device, torch.float32) / 255, backbone))
        found.append(F.normalize(layer_features(backbone.model, pixels)[0].summary_BD, dim=1))
    return torch.cat(found)


def _write(out: Path, config: ImageConfig, pictures: dict[str, Tensor], subject: Tensor) -> None:
    from PIL import Image

    folder = out / PICTURES
    shutil.rmtree(folder, ignore_errors=True)
    names = [(prompt, seed) for prompt in range(len(config.prompts)) for seed in config.seeds]
    for version, images in pictures.items():
        for (prompt, seed), image in zip(names, images, strict=True):
            name = f"{version.replace(' ', '-')}-prompt{prompt}-seed{seed}.png"
            with atomic_path(folder / name) as temporary:
                Image.fromarray(_pixels(image)).save(temporary, "PNG")
    rows = [[_pixels(images[number]) for images in pictures.values()] for number in range(len(names))]
    shown = [[_pixels(subject[number % len(subject)])] for number in range(len(names))]
    groups = [Group("drawn", list(pictures), rows), Group("the subject", [config.sets], shown)]
    with atomic_path(out / SHEET) as temporary:
        labels = [f"{config.prompts[prompt]}, seed {seed}" for prompt, seed in names]
        contact_sheet(groups, labels, "bicubic").save(temporary, "PNG", optimize=True)


def _pixels(image: Tensor) -> Pixels:
    return image.permute(1, 2, 0).numpy()
