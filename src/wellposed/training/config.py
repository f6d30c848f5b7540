"""What a supervised run is, as data: the flags of `wellposed train`, the fields of a file, the arguments of `train`."""

import difflib
import json
import tomllib
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from wellposed.errors import InvalidArgumentError

PRESETS = Path(__file__).parent / "presets"
# Fields in which a run may differ from the one it goes on with: they do not change its numbers.
_FREE = {"out", "resume", "device", "compile", "workers", "checkpoint_minutes"}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Supervised training of a timm model, with or without skips."""

    data: str = "shapes"
    """shapes, digits, cifar10:PATH, cifar100:PATH or folder:PATH."""
    model: str = "vit_tiny_patch16_224"
    """Name of a timm model; image size, patch size, channels and classes follow the data."""
    skips: bool = True
    """Keep the skip connections, or cut them all."""
    init: Literal["default", "conditioned"] = "default"
    """The model's own initialization, or the conditioned one (arXiv 2510.00345)."""
    optimizer: Literal["adamw", "soap", "muon"] = "adamw"

    out: Path | None = None
    """Folder of the run; one under runs/ that says what is trained if None."""
    resume: bool = False
    """Go on with the run in --out, with the settings it was started with."""
    seed: int = 0
    epochs: int = 20
    batch_size: int = 256
    """Images in a step of all processes together."""
    lr: float | None = None
    """Highest learning rate; 1e-3 for adamw, 3e-3 for soap and muon if None."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 autocast, or float32 throughout; auto is bf16 on GPUs that have it."""
    compile: bool = False
    """Compile the model with torch.compile."""

    repeatable: bool = True
    """On a GPU, only kernels that give the same bits every time; without, runs are faster and resume up to rounding."""

    patch_size: int | None = None
    """Of a ViT; chosen to give 16 to 256 tokens if None."""
    image_size: int | None = None
    """For sets without a size of their own: shapes (32 if None) and folder (224)."""
    pool: Literal["avg", "token"] = "avg"
    """What a ViT's head sees: the mean of the patch tokens, or the class token."""
    model_args: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Further arguments of timm.create_model, such as depth 6 embed_dim 64 num_heads 4."""
    alpha: float = 2.0
    """Weight of the random part of W_Q W_K^T in the conditioned initialization."""
    beta: float = 0.6
    """Weight of the identity in it."""
    c: float = 3.0
    """Scale of W_V and of W_O."""

    weight_decay: float = 0.3
    betas: tuple[float, float] | None = None
    """The optimizer's own if None: (0.9, 0.999) for adamw, (0.95, 0.95) for soap, (0.9, 0.95) for muon."""
    precondition_frequency: int = 10
    """SOAP: steps between two refreshes of its bases."""
    max_precond_dim: int = 10000
    """SOAP: dimensions larger than this are not rotated."""
    soap_tf32: bool = False
    """SOAP: rotate in TF32."""
    soap_spread: bool = False
    """SOAP: refresh a part of the bases at each step."""
    warmup_epochs: float = 1.0
    label_smoothing: float = 0.1
    clip: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""
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

    workers: int = 4
    """Processes that read images of sets which do not fit in memory."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    checkpoint_minutes: float = 10.0
    """A checkpoint is written at the end of each epoch, and when this much time has passed since the last."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for name, value in vars(self).items():
            object.__setattr__(self, name, _fitted(name, value, hints[name]))

    def check(self) -> None:
        """Raise InvalidArgumentError where a number lies outside what it is defined for."""
        for name in ("epochs", "batch_size", "log_every", "precondition_frequency"):
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        for name in ("patch_size", "image_size"):
            _require(self, name, getattr(self, name) is None or getattr(self, name) >= 1, "at least 1")
        for name in ("lr", "weight_decay", "warmup_epochs", "clip", "workers", "checkpoint_minutes", "seed"):
            _require(self, name, getattr(self, name) is None or getattr(self, name) >= 0, "at least 0")
        for name in ("label_smoothing", "ema"):
            _require(self, name, 0 <= getattr(self, name) < 1, "a number in [0, 1)")
        for name in ("geometry", "colour", "erase", "mixup", "cutmix"):
            _require(self, name, 0 <= getattr(self, name) <= 1, "a number in [0, 1]")
        _require(self, "seed", self.seed < 2**63, "less than 2^63")

    @property
    def folder(self) -> Path:
        """`out`, or where the run goes if that is None."""
        kind = "skip" if self.skips else "skipless"
        name = f"{self.data.partition(':')[0]}-{self.model}-{kind}-{self.init}-{self.optimizer}-{self.seed}"
        return self.out or Path("runs") / name

    @classmethod
    def load(cls, source: str | Path) -> Self:
        """The configuration in the file `source` (.toml or .json), or the preset of that name."""
        path = PRESETS / f"{source}.toml"
        if not path.is_file():
            path = Path(source)
        try:
            text = path.read_text(encoding="utf-8")
            found = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        except FileNotFoundError as error:
            names = ", ".join(sorted(preset.stem for preset in PRESETS.glob("*.toml")))
            raise InvalidArgumentError(
                f"config={str(source)!r}: neither a file nor one of the presets {names}"
            ) from error
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(f"config={str(source)!r} cannot be read: {error}") from error
        return cls.from_dict(found, str(source))

    @classmethod
    def from_dict(cls, found: Any, source: str) -> Self:
        """The configuration that `found`, read from `source`, describes."""
        names = [known.name for known in fields(cls)]
        if not isinstance(found, dict):
            raise InvalidArgumentError(f"{source} holds a {type(found).__name__}, expected fields such as epochs = 20")
        for name in found:
            if name not in names:
                close = difflib.get_close_matches(str(name), names, n=1)
                advice = f"did you mean {close[0]!r}?" if close else f"expected some of {', '.join(names)}"
                raise InvalidArgumentError(f"{source} has an unknown field {name!r}; {advice}")
        return cls(**found)

    def to_dict(self) -> dict[str, Any]:
        """Every field, as JSON holds it."""
        return json.loads(json.dumps(asdict(self), default=str))

    def resumed_from(self, stored: Self) -> Self:
        """`stored`, with the fields of this one that do not change a run's numbers.

        Fields left at their default mean those of the run; another value than the run's is refused.
        """
        default = type(self)()
        given = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        for name, value in given.items():
            if name not in _FREE and value != getattr(stored, name):
                raise InvalidArgumentError(
                    f"{name}={value}: the run in {self.out} was started with {getattr(stored, name)}; "
                    f"resume it without that flag, or start another run in another --out"
                )
        return replace(stored, **{name: value for name, value in given.items() if name in _FREE})


