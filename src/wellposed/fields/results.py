"""How the fit of a field ended: what it costs and what it gives."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from wellposed.fields.config import FieldConfig
from wellposed.fields.files import WEIGHTS, load
from wellposed.fields.layers import Kind, parameter_count
from wellposed.lowrank import parameter_counts

RESULT, FITTED, TRUTH = "result.json", "fitted.png", "truth.png"
"""Files in the folder of every run that is done: its numbers, and what was made and meant as pictures of one size."""


@dataclass(frozen=True)
class FieldResult:
    """One row of a comparison."""

    kind: Kind
    rank: int | None
    """None for full rank."""
    parameters: int
    full_parameters: int
    """That the same network has at full rank."""
    bytes: int
    """Of the weights file."""
    scores: Mapping[str, float]
    """On all of the data: psnr and ssim, or iou."""
    seconds: float
    """Fitting and testing."""
    out: Path
    """The folder of the run."""

    @classmethod
    def of_run(
        cls, config: FieldConfig, network: nn.Module, scores: Mapping[str, float], seconds: float
    ) -> "FieldResult":
        """The result of a run that has written its weights file."""
        return cls(
            kind=config.kind,
            rank=None if config.kind == "full" else config.rank,
            parameters=parameter_count(network),
            full_parameters=full_parameter_count(network),
            bytes=(config.folder / WEIGHTS).stat().st_size,
            scores=dict(scores),
            seconds=seconds,
            out=config.folder,
        )

    @classmethod
    def read(cls, config: FieldConfig) -> "FieldResult | None":
        """The result of the run in the folder of `config`; None where it has not come to its end."""
        path = config.folder / RESULT
        if not path.is_file():
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        network, _ = load(config.folder)
        return cls.of_run(config, network, {name: found[name] for name in config.scores}, found["seconds"])

    @property
    def name(self) -> str:
        """Kind and rank in words."""
        return "full rank" if self.rank is None else f"{self.kind}, k = {self.rank}"

    def __str__(self) -> str:
        scores = ", ".join(f"{name} {value:.4g}" for name, value in self.scores.items())
        return f"{self.name}: {scores}; {self.parameters:,} parameters in {self.bytes:,} bytes"


def full_parameter_count(network: nn.Module) -> int:
    """Parameters of `network` with full-rank layers in the place of its low-rank ones."""
    return parameter_counts(network).before
