"""What a run of DINO is, as data: the flags of `wellposed pretrain`, the fields of a file, the arguments of `pretrain`.

The symbols and defaults are those of arXiv 2104.14294; of the skipless model, those of arXiv 2510.00345.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from wellposed.errors import InvalidArgumentError
from wellposed.training.run_config import RunConfig
from wellposed.training.settings import require

LEARNING_RATES = {"adamw": 5e-4, "soap": 1e-3, "muon": 1e-3}
"""For 256 images."""


@dataclass(frozen=True, kw_only=True)
class DinoConfig(RunConfig):
    """Self-supervised pretraining of a timm ViT by DINO, with or without skips."""

    presets: ClassVar[Path] = Path(__file__).parent / "presets" / "dino"
    prefix: ClassVar[str] = "dino-"

    epochs: int = 100
    lr: float | None = None
    """Highest learning rate for a batch of 256 images, in proportion for others; 5e-4 for adamw, 1e-3 for soap and muon
    if None."""
    image_size: int | None = None
    """For sets without a size of their own: shapes (32 if None), pet and folder (224). Crops are taken from such
    images."""
    patch_size: int | None = None
    """Chosen to give 16 to 256 tokens in a global crop if None."""
    pool: Literal["avg", "token"] = "token"
    """What stands for an image: the class token, or the mean of the patch tokens."""
    alpha: float = 1.8
    """Weight of the random part of W_Q W_K^T in the conditioned initialization."""
    beta: float = 1.0
    """Weight of the identity in it."""
    weight_decay: float = 0.04
    """At the first step; of matrices, not of biases, norms and embeddings."""
    weight_decay_end: float = 0.4
    """At the last step; a cosine in between."""
    warmup_epochs: float = 10.0
    clip: float = 3.0
    """Largest norm of the gradient of each weight by itself; 0 does not clip."""
    final_lr: float = 1e-6
    """Learning rate at the last step, whatever the batch."""
    drop_path: float | None = None
    """Of the student; 0.1 with skips if None, and off without."""

    global_size: int | None = None
    """Pixels a side of a global crop; those of the images if None, or 224 if they are larger."""
    local_size: int | None = None
    """Pixels a side of a local crop; whole patches, about 3/7 of a global crop, if None."""
    global_crops: int = 2
    """Views that the teacher sees, too."""
    local_crops: int = 8
    """Views that only the student sees."""
    global_scale: tuple[float, float] = (0.4, 1.0)
    """The part of the image's area that a global crop shows."""
    local_scale: tuple[float, float] = (0.05, 0.4)
    """The part of it that a local crop shows."""
    flip: bool | None = None
    """Mirror every other crop; what suits the data if None."""
    jitter: float = 1.0
    """Strength of the change of brightness, contrast, saturation and hue, 0 to 1."""
    grey: float = 0.2
    """Probability that a crop loses its colours."""
    blur: float | None = None
    """Largest standard deviation of the blur in pixels; 2, or less for global crops under 96 pixels, if None."""
    solarize: float = 0.2
    """Probability that bright pixels of the second global crop are inverted."""

    out_dim: int = 65536
    """K, the number of outputs of the head."""
    hidden_dim: int = 2048
    """Width of the head's two hidden layers."""
    bottleneck_dim: int = 256
    """Width of what its last layer sees."""
    freeze_last_epochs: float = 1.0
    """Epochs at the start in which the last layer does not learn."""
    student_temp: float = 0.1
    teacher_temp_start: float = 0.04
    """Temperature of the teacher at the first step."""
    teacher_temp: float = 0.07
    """Its temperature after the warm-up."""
    teacher_temp_epochs: float = 30.0
    """Epochs in which it rises from one to the other, in a line."""
    momentum: float = 0.996
    """How much of the teacher stays at the first step; 1 at the last, and a cosine in between. The centre must follow
    much faster than the teacher moves, or all outputs run away together."""
    center_momentum: float = 0.9
    """How much of the centre of the teacher's outputs stays at a step; 1 does not center."""

    knn_images: int = 20_000
    """After every epoch, k-NN accuracy with so many training images that vote; 0 leaves it out."""
    collapse: Literal["stop", "warn"] = "stop"
    """What to do with a run whose outputs no longer tell images apart: end it, or only say so."""

    def check(self) -> None:
        """Raise InvalidArgumentError where a number lies outside what it is defined for."""
        super().check()
        if self.batch_size < 2:
            raise InvalidArgumentError(
                f"batch_size={self.batch_size}: the outputs of a batch are centered by their mean; expected at least 2 "
                "images, and many more to learn from"
            )
        if self.global_crops < 2:
            raise InvalidArgumentError(
                f"global_crops={self.global_crops}: the student learns what the teacher says about another global "
                "crop; expected at least 2"
            )
        require(self, "local_crops", self.local_crops >= 0, "at least 0")
        for name in ("out_dim", "hidden_dim", "bottleneck_dim"):
            require(self, name, getattr(self, name) >= 2, "at least 2")
        for name in ("global_size", "local_size"):
            require(self, name, getattr(self, name) is None or getattr(self, name) >= 1, "at least 1")
        for name in ("student_temp", "teacher_temp_start", "teacher_temp"):
            require(self, name, 0 < getattr(self, name) < math.inf, "a finite number above 0")
        for name in ("momentum", "center_momentum", "jitter", "grey", "solarize"):
            require(self, name, 0 <= getattr(self, name) <= 1, "a number in [0, 1]")
        for name in ("weight_decay_end", "final_lr", "freeze_last_epochs", "teacher_temp_epochs", "blur"):
            require(self, name, 0 <= (getattr(self, name) or 0) < math.inf, "a finite number, at least 0")
        for name in ("global_scale", "local_scale"):
            low, high = getattr(self, name)
            require(self, name, 0 < low <= high <= 1, "two parts of an area, 0 < low <= high <= 1")
        require(self, "knn_images", self.knn_images >= 0, "at least 0")
        require(self, "drop_path", 0 <= (self.drop_path or 0) < 1, "a number in [0, 1)")
        if self.drop_path and not self.skips and self.cut == "both":
            raise InvalidArgumentError(
                f"drop_path={self.drop_path} without skips: a dropped path would leave nothing; expected 0 or none"
            )
