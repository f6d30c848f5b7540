"""DreamBooth's steps: a UNet with an adapter learns to tell the noise in latents of a subject (arXiv 2208.12242).

Shapes: B rows of P parts (the subject and, with prior preservation, one of its class), each a latent of C x h x w = K
numbers; L tokens of width D.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from wellposed.data import ImageSet
from wellposed.training.finetuning.cards import Card, model_card
from wellposed.training.finetuning.diffusion import drawn
from wellposed.training.finetuning.dreambooth_data import (
    LatentLoader,
    Latents,
    complete_class,
    moments_of,
    noisy,
    read_pictures,
)
from wellposed.training.finetuning.image_config import ImageConfig
from wellposed.training.finetuning.methods import made_trainable
from wellposed.training.finetuning.task import FinetuneTask

TEXT_ENCODER = "text_encoder"
"""Where in the folder of the UNet's adapter that of the text encoder lies."""
_TEXT_TARGETS = ["q_proj", "k_proj", "v_proj", "out_proj"]
_TESTED_STEPS, _MOST_TESTED = 8, 16


class Denoiser(nn.Module):
    """What the UNet predicts, (B, P, K), for noisy latents with their timestep at the end, (B, P, K + 1).

    Part number p of every row is under prompt number p.
    """

    states_PLD: Tensor  # noqa: N815

    def __init__(self, pipeline: Any, prompts: list[str], unet: Any, text_encoder: Any | None, size: int) -> None:
        super().__init__()
        self.unet, self.text_encoder = unet, text_encoder
        self._latent = (unet.config.in_channels, size, size)
        encode = partial(pipeline.encode_prompt, prompts, pipeline.device, 1, False)
        self._encode = None if text_encoder is None else encode
        with torch.no_grad():
            self.register_buffer("states_PLD", encode()[0], persistent=False)

    def forward(self, inputs_BPK: Tensor) -> Tensor:
        rows, parts = inputs_BPK.shape[:2]
        latents = inputs_BPK[..., :-1].reshape(-1, *self._latent).to(self.states_PLD.dtype)
        steps = inputs_BPK[..., -1].flatten().long()
        states_PLD = self.states_PLD if self._encode is None else self._encode()[0]
        states = states_PLD[:parts].repeat(rows, 1, 1)
        return self.unet(latents, steps, states).sample.reshape(rows, parts, -1)

    def save_pretrained(self, folder: str, **options: Any) -> None:
        """The adapter of the UNet as PEFT saves it, and within its folder that of the text encoder, if it has one."""
        self.unet.save_pretrained(folder, **options)
        if self.text_encoder is not None:
            self.text_encoder.save_pretrained(str(Path(folder) / TEXT_ENCODER), **options)


