"""What fine-tuning a vision model is, as data."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from wellposed.training.augmentation import Augmentation
from wellposed.training.finetuning.config import FinetuneConfig
from wellposed.training.run_config import ModelArgs
from wellposed.training.settings import require


@dataclass(frozen=True, kw_only=True)
class VisionConfig(Augmentation, FinetuneConfig):
    """Fine-tuning of a timm or HuggingFace vision model on labelled images, with a new head for their classes."""

    learning_rates: ClassVar[dict[str, float]] = {"full": 1e-4, "adapter": 5e-4}

    data: str = ""
    """shapes, digits, cifar10:PATH, cifar100:PATH, pet:PATH or folder:PATH."""
    model: str = ""
    """A timm name, a folder of timm's, transformers' or wellposed's, or a .safetensors file that says what it is."""
    checkpoint: Path | None = None
    """Weights for a timm name, .safetensors or torch's; without, it is at its initialization."""
    model_args: ModelArgs = field(default_factory=dict)
    """Further arguments of timm.create_model for a timm name, such as depth 6 embed_dim 64."""
    image_size: int | None = None
    """Pixels a side that the model sees. If None, those of the set where they give 16 patches or more, else the
    model's own, to which small images are enlarged on the device."""

    epochs: int = 10
    batch_size: int = 64
    lr: float | None = None
    """Highest learning rate; 1e-4 for full and 5e-4 for adapters if None."""
    warmup_epochs: float = 0.5
    test_batch_size: int = 256
    label_smoothing: float = 0.0

    workers: int = 4
    """Processes that read images of sets which do not fit in memory."""

    def check(self) -> None:
        """Raise InvalidArgumentError where a value lies outside what it is defined for."""
        require(self, "data", self.data, "a set, as in --data pet:PATH or --data digits")
        require(self, "model", self.model, "a timm name, or a folder with a model, as in --model path/to/model")
        super().check()
        require(self, "image_size", self.image_size is None or self.image_size >= 1, "at least 1")
        require(self, "workers", self.workers >= 0, "at least 0")
        require(self, "label_smoothing", 0 <= self.label_smoothing < 1, "a number in [0, 1)")
        self.check_augmentation()

    @property
    def sets(self) -> str:
        """What it learns from, as a part of a folder's name."""
        return self.data.partition(":")[0]
