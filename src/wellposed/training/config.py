"""What a supervised run is, as data: the flags of `wellposed train`, the fields of a file, the arguments of `train`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from wellposed.training.augmentation import Augmentation
from wellposed.training.run_config import ModelArgs, RunConfig
from wellposed.training.settings import require

__all__ = ["PRESETS", "ModelArgs", "TrainConfig"]

PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Augmentation, RunConfig):
    """Supervised training of a timm model, with or without skips."""

    presets: ClassVar[Path] = PRESETS

    label_smoothing: float = 0.1
    ema: float = 0.0
    """Decay of an average of the weights, which is then what is tested and saved; 0 keeps none."""

    def check(self) -> None:
        """Raise InvalidArgumentError where a number lies outside what it is defined for."""
        super().check()
        for name in ("label_smoothing", "ema"):
            require(self, name, 0 <= getattr(self, name) < 1, "a number in [0, 1)")
        self.check_augmentation()