def _require(config: TrainConfig, name: str, valid: bool, expected: str) -> None:
    if not valid:
        raise InvalidArgumentError(f"{name}={getattr(config, name)!r}: expected {expected}")


def _fitted(name: str, value: Any, hint: Any) -> Any:
    """`value` as a field of type `hint` takes it, whether it comes from Python, JSON, TOML or the command line."""
    choices = get_args(hint) if get_origin(hint) in {Union, UnionType} else (hint,)
    for choice in choices:
        kind, arguments = get_origin(choice) or choice, get_args(choice)
        if kind is Literal and value in arguments:
            return value
        if kind is Path and isinstance(value, str | Path):
            return Path(value)
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if kind is int and isinstance(value, bool):
            continue
        if kind is tuple and isinstance(value, list | tuple) and len(value) == len(arguments):
            return tuple(_fitted(name, item, kind) for item, kind in zip(value, arguments, strict=True))
        if kind is dict and isinstance(value, dict):
            return {str(key): _fitted(f"{name}[{key!r}]", item, arguments[1]) for key, item in value.items()}
        if isinstance(kind, type) and kind not in {tuple, dict} and isinstance(value, kind):
            return value
    raise InvalidArgumentError(f"{name}={value!r}: expected {_described(hint)}")


def _described(hint: Any) -> str:
    if get_origin(hint) in {Union, UnionType}:
        return " or ".join(_described(choice) for choice in get_args(hint))
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    return "None" if hint is type(None) else getattr(hint, "__name__", str(hint)) if not get_args(hint) else str(hint)
