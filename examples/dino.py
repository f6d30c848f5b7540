r"""DINO with skips and without, under AdamW and SOAP, with graying: what each model's features know (results/dino.md).

    python examples/dino.py --data cifar10:PATH --dense pet:PATH shapes --out runs/dino-cifar10
    python examples/dino.py --config pets-vit-tiny --adamw-lr 1e-3 --soap-lr 2e-3 --data pet:PATH \
        --dense pet:PATH shapes --out runs/dino-pets

It does what these commands do, for each of the models, and puts their numbers side by side in OUT/dino.md:

    wellposed pretrain --config CONFIG --data DATA --no-skips --init conditioned --optimizer soap --keep-every N
    wellposed evaluate knn --model RUN --data DATA --layers
    wellposed evaluate segment --model RUN --data SET --protocol quick --layers      for each set of --dense
    wellposed evaluate discover --model RUN --data SET --layers
    wellposed evaluate knn --checkpoints RUN --data DATA                              and discover: through pretraining
    wellposed evaluate pca --model SKIPLESS --other SKIP --data SET

What is done already stays: interrupted, the same command goes on. On a large GPU start it once for each model, with
--models NAME and the same --out, side by side, and then once for all of them. A run that collapses is said to have, and
is not evaluated.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

import wellposed as wp
from wellposed.bench.table import Table
from wellposed.errors import DivergedError, InvalidArgumentError
from wellposed.evaluation.classification.command import KnnConfig
from wellposed.evaluation.curves import Curve, draw_curves
from wellposed.evaluation.discovery.command import DiscoverConfig, DiscoverResult
from wellposed.evaluation.pictures.command import PcaConfig
from wellposed.evaluation.segmentation.command import SegmentConfig
from wellposed.runs import device_named, provenance, write_json

MODELS: dict[str, dict[str, Any]] = {
    "skip-adamw": {"skips": True, "init": "default", "optimizer": "adamw"},
    "skipless-adamw": {"skips": False, "init": "conditioned", "optimizer": "adamw"},
    "skip-soap": {"skips": True, "init": "default", "optimizer": "soap"},
    "skipless-soap": {"skips": False, "init": "conditioned", "optimizer": "soap"},
    "gray-svd-adamw": {"skips": True, "init": "default", "optimizer": "adamw", "gray": "svd"},
    "gray-dct-adamw": {"skips": True, "init": "default", "optimizer": "adamw", "gray": "dct"},
}
Values = Mapping[str, float]
UNSEEN = ("the whole picture", "its middle")
"""Boxes of which one needs to know no more than the size of the picture."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is pretrained, and what its features are asked."""

    data: str
    """Pretrain on this set, whose classes k-NN then tells: cifar10:PATH, pet:PATH, shapes, ..."""
    dense: tuple[str, ...] = ("shapes",)
    """Sets with masks and boxes for the dense probe and for discovery: pet:PATH, shapes."""
    config: str = "cifar10-vit-tiny"
    """A preset of `wellposed pretrain`, or a file."""
    models: tuple[str, ...] = tuple(name for name, choices in MODELS.items() if "gray" not in choices)
    """Which of the models; gray-svd-adamw and gray-dct-adamw have skips and grayed patches."""
    adamw_lr: float = 5e-4
    """For 256 images."""
    soap_lr: float = 1e-3
    """Likewise."""
    epochs: int | None = None
    """The preset's if None."""
    points: int = 6
    """Checkpoints of each run that are evaluated for the curve through pretraining, besides the first."""
    dense_size: int = 96
    """Pixels a side of the pictures of the dense sets."""
    limit: int | None = None
    """At most so many pictures of each dense set."""
    seed: int = 0
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    out: Path = Path("runs/dino")
    """Folder of everything: a run for each model, curves, pictures, and dino.md."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.models if name not in MODELS]
        if unknown or not self.models:
            raise InvalidArgumentError(f"models={self.models}: expected some of {', '.join(MODELS)}")


def main(evidence: Evidence) -> Path:
    """Pretrain, evaluate and write OUT/dino.md, whose path is returned."""
    numbers = _Numbers(evidence.out, evidence.models)
    for name in evidence.models:
        numbers.once(name, "run", lambda name=name: _pretrained(evidence, name))
    alive = [name for name in evidence.models if "seconds" in numbers.known[name]["run"]]
    curves: dict[str, dict[str, Curve]] = {}
    for name in alive:
        run = evidence.out / name
        for what, ask in _questions(evidence, str(run)).items():
            numbers.once(name, what, lambda ask=ask: _answer(ask.run()))
        for what, ask in _through(evidence, run).items():
            curves.setdefault(what, {})[name] = ask.run()
    facts = provenance(device_named(evidence.device), seed=evidence.seed)
    facts["command"] = f"python examples/dino.py {facts['command'].removeprefix('wellposed ')}"
    for what, by_model in curves.items():
        draw_curves(by_model, evidence.out / what, facts, f"{what.partition('-')[0]} through pretraining")
    for optimizer in ("adamw", "soap"):
        if {f"skip-{optimizer}", f"skipless-{optimizer}"} <= set(alive):
            _side_by_side(evidence, optimizer)
    page = evidence.out / "dino.md"
    page.write_text("\n".join(table.markdown() for table in _tables(evidence, numbers.known, facts)), encoding="utf-8")
    return page


class _Numbers:
    """What is known of each model, kept in a file of its own from one call to the next."""

    def __init__(self, folder: Path, models: Sequence[str]) -> None:
        self._paths = {name: folder / f"{name}.json" for name in models}
        self.known: dict[str, dict[str, dict[str, Any]]] = {
            name: json.loads(path.read_text()) if path.exists() else {} for name, path in self._paths.items()
        }

    def once(self, model: str, what: str, find: Callable[[], dict[str, Any]]) -> None:
        if what not in self.known[model]:
            print(f"{model}: {what}", file=sys.stderr)
            self.known[model][what] = find()
            self._paths[model].parent.mkdir(parents=True, exist_ok=True)
            write_json(self._paths[model], self.known[model])


def _pretrained(evidence: Evidence, name: str) -> dict[str, Any]:
    preset, choices = wp.DinoConfig.load(evidence.config), MODELS[name]
    epochs = evidence.epochs or preset.epochs
    config = replace(
        preset,
        **choices,
        lr=evidence.soap_lr if choices["optimizer"] == "soap" else evidence.adamw_lr,
        data=evidence.data,
        epochs=epochs,
        warmup_epochs=min(preset.warmup_epochs, epochs / 10),
        seed=evidence.seed,
        keep_every=max(1, epochs // evidence.points),
        device=evidence.device,
        out=evidence.out / name,
        resume=(evidence.out / name / "config.json").exists(),
    )
    try:
        result = wp.pretrain(config)
    except DivergedError as error:
        return {"complaint": str(error)}
    return {"seconds": result.seconds}


def _questions(evidence: Evidence, run: str) -> dict[str, Any]:
    """What every block of the model is asked, by name."""
    shared = {"model": run, "layers": (), "device": evidence.device}
    dense = shared | {"image_size": evidence.dense_size}
    asked: dict[str, Any] = {"k-NN top-1": KnnConfig(**shared, data=evidence.data)}
    for spec in evidence.dense:
        name = spec.partition(":")[0]
        asked[f"mIoU on {name}"] = SegmentConfig(**dense, data=spec, protocol="quick", limit=evidence.limit)
        asked[f"CorLoc on {name}"] = DiscoverConfig(**dense, data=spec, count=evidence.limit)
    return asked


def _answer(result: Any) -> dict[str, float]:
    """What each block knows; and for boxes, what one knows without having looked."""
    known = dict(result.values)
    if isinstance(result, DiscoverResult):
        known |= dict(zip(UNSEEN, (result.whole_picture, result.middle), strict=True))
    return known


def _through(evidence: Evidence, run: Path) -> dict[str, Any]:
    """What the last block of every checkpoint is asked."""
    shared = {"checkpoints": run, "device": evidence.device}
    spec, size = evidence.dense[0], evidence.dense_size
    return {
        "knn-curve": KnnConfig(**shared, data=evidence.data, out=run / "knn-curve"),
        "discover-curve": DiscoverConfig(
            **shared, data=spec, image_size=size, count=evidence.limit, show=0, out=run / "discover-curve"
        ),
    }


def _side_by_side(evidence: Evidence, optimizer: str) -> None:
    PcaConfig(
        model=str(evidence.out / f"skipless-{optimizer}"),
        other=str(evidence.out / f"skip-{optimizer}"),
        data=evidence.dense[0],
        image_size=evidence.dense_size,
        device=evidence.device,
        out=evidence.out / f"pca-{optimizer}",
    ).run()


def _tables(evidence: Evidence, known: dict[str, dict[str, dict[str, Any]]], facts: dict[str, str]) -> list[Table]:
    """How the runs went, then one table for each measure, with a row for each block."""
    ended = tuple(
        (name, *((f"{run['seconds']:.0f}", "") if "seconds" in run else ("", run["complaint"])))
        for name in evidence.models
        if (run := known[name]["run"])
    )
    set_name = evidence.data.partition(":")[0]
    tables = [Table(f"DINO on {set_name}: {evidence.config}", ("model", "seconds", "complaint"), ended, facts)]
    alive = [name for name in evidence.models if "seconds" in known[name]["run"]]
    measures = [what for what in (known[alive[0]] if alive else ()) if what != "run"]
    for what in measures:
        by_model = {name: known[name][what] for name in alive}
        blocks = [[value for row, value in values.items() if row not in UNSEEN] for values in by_model.values()]
        rows = [
            (str(block), *(f"{100 * value:.1f}" for value in values))
            for block, values in enumerate(zip(*blocks, strict=True))
        ]
        for box in UNSEEN:
            if all(box in values for values in by_model.values()):
                rows.append((box, *(f"{100 * values[box]:.1f}" for values in by_model.values())))
        best = ("best block", *(f"{100 * max(values):.1f}" for values in blocks))
        tables.append(Table(f"{what}, %", ("block", *by_model), (*rows, best), {}))
    return tables


if __name__ == "__main__":
    print(main(tyro.cli(Evidence)))
