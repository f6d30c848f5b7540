"""What is done to images before a model sees them, as a part of a run's settings."""

from dataclasses import dataclass, replace
from typing import Literal, Self

from wellposed.training.settings import require

# What suits a set where the settings do not say: the crop, and whether mirrored images are of the same class.
_USUAL: dict[str, tuple[Literal["none", "pad", "resize"], bool]] = {
    "digits": ("none", False),
    "folder": ("resize", True),
    "pet": ("resize", True),
}


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """The settings of a run that say how images are augmented; a base beside `Settings`, which has the others."""

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

    def check_augmentation(self) -> None:
        """Raise InvalidArgumentError where a number lies outside what it is defined for."""
        for name in ("geometry", "colour", "erase", "mixup", "cutmix"):
            require(self, name, 0 <= getattr(self, name) <= 1, "a number in [0, 1]")

    def suited_to(self, name: str) -> Self:
        """With the crop and the flip filled in that suit the set `name`."""
        crop, flip = _USUAL.get(name, ("pad", True))
        return replace(
            self, crop=crop if self.crop is None else self.crop, flip=flip if self.flip is None else self.flip
        )
