"""What a supervised run is, as data: the flags of `wellposed train`, the fields of a file, the arguments of `train`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from wellposed.training.run_config import ModelArgs, RunConfig
from wellposed.training.settings import require

__all__ = ["PRESETS", "ModelArgs", "TrainConfig"]

PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """Supervised training of a timm model, with or without skips."""

    presets: ClassVar[Path] = PRESETS

    label_smoothing: float = 0.1
    ema: float = 0.0
    """Decay of an average of the weights, which is then what is tested and saved; 0 keeps none."""

    crop: Literal["none", "pad", "resize"] | None = None
    """Random crop: a window of the padded image, or a part enlarged; what suits the data if None."""
    flip: bool | None = None
    """Mirror every other image; what suits the data if None."""
    geometry: float = 0.0
    """Strength of random rotations, shears and shifts, 0 to 1."""
    colour: float = 0.0
    """Strength of random brightness, contrast, saturation, solarization and posterization, 0 to 1."""
    erase: float = 0.0
    """Probability of erasing a rectangle."""
    mixup: float = 0.0
    """Parameter of mixup's Beta distribution; 0 is off."""
    cutmix: float = 0.0
    """Parameter of CutMix's Beta distribution; 0 is off."""

    def check(self) -> None:
        """Raise InvalidArgumentError where a number lies outside what it is defined for."""
        super().check()
        for name in ("label_smoothing", "ema"):
            require(self, name, 0 <= getattr(self, name) < 1, "a number in [0, 1)")
        for name in ("geometry", "colour", "erase", "mixup", "cutmix"):
            require(self, name, 0 <= getattr(self, name) <= 1, "a number in [0, 1]")
