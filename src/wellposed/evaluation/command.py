"""What the commands of `wellposed evaluate` share: whose features, and where to write what they know."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from wellposed.errors import InvalidArgumentError
from wellposed.runs import writing_to

if TYPE_CHECKING:
    from wellposed.evaluation.backbones import Backbone
    from wellposed.evaluation.curves import Curve

# What the numbers do not depend on, or what is said of the weights by themselves.
_FREE = {
    *("model", "model_args", "checkpoint", "checkpoints", "image_size", "out", "device", "batch_size"),
    *("cache", "workers", "memory_gb", "show", "examples", "on_error"),
}


class Result(Protocol):
    """What an evaluation found; `str` of it is for people."""

    @property
    def values(self) -> Mapping[str, float]:
        """The numbers that make a curve over checkpoints."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON holds it."""
        ...

    def written(self, out: Path) -> Self:
        """Write all of it into the folder `out`."""
        ...


R = TypeVar("R", bound=Result)

ON_DISK = "features:"
# What features on disk have already settled.
_SETTLED = {
    *("data", "split", "count", "limit", "kind", "pool", "layers", "on_error", "workers"),
    *("checkpoint", "checkpoints", "model_args", "image_size", "cache"),
}


@dataclass(frozen=True, kw_only=True)
class Evaluation(ABC, Generic[R]):
    """One way to ask what features know."""

    model: str = ""
    """A timm name, a folder of wellposed's or HuggingFace's, a run or one of its checkpoints; or features:FOLDER."""
    data: str = ""
    """The set."""
    checkpoints: Path | None = None
    """Evaluate every checkpoint in this folder instead, and draw the curve: of a run (best with train --keep-every),
    folders of models, or weights of --model, named by their step."""
    out: Path | None = None
    """Folder to write into."""
    checkpoint: Path | None = None
    """Weights of a timm model, .safetensors or torch's; without, it is looked at as it is initialized."""
    model_args: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Further arguments of timm.create_model, such as img_size 32 patch_size 4."""
    image_size: int | None = None
    """Pixels a side that images are resized to; the model's own if None."""
    layers: tuple[int, ...] = (-1,)
    """Blocks to look at, each by itself: from 0, negative ones from the end; every block if none is named."""
    batch_size: int = 64
    """Images that go through the model together."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    cache: Path | None = None
    """Keep features in this folder, and take from it those that are there."""

    def run(self) -> "R | Curve":
        """Evaluate the model, or every checkpoint, and write what was found where `out` says."""
        if self.model.startswith(ON_DISK):
            return self._stored(Path(self.model.removeprefix(ON_DISK)))
        self.check()
        if self.checkpoints is not None:
            return self._through(self.checkpoints)
        if not self.model:
            raise InvalidArgumentError(
                "model: expected a timm name, a folder with a model or a run; or checkpoints, a folder of them"
            )
        backbone = self.opened()
        self._make_folders()
        return self._written(self.evaluate(self._remembering(backbone)))

    @abstractmethod
    def evaluate(self, backbone: "Backbone") -> R:
        """What the features of `backbone` know."""

    @abstractmethod
    def evaluate_stored(self, folder: Path) -> R:
        """What the features in `folder` know."""

    def check(self) -> None:
        """Raise InvalidArgumentError where a value lies outside what it is defined for."""
        for name in ("batch_size", "image_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgumentError(f"{name}={value}: expected at least 1")
        if not self.data:
            raise InvalidArgumentError("data: expected the name of a set, such as shapes")
        if self.checkpoints is not None and self.checkpoint is not None:
            raise InvalidArgumentError("checkpoint and checkpoints: expected one of them")
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise InvalidArgumentError(f"out={self.out} is a file; expected a folder, or a name that is free")

    def opened(self, image_size: int | None = None) -> "Backbone":
        """The model that `model` names, for images of this size; of that which was asked for if None."""
        from wellposed.evaluation.backbones import open_backbone

        return open_backbone(
            self.model,
            checkpoint=self.checkpoint,
            model_args=self.model_args,
            image_size=image_size or self.image_size,
            device=self.device,
            data=self.data,
            seed=getattr(self, "seed", 0),
        )

    def _stored(self, folder: Path) -> R:
        for one in fields(self):
            default = one.default_factory() if callable(one.default_factory) else one.default
            if one.name in _SETTLED and getattr(self, one.name) != default:
                raise InvalidArgumentError(f"{one.name}: not with {self.model}, which has its own")
        replace(self, data=self.data or ON_DISK).check()
        if not folder.is_dir():
            raise InvalidArgumentError(f"model={self.model}: there is no such folder")
        self._make_folders()
        return self._written(self.evaluate_stored(folder))

    def _make_folders(self) -> None:
        """Before the work, not after it."""
        for folder in (self.out, self.cache):
            if folder is not None:
                with writing_to(folder):
                    folder.mkdir(parents=True, exist_ok=True)

    def _remembering(self, backbone: "Backbone") -> "Backbone":
        """The model, which keeps its patch features where that is asked for."""
        if self.cache is None:
            return backbone
        from wellposed.evaluation.remembering import Remembering

        return Remembering(**vars(backbone), cache=self.cache)

    def _written(self, result: R) -> R:
        return result if self.out is None else result.written(self.out)

    def _through(self, folder: Path) -> "Curve":
        from wellposed.evaluation.cache import folder_fingerprint
        from wellposed.evaluation.curves import draw_curves
        from wellposed.evaluation.through import through_checkpoints
        from wellposed.runs import device_named, provenance

        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _FREE}
        settings = {"command": type(self).__name__, **own, "files": folder_fingerprint(self.data.partition(":")[2])}
        curve = through_checkpoints(
            folder,
            lambda backbone: self.evaluate(self._remembering(backbone)).values,
            out=self.out,
            settings=settings,
            model=self.model or None,
            model_args=self.model_args,
            image_size=self.image_size,
            data=self.data,
            device=self.device,
        )
        if self.out is not None:
            facts = provenance(device_named(self.device), seed=getattr(self, "seed", 0))
            facts["settings"] = ", ".join(f"{name} {value}" for name, value in own.items())
            draw_curves({folder.name: curve}, self.out, facts)
        return curve
