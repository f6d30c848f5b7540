"""What fine-tuning a text-to-image pipeline is, as data."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, Self

from wellposed.training.finetuning.config import FinetuneConfig
from wellposed.training.settings import require


@dataclass(frozen=True, kw_only=True)
class ImageConfig(FinetuneConfig):
    """DreamBooth: a text-to-image pipeline learns a subject from a few pictures, under a word of its own."""

    learning_rates: ClassVar[dict[str, float]] = {"adapter": 1e-4}

    data: str = ""
    """Folder with the pictures of the subject; three to twenty will do."""
    model: str = ""
    """A Stable Diffusion pipeline (1.x or 2.x), as diffusers writes it into a folder."""
    prompt: str = ""
    """What the pictures show, with --token for the subject: "a photo of sks dog"."""
    token: str = "sks"
    """A word in --prompt that is rare enough to mean nothing yet."""

    class_prompt: str = ""
    """What the subject is one of: "a photo of dog". The pipeline keeps what it knows of these (prior preservation)."""
    class_data: Path | None = None
    """Folder with pictures for --class-prompt; if there are none, the pipeline draws some and puts them there. Beside
    --out if None."""
    class_images: int = 100
    """How many it draws."""
    prior_weight: float = 1.0
    """What they count in the loss, against 1 for the subject."""

    method: Literal["lora", "rslora", "dora", "sine", "sine-dora"] = "sine"
    """The adapter: LoRA, rsLoRA, DoRA, SineLoRA or SineDoRA (arXiv 2403.19243)."""
    target_modules: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    """Ends of the names of the UNet's layers to adapt; those of attention."""
    text_encoder: bool = False
    """Adapt the attention of the text encoder too; as it is, prompts are encoded once."""
    image_size: int | None = None
    """Pixels a side, to which pictures are brought and cropped; what the pipeline was made for if None."""
    flip: bool = True
    """Half of the time, mirror a picture."""
    repeats: int = 25
    """How often an epoch shows each picture of the subject."""
    epochs: int = 4
    batch_size: int = 1
    """Pictures of the subject in a step of all processes together; with --class-prompt, as many of its class too."""
    lr: float | None = None
    """Highest learning rate; 1e-4 if None."""
    test_batch_size: int = 4
    """Pictures that are encoded or drawn together."""

    prompts: tuple[str, ...] = ()
    """To draw in the end, without the adapter and with it; --prompt if none is given."""
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    """Of the noise from which each is drawn."""
    sampling_steps: int = 30
    guidance: float = 7.5
    """Weight of the prompt in drawing; 1 for no guidance."""
    bits: tuple[int, ...] = ()
    """Also draw with the adapter quantized to so many bits (arXiv 2505.21895), as in --bits 1 2 3 4."""
    features: str = ""
    """A vision model by whose features what is drawn is compared with the subject: a folder, or a timm name."""
    features_checkpoint: Path | None = None
    """Weights for a timm name."""

    def check(self) -> None:
        """Raise InvalidArgumentError where a value lies outside what it is defined for."""
        require(self, "data", self.data, "a folder with pictures of the subject, as in --data path/to/pictures")
        require(self, "model", self.model, "a folder with a pipeline, as in --model path/to/stable-diffusion")
        super().check()
        require(self, "token", self.token and not set(self.token) & set(" \t\n"), "one word, such as sks")
        require(self, "prompt", self.token in self.prompt.split(), f"words with {self.token!r} for the subject")
        require(self, "class_prompt", self.token not in self.class_prompt.split(), f"words without {self.token!r}")
        is_idle = self.class_data is None or self.class_prompt
        require(self, "class_data", is_idle, "it with --class-prompt, which says what these pictures show")
        for name in ("class_images", "repeats", "sampling_steps"):
            require(self, name, getattr(self, name) >= 1, "at least 1")
        require(self, "image_size", self.image_size is None or self.image_size >= 8, "at least 8")
        for name in ("prior_weight", "guidance"):
            require(self, name, 0 <= getattr(self, name) < math.inf, "a finite number, at least 0")
        are_seeds = all(0 <= seed < 2**63 for seed in self.seeds) and len(set(self.seeds)) == len(self.seeds)
        require(self, "seeds", self.seeds and are_seeds, "different ones, 0 to 2^63 - 1")
        require(self, "prompts", all(prompt.strip() for prompt in self.prompts), "words")
        require(self, "bits", all(1 <= bits <= 8 for bits in self.bits), "some of 1 to 8")
        is_trained = not self.features or Path(self.features).exists() or self.features_checkpoint is not None
        require(self, "features", is_trained, "a folder, or a timm name with its weights in --features-checkpoint")
        is_used = self.features or self.features_checkpoint is None
        require(self, "features_checkpoint", is_used, "it with --features and a timm name")

    def resolved(self) -> Self:
        """With everything filled in that follows from the rest."""
        words = re.sub(r"\W+", "-", self.class_prompt).strip("-")
        beside = Path(f"{self.folder}-class-{words}") if self.class_prompt else None
        return replace(
            super().resolved(),
            prompts=self.prompts or (self.prompt,),
            class_data=self.class_data or beside,
            bits=tuple(dict.fromkeys(self.bits)),
        )

    @property
    def sets(self) -> str:
        """What it learns from, as a part of a folder's name."""
        return Path(self.data).name
