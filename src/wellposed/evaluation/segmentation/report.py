"""What the dense linear probe of a model found: as text, as JSON, as a page with pictures."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wellposed.evaluation.segmentation.probe import Segmentation
from wellposed.evaluation.segmentation.sheets import legend_panel, mask_panels, mask_sheet
from wellposed.reporting import Section, page, text_table
from wellposed.runs import atomic_path, write_json, writing_to

RESULTS, SHEET, PAGE, HEAD = "results.json", "masks.png", "report.html", "head.safetensors"


@dataclass(frozen=True)
class SegmentResult:
    """The probe of each layer."""

    model: str
    fingerprint: str
    data: str
    layers: Mapping[int, Segmentation] | Mapping[str, Segmentation]
    """By the number of the last block that is probed, from 0; of features on disk by name."""
    blocks: int
    """That the model has."""
    facts: Mapping[str, str]

    @property
    def best(self) -> Segmentation:
        """The layer with the highest mIoU."""
        return max(self.layers.values(), key=lambda found: found.agreement.mean_iou)

    @property
    def values(self) -> dict[str, float]:
        """The mIoU by the name of what was probed, for a curve over checkpoints."""
        alone = len(self.layers) == 1
        return {
            "mIoU" if alone else f"mIoU, layer {layer}": found.agreement.mean_iou
            for layer, found in self.layers.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """All numbers, as JSON can hold them."""
        return {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "data": self.data,
            "blocks": self.blocks,
            "layers": [{"layer": layer, **_numbers(found)} for layer, found in self.layers.items()],
            "facts": dict(self.facts),
        }

    def written(self, out: Path) -> "SegmentResult":
        """`write_result`."""
        write_result(self, out)
        return self

    def __str__(self) -> str:
        best = self.best
        rows = [
            [str(layer), *map(_percent, (found.agreement.mean_iou, found.agreement.pixel_accuracy))]
            for layer, found in self.layers.items()
        ]
        rows.append(["commonest class", *map(_percent, (best.baseline.mean_iou, best.baseline.pixel_accuracy))])
        lines = [
            f"{self.model} of {self.blocks} blocks on {self.data}: {best.train_images} pictures to train the head on, "
            f"{best.test_images} to test it",
            "",
            text_table(["layer", "mIoU %", "pixel accuracy %"], rows),
            "",
            text_table(["class", "IoU %"], _class_rows(best)),
            "",
            f"protocol {best.protocol}",
        ]
        if best.skipped:
            lines.append(
                f"skipped {len(best.skipped)} that cannot be read: {'; '.join(best.skipped[:3])}" + _more(best)
            )
        return "\n".join(lines)


def _numbers(found: Segmentation) -> dict[str, Any]:
    each = zip(found.classes, found.agreement.class_iou, strict=True)
    return {
        "mean_iou": found.agreement.mean_iou,
        "pixel_accuracy": found.agreement.pixel_accuracy,
        "classes": [{"name": name, "iou": iou} for name, iou in each],
        "commonest_class": {
            "mean_iou": found.baseline.mean_iou,
            "pixel_accuracy": found.baseline.pixel_accuracy,
        },
        "protocol": asdict(found.protocol),
        "protocol_in_words": str(found.protocol),
        "train_images": found.train_images,
        "test_images": found.test_images,
        "skipped": list(found.skipped),
    }


def _class_rows(found: Segmentation) -> list[list[str]]:
    """A row for each class, - where it occurs in neither truth nor prediction and is left out of the mean."""
    each = zip(found.classes, found.agreement.class_iou, strict=True)
    return [[name, "-" if iou is None else _percent(iou)] for name, iou in each]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _more(found: Segmentation) -> str:
    return f"; and {len(found.skipped) - 3} more" if len(found.skipped) > 3 else ""


def write_result(result: SegmentResult, out: Path) -> None:
    """Write numbers, page, and the head and the pictures of the best layer into the folder `out`."""
    from safetensors.torch import save_file

    best = result.best
    with writing_to(out):
        write_json(out / RESULTS, result.to_dict())
        if best.head is not None:
            with atomic_path(out / HEAD) as file:
                save_file({name: tensor.cpu().contiguous() for name, tensor in best.head.state_dict().items()}, file)
        if best.examples:
            with atomic_path(out / SHEET) as file:
                mask_sheet(best.examples, best.classes).save(file, "PNG", optimize=True)
        with atomic_path(out / PAGE) as file:
            file.write_text(_page(result), encoding="utf-8")


def _page(result: SegmentResult) -> str:
    best = result.best
    lead = (
        f"A linear head on frozen features reaches a mean intersection over union of "
        f"{_percent(best.agreement.mean_iou)} %, and tells "
        f"{_percent(best.agreement.pixel_accuracy)} % of the pixels rightly. The commonest class everywhere would have "
        f"given {_percent(best.baseline.mean_iou)} % and {_percent(best.baseline.pixel_accuracy)} %."
    )
    rows = [
        [str(layer), *map(_percent, (found.agreement.mean_iou, found.agreement.pixel_accuracy))]
        for layer, found in result.layers.items()
    ]
    sections = [
        Section(
            "The protocol",
            "Numbers can be compared under the same protocol only. This one is " + str(best.protocol) + ".",
            columns=("layer", "mIoU %", "pixel accuracy %"),
            rows=rows,
        ),
        Section(
            "Every class",
            "Of the layer with the highest mean. - stands for a class that occurs in neither truth nor prediction, and "
            "is left out of the mean.",
            columns=("class", "IoU %"),
            rows=_class_rows(best),
        ),
    ]
    if best.examples:
        panels = mask_panels(best.examples, best.classes)
        sections += [
            Section("Colours", "Of the classes that occur below.", [legend_panel(best.examples, best.classes)]),
            Section("Pictures, true masks, predicted masks", "From all over the test set.", panels, strip=True),
        ]
    if best.skipped:
        sections.append(Section("What could not be read", f"{len(best.skipped)} in all.", items=best.skipped[:50]))
    return page(f"Segmentation of {result.data.partition(':')[0]} by {result.model}", lead, sections, result.facts)
