"""Fitting a scene: rays drawn from all training views, all of them on the device; PSNR and SSIM on held-out views."""

import io
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from wellposed.errors import DataError
from wellposed.fields.files import FieldSpec
from wellposed.fields.image import encoded
from wellposed.fields.nerf import Nerf, Rendered, Sampling
from wellposed.fields.nerf_config import NerfConfig
from wellposed.fields.quality import WINDOW, decibels, psnr, ssim
from wellposed.fields.rays import Rays, camera_rays
from wellposed.fields.results import FITTED, TRUTH, FieldResult
from wellposed.fields.scenes import Scene, Views, read_scene
from wellposed.fields.training import FieldTask, fit_field
from wellposed.runs import atomic_path, device_named, tracked, writing_to
from wellposed.training.accelerators import compiled
from wellposed.training.guards import repeatable

TURNTABLE, VIEWS = "turntable.gif", "views.png"
_WARMUP = 500
"""Steps in which the learning rate rises; a tenth of the run if that is less."""
_SHOWN = 4


def fit_nerf(config: NerfConfig, *, quiet: bool = False, given: Collection[str] | None = None) -> FieldResult:
    """Fit a network to a scene as `config` says; see `wellposed.fields.training.fit_field` for what a run leaves.

    Beside that the folder holds fitted.png and truth.png, a held-out view; views.png, some of them under the truth; and
    turntable.gif.

    Raises:
        DataError: something is wrong with the scene; the frame is named.
        InvalidArgumentError, RunError, DivergedError: as for every run.
    """
    config = config.begun(given)
    if device_named(config.device).type != "cuda":
        config = replace(config, bf16=False, compile=False)
    scene = open_scene(config)
    size = (len(scene.train) + len(scene.test)) * scene.size[0] * scene.size[1]
    task, result = fit_field(config, lambda place: NerfTask(config, scene, place), size=size, quiet=quiet)
    task.model.eval()  # in the state of the tests, so that nothing is compiled anew
    with torch.no_grad(), task.autocast(), repeatable(task.device, wanted=config.repeatable):
        _write_pictures(config, task, scene)
    return result


def open_scene(config: NerfConfig) -> Scene:
    """The scene that `config` names, once it is sure that it can be trained and tested on."""
    scene = read_scene(config.data, downscale=config.downscale, held_out=config.held_out, frames=config.frames)
    if min(scene.size) < WINDOW:
        height, width = scene.size
        raise DataError(
            f"the views of {config.data} are {width} x {height} pixels; expected at least {WINDOW} x {WINDOW}, the "
            "window of SSIM: choose a smaller --downscale"
        )
    return scene


