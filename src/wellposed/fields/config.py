"""What fitting any field is, as data; image, occupancy and NeRF add their own fields."""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import tyro

from wellposed.training.settings import Settings, require


@dataclass(frozen=True, kw_only=True)
class FieldConfig(Settings):
    """A coordinate network whose hidden layers are full-rank, low-rank or sine low-rank, and how it is fitted."""

    presets: ClassVar[Path] = Path(__file__).parent / "presets"
    name: ClassVar[str] = "field"
    """Of what is fitted: image, occupancy, nerf."""
    scores: ClassVar[tuple[str, ...]] = ()
    """What its evaluation gives, the main one first."""

    data: Annotated[str, tyro.conf.Positional] = ""
    model: Annotated[str, tyro.conf.Suppress] = field(default="", init=False)
    keep_every: Annotated[int, tyro.conf.Suppress] = field(default=0, init=False)
    epochs: Annotated[int, tyro.conf.Suppress] = field(default=1, init=False)

    kind: Literal["full", "low-rank", "sine"] = "sine"
    """Hidden layers: full-rank, low-rank U V^T, or sine low-rank sin(omega U V^T) / g (arXiv 2403.19243)."""
    rank: int = 5
    """k of the low-rank layers."""
    omega: float | Literal["auto"] = "auto"
    """Frequency of the sine layers; with auto, 6 sqrt(in)."""
    width: int = 256
    steps: int = 2000
    """Of Adam; rounded up to a multiple of --tests."""
    tests: int = 10
    """Times that all of the data is evaluated, at equal distances and at the end."""
    lr: float = 1e-3
    """Highest learning rate; it falls to 0 along a cosine."""
    bf16: bool = False
    """Products in bfloat16 (autocast); the sine of a sine layer stays in float32."""
    compile: bool = False
    """torch.compile: worth its minute only for long runs on a GPU."""
    half: bool = False
    """Weights file in float16."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "epochs", max(1, min(self.tests, self.steps)))

    @property
    def steps_per_test(self) -> int:
        """Steps from one evaluation to the next."""
        return math.ceil(self.steps / self.epochs)

    @property
    def label(self) -> str:
        """The layers in a word: "full", "sine-5"."""
        return self.kind if self.kind == "full" else f"{self.kind}-{self.rank}"

    @property
    def layers(self) -> dict[str, Any]:
        """The arguments of a network that say what its layers are."""
        rank = None if self.kind == "full" else self.rank
        return {"width": self.width, "kind": self.kind, "rank": rank, "omega": self.omega}

    @property
    def folder(self) -> Path:
        """`out`, or where the run goes if that is None."""
        return self.out or Path("runs") / f"fit-{self.name}-{Path(self.data).stem}-{self.label}-{self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """Every field that can be given, as JSON holds it."""
        given = {known.name for known in fields(self) if known.init}
        return {name: value for name, value in super().to_dict().items() if name in given}

    def begun(self, given: Collection[str] | None = None) -> Self:
        """The checked configuration to run with; where it resumes, that of the run in `out` with what may differ.

        Args:
            given: the fields that were given here; if None, those that differ from their default.
        """
        config = self.resumed_from(type(self).of_run(self.out), given) if self.resume else self
        config.check()
        return replace(config, out=config.folder)

    def check(self) -> None:
        """Raise InvalidArgumentError where a value lies outside what it is defined for."""
        require(self, "data", self.data, f"a file or a folder, as in wellposed fit {self.name} PATH")
        for name in ("width", "steps", "tests", "log_every"):
            require(self, name, getattr(self, name) >= 1, "at least 1")
        if self.kind != "full":
            require(self, "rank", 1 <= self.rank <= self.width, f"1 to {self.width}, the width")
        require(self, "omega", self.omega == "auto" or 0 < self.omega < math.inf, "auto or a number above 0")
        require(self, "lr", 0 < self.lr < math.inf, "a number above 0")
        require(self, "checkpoint_minutes", 0 <= self.checkpoint_minutes < math.inf, "a finite number, at least 0")
        require(self, "seed", 0 <= self.seed < 2**63, "0 to 2^63 - 1")
        require(self, "device", re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device), "auto, cpu, cuda or cuda:1")