class DreamboothTask(FinetuneTask):
    """The squared error of the predicted noise, or velocity, of the subject and of its class."""

    model: Denoiser

    def __init__(
        self, config: ImageConfig, pipeline: Any, data: ImageSet, image_size: int, accelerator: Accelerator
    ) -> None:
        from diffusers import DDPMScheduler

        super().__init__(config, accelerator)
        self._config, self.pipeline, self.pictures, self.image_size = config, pipeline, data, image_size
        pipeline.to(accelerator.device)
        latents = Latents(
            data.name,
            self._moments(data),
            self._class_moments(),
            config.repeats,
            DDPMScheduler.from_config(pipeline.scheduler.config),
        )
        for part in (pipeline.unet, pipeline.vae, pipeline.text_encoder):
            nn.Module.to(part, self.base_dtype)  # diffusers' own warns, whatever the model
        unet = made_trainable(pipeline.unet, config, {})
        text_encoder = None
        if config.text_encoder:
            text_encoder = made_trainable(pipeline.text_encoder, config, {"target_modules": _TEXT_TARGETS})
        prompts = [config.prompt, config.class_prompt][: latents.parts]
        size = latents.subject.shape[-1]
        self.model = Denoiser(pipeline, prompts, unet, text_encoder, size).to(accelerator.device)
        self.loader = LatentLoader(
            *(latents, config.batch_size),
            seed=config.seed,
            device=accelerator.device,
            rank=accelerator.process_index,
            ranks=accelerator.num_processes,
        )
        self.class_pictures = 0 if latents.of_class is None else len(latents.of_class)
        self._weights_P = torch.tensor([1.0, config.prior_weight], device=accelerator.device)[: latents.parts]
        self._test = _test_batch(latents, config.seed)
        self._begin(torch.zeros_like(self._test[0][:1]).expand(-1, latents.parts, -1))

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes."""
        return self._accelerator.is_main_process

    def draw(self, prompt: str, seeds: Sequence[int]) -> Tensor:
        """Pictures of `prompt` as the pipeline is now, uint8 (B, 3, H, W)."""
        config = self._config
        how: dict[str, Any] = {"image_size": self.image_size, "steps": config.sampling_steps}
        return drawn(self.pipeline, prompt, seeds, **how, guidance=config.guidance, autocast=self._autocast)

    def _class_moments(self) -> Tensor | None:
        config = self._config
        if not config.class_prompt:
            return None
        assert config.class_data is not None
        with self._accelerator.main_process_first():
            complete_class(
                *(config.class_data, config.class_images, partial(self.draw, config.class_prompt)),
                first_seed=config.seed,
                batch_size=config.test_batch_size,
            )
        return self._moments(read_pictures(config.class_data, self.image_size))

    def _moments(self, pictures: ImageSet) -> Tensor:
        size = self._config.test_batch_size
        return moments_of(self.pipeline.vae, pictures.images, flip=self._config.flip, batch_size=size)

    def _net(self) -> nn.Module:
        return self.model

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        return (self._weights_P * (logits.float() - targets).square().mean(2)).sum()

    def _counted(self, targets: Tensor) -> Tensor:
        return torch.full((), len(targets), device=targets.device)

    @torch.no_grad()
    def _tested(self) -> dict[str, float]:
        """The squared error of what is predicted of the subject, for noise that is the same after every epoch."""
        total = torch.zeros((), dtype=torch.float64, device=self._accelerator.device)
        size = self._config.test_batch_size
        for inputs, targets in zip(*(part.split(size) for part in self._test), strict=True):
            with self._autocast():
                predicted = self.model(inputs)
            total += (predicted.float() - targets).square().mean(2).sum()
        return {"loss": float(total) / len(self._test[0])}

    @property
    def facts(self) -> dict[str, Any]:
        """What else is to be known about the run: its size, its pictures, and the rank of what was learned."""
        return super().facts | {"pictures": len(self.pictures), "class_pictures": self.class_pictures}

    def _save_model(self, folder: Path) -> None:
        raise NotImplementedError("there is no method that trains all weights")

    def _card(self, facts: dict[str, Any]) -> str:
        config = self._config
        kept = f", and {self.class_pictures} of {config.class_prompt!r}" if self.class_pictures else ""
        told = f"Trained on {len(self.pictures)} pictures of {config.prompt!r}{kept}, {self.image_size} px a side."
        if config.text_encoder:
            told += f" The folder {TEXT_ENCODER} within is for pipeline.text_encoder, to be loaded likewise."
        opened = 'StableDiffusionPipeline.from_pretrained("path/to/the/pipeline")'
        return model_card(
            config,
            Card(
                data=config.sets,
                told=told,
                pipeline="text-to-image",
                library="diffusers",
                imports=f"from diffusers import StableDiffusionPipeline\n\npipeline = {opened}",
                base="pipeline.unet  # is changed in place: from now on the pipeline draws with the adapter",
                whole="",
                own_settings=("prompt", "class_prompt", "prior_weight", "text_encoder", "flip", "repeats"),
            ),
            self._results,
            facts,
        )


def _test_batch(latents: Latents, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets at timesteps all over the schedule, for the subject's first pictures: always the same."""
    mean = latents.subject[:_MOST_TESTED, :1].chunk(2, 2)[0].repeat_interleave(_TESTED_STEPS, 0)
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(seed)).to(mean)
    end = latents.scheduler.config.num_train_timesteps
    steps = ((torch.arange(len(mean), device=mean.device) % _TESTED_STEPS + 0.5) * end / _TESTED_STEPS).long()
    return noisy(latents.scheduler, mean, noise, steps[:, None])
