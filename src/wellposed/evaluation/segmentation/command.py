"""`wellposed evaluate segment`: the dense linear probe of a model on a set with masks, in numbers and pictures."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from wellposed.errors import InvalidArgumentError
from wellposed.evaluation.command import Evaluation
from wellposed.evaluation.segmentation.protocols import DenseProtocol, dense_protocol

if TYPE_CHECKING:
    from wellposed.evaluation.backbones import Backbone
    from wellposed.evaluation.segmentation.report import SegmentResult


@dataclass(frozen=True, kw_only=True)
class SegmentConfig(Evaluation["SegmentResult"]):
    """How well a linear head tells the class of every pixel from the frozen features of a model."""

    data: str = ""
    """shapes, or voc, voc-aug, ade20k, coco-stuff, pet, pet-border, camvid or masks with a path as in voc:PATH."""
    protocol: Literal["linear-last", "linear-last4", "dinov2-like", "quick", "patch-grid"] = "linear-last"
    """Fixes all that the number depends on; it is printed with it."""
    change: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Fields of the protocol to change, such as epochs 5 lr 0.01; printed too."""
    out: Path | None = None
    """Folder for results.json, masks.png, report.html and head.safetensors."""
    image_size: int | None = None
    """Pixels a side of what the model sees; the protocol's if None."""
    layers: tuple[int, ...] = (-1,)
    """Blocks to probe, each by itself, or with those before it where the protocol concatenates several; all if none."""
    seed: int = 0
    """Of the head, the order of the batches, and a model without weights."""
    limit: int | None = None
    """At most so many pictures of each split, from all over it."""
    memory_gb: float = 4.0
    """Gigabytes that the training pictures' features may take; else they are computed again in every epoch."""
    on_error: Literal["raise", "skip"] = "raise"
    """End at a picture or mask that cannot be read, or name, count and skip it."""
    examples: int = 8
    """Test pictures to show with their masks."""

    def check(self) -> None:
        """Raise InvalidArgumentError where a value lies outside what it is defined for."""
        super().check()
        if self.examples < 0 or (self.limit is not None and self.limit < 1):
            raise InvalidArgumentError(f"examples={self.examples}, limit={self.limit}: expected at least 0 and 1")
        if dense_protocol(self.protocol, **self.change).augmented and self.cache is not None:
            raise InvalidArgumentError(
                f"cache={self.cache}: {self.protocol} never sees a picture the same way twice, so there is nothing to "
                "keep; leave the cache out, or choose another protocol"
            )

    def opened(self, image_size: int | None = None) -> "Backbone":
        """The model, for images of the size that was asked for or of the protocol's."""
        from wellposed.families import trunk

        backbone = super().opened(image_size)
        size = self.image_size or fitting_size(dense_protocol(self.protocol, **self.change), backbone)
        fits = size == backbone.image_size or trunk(backbone.model).takes_any_size
        return backbone if fits else super().opened(size)

    def evaluate(self, backbone: "Backbone") -> "SegmentResult":
        """Probe each of the layers."""
        from wellposed.data.masks import open_masks
        from wellposed.data.pictures import Readings
        from wellposed.evaluation.segmentation.probe import feature_maps, segment
        from wellposed.evaluation.segmentation.report import SegmentResult
        from wellposed.families import trunk
        from wellposed.runs import provenance

        protocol = dense_protocol(self.protocol, **self.change)
        protocol = replace(protocol, size=self.image_size or fitting_size(protocol, backbone))
        readings = Readings(self.on_error)
        generated = self.image_size if self.data == "shapes" else None
        train, test = (
            open_masks(self.data, split, image_size=generated, readings=readings) for split in ("train", "test")
        )
        if self.limit is not None:
            train, test = train.some(self.limit), test.some(self.limit)
        count = len(trunk(backbone.model).blocks)
        found = {}
        for end in self._ends(count, protocol.blocks):
            found[end] = segment(
                feature_maps(backbone, range(end - protocol.blocks + 1, end + 1)),
                train,
                test,
                protocol,
                seed=self.seed,
                batch_size=self.batch_size,
                memory_gb=self.memory_gb,
                examples=self.examples if self.out is not None else 0,
                readings=readings,
            )
        facts = provenance(backbone.device, seed=self.seed)
        return SegmentResult(backbone.name, backbone.fingerprint, self.data, found, count, facts)

    def evaluate_stored(self, folder: Path) -> "SegmentResult":
        """Probe each of the layers in `folder`."""
        from wellposed.evaluation.segmentation.report import SegmentResult
        from wellposed.evaluation.segmentation.stored import segment_stored
        from wellposed.evaluation.stored import read_patches
        from wellposed.runs import device_named, provenance

        device = device_named(self.device)
        train, test = (read_patches(folder, split, "masks") for split in ("train", "test"))
        found = segment_stored(
            train,
            test,
            dense_protocol(self.protocol, **self.change),
            device=device,
            seed=self.seed,
            batch_size=self.batch_size,
            examples=self.examples if self.out is not None else 0,
        )
        return SegmentResult(self.model, "", self.model, found, len(found), provenance(device, seed=self.seed))

    def _ends(self, count: int, together: int) -> list[int]:
        """The last block of each probe, of a model with `count` blocks."""
        from wellposed.evaluation.features import chosen_layers

        ends = chosen_layers(count, self.layers) if self.layers else list(range(together - 1, count))
        if not ends or min(ends) + 1 < together:
            raise InvalidArgumentError(
                f"layers={self.layers}: {self.protocol} concatenates {together} blocks up to the given one, the model "
                f"has {count}; expected layers from {together - 1} on, or another protocol"
            )
        return ends


def fitting_size(protocol: DenseProtocol, backbone: "Backbone") -> int:
    """The protocol's size, brought up to whole patches; the model's own where the protocol leaves it open."""
    from wellposed.families import trunk

    patch = trunk(backbone.model).patch[0]
    return -(-protocol.size // patch) * patch if protocol.size else backbone.image_size