class NerfTask(FieldTask):
    """A scene that learns; everything that a step needs is on the device, and nothing is read back."""

    def __init__(self, config: NerfConfig, scene: Scene, accelerator: Accelerator) -> None:
        self._rays = rays_of(scene, scene.train).to(accelerator.device)
        self._colours = scene.train.images.reshape(-1, 3).to(accelerator.device)
        self._tested = scene.test.spread(config.test_views)
        spec = FieldSpec("nerf", {**config.layers, "coarse": config.sampler == "hierarchical"}, {})
        network: Any = spec.build().to(accelerator.device)
        self.nerf = Nerf(network, sampling_of(config, scene, self._rays))
        self.render: Callable[..., Rendered] = self.nerf.render
        if config.compile:
            self.render = compiled(self.nerf.render, accelerator)
            if config.bf16:  # products that are left in float32 are meant
                warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores", category=UserWarning)
        super().__init__(
            *(network, replace(spec, facts=self.nerf.facts()), config, accelerator),
            batch_size=self.nerf.sampling.rays,
            unit="rays",
            warmup=min(_WARMUP, config.epochs * config.steps_per_test // 10),
            extra_state=None if self.nerf.grid is None else self.nerf.grid.state(),
        )

    def loss(self, step: int) -> dict[str, Tensor]:
        """Of rays through any pixels of any views."""
        if self.nerf.grid is not None:
            self.nerf.grid.update(self.nerf.network.fine.density, step)
        chosen = torch.randint(len(self._colours), (self.nerf.sampling.rays,), device=self.device)
        seen, truth = self.render(self._rays.at(chosen), jitter=True), self._colours[chosen]
        error = _error(seen.colour, truth, seen.complete)
        loss = error if seen.coarse is None else error + _error(seen.coarse, truth, seen.complete)
        # A clone, since the next step overwrites what this one returned before it is read.
        shares = {"whole_rays": seen.complete.float().mean(), "used_samples": seen.used.clone()}
        return {"loss": loss, "psnr": decibels(error.detach()), **shares}

    def scores(self) -> dict[str, float]:
        """Means over the held-out views."""
        found = []
        for image, pose in zip(self._tested.images, self._tested.poses, strict=True):
            pair = [each.permute(2, 0, 1) for each in (self.nerf.picture(pose, self.render), image.to(self.device))]
            found.append(torch.stack([psnr(*pair), ssim(*pair)]))
        mean_psnr, mean_ssim = torch.stack(found).mean(0).tolist()
        return {"psnr": mean_psnr, "ssim": mean_ssim}


def _error(colour: Tensor, truth: Tensor, complete: Tensor) -> Tensor:
    """Mean squared error of the rays that are whole."""
    return ((colour - truth).square().mean(1) * complete).sum() / complete.sum().clamp(min=1)


def sampling_of(config: NerfConfig, scene: Scene, rays: Rays) -> Sampling:
    """Where the rays of the scene's camera are to be sampled."""
    height, width = scene.size
    # In normalized device coordinates rays end at t = 1, so that their ends bound the scene.
    ends = torch.cat([rays.origins, rays.origins + rays.directions])
    low, high = (ends.amin(0), ends.amax(0)) if scene.ndc else (torch.full((3,), side * config.box) for side in (-1, 1))
    return Sampling(
        height=height,
        width=width,
        focal=scene.focal,
        ndc=scene.ndc,
        near=scene.near,
        far=scene.far,
        background=None if scene.ndc else 1.0,
        box=(low.tolist(), high.tolist()),
        sampler=config.sampler,
        samples=config.samples,
        rays=config.rays if config.sampler == "grid" else config.samples // config.places,
        pieces=config.pieces,
        cells=config.cells,
        counts=(config.coarse, config.fine),
    )


def rays_of(scene: Scene, views: Views) -> Rays:
    """Those of all pixels of the views."""
    return camera_rays(views.poses, *scene.size, scene.focal, ndc=scene.ndc)


def _write_pictures(config: NerfConfig, task: NerfTask, scene: Scene) -> None:
    shown = scene.test.spread(_SHOWN)
    made = [_bytes(task.nerf.picture(pose, task.render)) for pose in shown.poses]
    truth = [_bytes(image) for image in shown.images]
    pictures = {VIEWS: torch.cat([torch.cat(truth, 1), torch.cat(made, 1)], 0), TRUTH: truth[0], FITTED: made[0]}
    files = {name: encoded(picture, "PNG") for name, picture in pictures.items()}
    if config.frames:
        frames = [_bytes(task.nerf.picture(pose, task.render)) for pose in tracked(list(scene.path), "turntable")]
        files = {TURNTABLE: animated(frames), **files}
    for name, content in files.items():  # fitted.png last: it says that all is there
        with writing_to(config.folder), atomic_path(config.folder / name) as file:
            file.write_bytes(content)


def _bytes(picture_HW3: Tensor) -> Tensor:
    return (picture_HW3 * 255).round().to(torch.uint8).cpu()


def animated(frames: Sequence[Tensor], milliseconds: int = 80) -> bytes:
    """The uint8 pictures (height, width, 3) as a GIF that never ends."""
    from PIL import Image

    first, *others = (Image.fromarray(frame.numpy()).quantize(256) for frame in frames)
    file = io.BytesIO()
    first.save(file, "GIF", save_all=True, append_images=others, duration=milliseconds, loop=0)
    return file.getvalue()
