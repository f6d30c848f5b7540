"""Named protocols of the dense linear probe: everything that a mIoU depends on besides the features.

Published numbers differ by ten points for the choices made here alone, so a number is never shown without them.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from wellposed.errors import InvalidArgumentError

_CHOICES = {
    "train_view": ("whole", "crop"),
    "train_labels": ("input", "grid"),
    "test_view": ("whole", "windows"),
    "test_labels": ("original", "input", "grid"),
    "optimizer": ("adamw", "sgd"),
    "schedule": ("cosine", "linear"),
}

_NUMBERS: dict[str, Any] = {
    **dict.fromkeys(("batch_norm", "flip"), bool),
    **dict.fromkeys(("lr", "weight_decay"), int | float),
    "warmup": int,
}
_WORDS = {bool: "True or False", int | float: "a number", int: "a whole number"}


@dataclass(frozen=True, kw_only=True)
class DenseProtocol:
    """How the linear head is trained on frozen patch features, and how its masks are compared with the true ones."""

    name: str
    blocks: int = 1
    """How many blocks are concatenated: the one that is probed, which is the last unless another is named, and those
    before it."""
    batch_norm: bool = False
    """Normalize every channel before the 1x1 convolution."""
    size: int | None = 448
    """Pixels a side of what the model sees, to the next multiple of its patch; the model's own if None."""
    train_view: Literal["whole", "crop"] = "whole"
    """The whole picture, resized without keeping its aspect; or a random window of it, rescaled by 0.5 to 2."""
    flip: bool = False
    """Mirror every other picture in training."""
    train_labels: Literal["input", "grid"] = "input"
    """Upsample the logits to the pixels of the input, or reduce the labels to the commonest class of each patch."""
    test_view: Literal["whole", "windows"] = "whole"
    """The whole picture, resized; or overlapping windows of the picture with its shorter side resized."""
    test_labels: Literal["original", "input", "grid"] = "original"
    """Compare at the size the mask has on disk, at the size of the input, or patch by patch."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-3
    weight_decay: float = 1e-4
    schedule: Literal["cosine", "linear"] = "cosine"
    """How the learning rate falls to 0."""
    warmup: int = 0
    """Steps in which it rises; at most half of them."""
    epochs: int | None = 25
    steps: int | None = None
    """Batches to train on, instead of epochs."""
    batch_size: int = 16

    def __post_init__(self) -> None:
        for name, kind in _NUMBERS.items():
            value = getattr(self, name)
            if isinstance(value, bool) != (kind is bool) or not isinstance(value, int if kind is bool else kind):
                raise InvalidArgumentError(f"{name}={value!r}: expected {_WORDS[kind]}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise InvalidArgumentError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(allowed)}")
        for name in ("blocks", "batch_size", "size", "epochs", "steps"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise InvalidArgumentError(f"{name}={value!r}: expected a whole number, at least 1")
        if (self.epochs is None) == (self.steps is None):
            raise InvalidArgumentError(f"epochs={self.epochs}, steps={self.steps}: expected one of them")
        if self.test_view == "windows" and self.test_labels != "original":
            raise InvalidArgumentError(f"test_labels={self.test_labels!r}: windows are compared at the original size")
        if self.train_view == "crop" and self.train_labels == "grid":
            raise InvalidArgumentError("train_labels='grid': crops are trained on at the size of the input")
        if not (self.lr > 0 and self.weight_decay >= 0 and self.warmup >= 0):
            raise InvalidArgumentError(
                f"lr={self.lr}, weight_decay={self.weight_decay}, warmup={self.warmup}: expected lr > 0, others >= 0"
            )

    @property
    def augmented(self) -> bool:
        """Whether no two epochs see the same features."""
        return self.flip or self.train_view == "crop"

    @property
    def changes(self) -> dict[str, Any]:
        """In which fields it is not what its name stands for; a size is no change where the name leaves it open."""
        named = DENSE_PROTOCOLS.get(self.name, self)
        own = vars(replace(self, size=None) if named.size is None else self)
        return {name: value for name, value in own.items() if value != getattr(named, name)}

    def __str__(self) -> str:
        changed = "".join(f", {name} {value}" for name, value in self.changes.items())
        seen = f"{self.size} x {self.size}" if self.size else "the model's own size"
        view = {"whole": "whole pictures resized to", "crop": "random windows, scaled by 0.5 to 2, of"}
        head = f"{'BatchNorm and ' if self.batch_norm else ''}1x1 convolution"
        labels = {"input": "logits upsampled to it", "grid": "labels reduced to the patch grid"}
        length = f"{self.epochs} epochs" if self.steps is None else f"{self.steps} steps"
        tested = {"whole": "whole pictures", "windows": "overlapping windows"}[self.test_view]
        compared = {
            "original": "at the original size of the masks",
            "input": "at the size of the input",
            "grid": "patch by patch",
        }
        optimizer = {"adamw": "AdamW", "sgd": "SGD with momentum 0.9"}[self.optimizer]
        blocks = "the layer" + (f" and the {self.blocks - 1} before it" if self.blocks > 1 else "")
        return (
            f"{self.name}{f' (changed{changed[1:]})' if changed else ''}: {head} on the frozen patch tokens of "
            f"{blocks}; trained on {view[self.train_view]} {seen}{', mirrored or not' if self.flip else ''}, "
            f"{labels[self.train_labels]}, {optimizer}, lr {self.lr:g} ({self.schedule}, warm-up {self.warmup}), "
            f"weight decay {self.weight_decay:g}, {length} of batches of {self.batch_size}; tested on {tested}, "
            f"compared {compared[self.test_labels]}"
        )


_GIVEN = (
    DenseProtocol(name="linear-last"),
    DenseProtocol(name="linear-last4", blocks=4),
    DenseProtocol(
        name="dinov2-like",
        batch_norm=True,
        size=512,
        train_view="crop",
        flip=True,
        test_view="windows",
        schedule="linear",
        warmup=1500,
        epochs=None,
        steps=40_000,
    ),
    DenseProtocol(name="quick", batch_norm=True, size=None, train_labels="grid", lr=1e-2, epochs=20, batch_size=32),
    DenseProtocol(
        name="patch-grid",
        batch_norm=True,
        size=None,
        train_labels="grid",
        test_labels="grid",
        lr=1e-2,
        epochs=20,
        batch_size=32,
    ),
)
DENSE_PROTOCOLS = {protocol.name: protocol for protocol in _GIVEN}
"""By name. `linear-last` and `linear-last4` have the heads of arXiv 2510.00345, which leaves the rest open;
`dinov2-like` is after the linear probe of DINOv2, without its photometric distortion and its limit on how much of a
crop one class may fill; `quick` is for small sets, and `patch-grid` is the same compared patch by patch: another
number, not to be set beside the others."""


def dense_protocol(name: str, /, **changes: Any) -> DenseProtocol:
    """The protocol of that name, with some fields changed, which it then says of itself.

    Example:
        >>> dense_protocol("quick", lr=0.1).changes
        {'lr': 0.1}
    """
    if name not in DENSE_PROTOCOLS:
        raise InvalidArgumentError(f"protocol={name!r}: expected one of {', '.join(DENSE_PROTOCOLS)}")
    known = {field.name for field in fields(DenseProtocol)} - {"name"}
    if set(changes) - known:
        raise InvalidArgumentError(
            f"change has {', '.join(sorted(set(changes) - known))}: expected some of {', '.join(sorted(known))}"
        )
    if changes.get("steps") is not None:
        changes.setdefault("epochs", None)
    if changes.get("epochs") is not None:
        changes.setdefault("steps", None)
    return replace(DENSE_PROTOCOLS[name], **changes)
