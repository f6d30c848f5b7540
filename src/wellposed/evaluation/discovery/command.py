"""`wellposed evaluate discover`: objects found in the pictures of a set, and how often they are the true ones."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wellposed.errors import DataError, InvalidArgumentError
from wellposed.evaluation.command import Evaluation
from wellposed.reporting.text import text_table
from wellposed.runs import provenance

if TYPE_CHECKING:
    from wellposed.evaluation.backbones import Backbone
    from wellposed.evaluation.discovery.finding import Found


@dataclass(frozen=True)
class DiscoverResult:
    """CorLoc of a model's features: the part of the pictures whose one box has an IoU >= 0.5 with a true one."""

    model: str
    data: str
    pictures: int
    """That have an object and could be read; the numbers are over these."""
    without_objects: int
    protocol: str
    corloc: dict[str, float]
    """Of each block."""
    whole_picture: float
    """CorLoc of the box that is the whole picture."""
    middle: float
    """CorLoc of the box in its middle, of its aspect and half its area."""
    milliseconds: float
    """Of `discover` alone, for one picture and one block, within its batch."""
    skipped: tuple[str, ...] = ()
    """What was wrong with each picture that could not be read."""
    facts: dict[str, str] = field(default_factory=dict)
    found: "tuple[Found, ...]" = field(default=(), repr=False, compare=False)
    """What was found in each picture."""
    files: tuple[str, ...] = ()
    """That were written."""

    @property
    def values(self) -> dict[str, float]:
        """CorLoc by block, for a curve over checkpoints."""
        return {f"CorLoc, {block}": value for block, value in self.corloc.items()}

    def to_dict(self) -> dict[str, Any]:
        """All numbers, as JSON holds them."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in {"found", "files"}}

    def written(self, out: Path) -> "DiscoverResult":
        """Write all boxes, and some of the pictures as a sheet and a page, into the folder `out`."""
        from wellposed.evaluation.discovery.sheet import write_found

        return replace(self, files=write_found(out, self, self.found, self.facts))

    def __str__(self) -> str:
        rows = [[f"{block}", f"{value:.3f}"] for block, value in self.corloc.items()]
        rows += [["the whole picture", f"{self.whole_picture:.3f}"], ["its middle", f"{self.middle:.3f}"]]
        lines = [
            f"{self.model} on {self.data}: {self.pictures} pictures",
            f"TokenCut, {self.protocol}",
            text_table(["box from", "CorLoc"], rows),
            f"{self.milliseconds:.1f} ms to cut a picture",
        ]
        if self.without_objects:
            lines.append(f"{self.without_objects} pictures without an object are not counted")
        if self.skipped:
            lines.append(f"{len(self.skipped)} pictures could not be read: {'; '.join(self.skipped[:3])}")
        return "\n".join([*lines, *(f"written: {path}" for path in self.files)])


@dataclass(frozen=True, kw_only=True)
class DiscoverConfig(Evaluation[DiscoverResult]):
    """Objects found by TokenCut (arXiv 2202.11539) in pictures with known boxes, and how many of them are right."""

    data: str = "shapes"
    """shapes, voc:PATH, coco:PATH or pet:PATH."""
    split: str | None = None
    """Part of the set; if None trainval of voc, 20k of coco, test of pet and shapes."""
    count: int | None = None
    """Only the first so many pictures; all if None."""
    tau: float = 0.2
    """Cosine above which two patches are joined."""
    kind: Literal["keys", "tokens"] = "keys"
    """Cut by the keys of the blocks' attention, as the method does, or by the blocks' outputs."""
    image_size: int | None = None
    """Resize pictures to squares of so many pixels. If None they keep their size, as TokenCut has it, and are only
    filled up to whole patches at the right and at the bottom with the mean colour."""
    on_error: Literal["raise", "skip"] = "raise"
    """What to do with a picture or an annotation that cannot be read: end, or name it, count it and go on."""
    out: Path | None = None
    """Folder for discover.json with every box, and discover.png and discover.html with some of the pictures."""
    show: int = 24
    """So many pictures, from all over the set, are on the sheet."""

    def evaluate(self, backbone: "Backbone") -> DiscoverResult:
        """Find an object in every picture, and compare it with the true boxes."""
        from wellposed.data.boxes import open_boxes
        from wellposed.data.pictures import Readings
        from wellposed.evaluation.discovery.finding import objects_in
        from wellposed.evaluation.features import chosen_layers
        from wellposed.families import trunk

        layers = list(dict.fromkeys(chosen_layers(len(trunk(backbone.model).blocks), self.layers or None)))
        data, readings = open_boxes(self.data, self.split, backbone.image_size), Readings(self.on_error)
        found = objects_in(
            data.pictures[: self.count],
            backbone,
            layers,
            kind=self.kind,
            tau=self.tau,
            image_size=self.image_size,
            batch_size=self.batch_size,
            keep=self.show if self.out is not None else 0,
            readings=readings,
        )
        size = f"resized to {self.image_size} px squares" if self.image_size else "pictures at their own size"
        return self._result(
            found,
            [f"block {layer}" for layer in layers],
            model=backbone.name,
            data=data.name,
            protocol=f"{self.kind} of the block, tau {self.tau}, {size}",
            skipped=tuple(readings.problems),
            facts=provenance(backbone.device, seed=0),
        )

    def evaluate_stored(self, folder: Path) -> DiscoverResult:
        """Find an object in every image by the features in `folder`, and compare it with the boxes beside them."""
        from wellposed.evaluation.discovery.finding import objects_stored
        from wellposed.evaluation.stored import read_patches
        from wellposed.runs import device_named

        stored, device = read_patches(folder, "test", "boxes", "size"), device_named(self.device)
        found = objects_stored(
            stored,
            tau=self.tau,
            batch_size=self.batch_size,
            device=device,
            keep=self.show if self.out is not None else 0,
        )
        return self._result(
            found,
            list(stored.layers),
            model=self.model,
            data="its images",
            protocol=f"features as they are stored, tau {self.tau}",
            facts=provenance(device, seed=0),
        )

    def _result(
        self, found: "Sequence[Found]", blocks: Sequence[str], *, protocol: str, **about: Any
    ) -> DiscoverResult:
        import torch

        from wellposed.evaluation.discovery.corloc import corloc
        from wellposed.evaluation.discovery.finding import middle_boxes, whole_boxes

        counted = [one for one in found if len(one.truths)]
        if not counted:
            problems = about.get("skipped", ())
            first = f"; the first of {len(problems)}: {problems[0]}" if problems else ""
            raise DataError(f"no picture of {about['data']} can be read and has an object{first}")
        truths = [one.truths for one in counted]
        return DiscoverResult(
            **about,
            pictures=len(counted),
            without_objects=len(found) - len(counted),
            protocol=f"{protocol}, IoU >= 0.5 with any true box",
            corloc={
                block: corloc(torch.stack([one.boxes[i] for one in counted]), truths) for i, block in enumerate(blocks)
            },
            whole_picture=corloc(whole_boxes(counted), truths),
            middle=corloc(middle_boxes(counted), truths),
            milliseconds=1e3 * sum(one.seconds for one in found) / (len(found) * len(blocks)),
            found=tuple(counted),
        )

    def check(self) -> None:
        """Raise InvalidArgumentError where a value lies outside what it is defined for."""
        super().check()
        for name in ("count", "show"):
            value = getattr(self, name)
            if value is not None and value < (0 if name == "show" else 1):
                raise InvalidArgumentError(f"{name}={value}: expected at least {0 if name == 'show' else 1}")
        if not -1 <= self.tau < 1:
            raise InvalidArgumentError(f"tau={self.tau}: expected a cosine, at least -1 and below 1")
