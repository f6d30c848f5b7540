"""A run as data: the flags of a command, the fields of a file, the arguments of a function; what all kinds share."""

import difflib
import json
import math
import re
import tomllib
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from tyro.constructors import PrimitiveConstructorSpec

from wellposed.errors import InvalidArgumentError, RunError

RUN_CONFIG = "config.json"
# Fields in which a run may differ from the one it goes on with: where, how fast and how safely, not what it trains.
FREE = {"data", "out", "resume", "device", "compile", "workers", "checkpoint_minutes", "keep_every", "collapse"}


def _paired(words: list[str]) -> dict[str, bool | int | float | str]:
    """NAME VALUE NAME VALUE ... as a dictionary, values as Python would read them."""
    if len(words) % 2:
        raise ValueError(f"{' '.join(words)!r}: expected pairs such as depth 6 embed_dim 64")
    return {name: _literal(value) for name, value in zip(words[::2], words[1::2], strict=True)}


def _literal(word: str) -> bool | int | float | str:
    for read in (int, float):
        try:
            return read(word)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(word.lower(), word)


ModelArgs = Annotated[
    dict[str, bool | int | float | str],
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="[NAME VALUE ...]",
        instance_from_str=_paired,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [str(word) for pair in value.items() for word in pair],
    ),
]
"""Arguments for timm.create_model; one flag on the command line, whatever its default holds."""

_DECIDED = dict.fromkeys(("in_chans", "num_classes"), "the data") | {
    "img_size": "the data, or --image-size",
    "patch_size": "--patch-size",
    "global_pool": "--pool",
    "pretrained": "this training, which starts from scratch,",
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every training has in common; a kind of training adds its own fields, and may have other defaults."""

    presets: ClassVar[Path]
    """Where the presets of this kind of training lie."""
    prefix: ClassVar[str] = ""
    """What the names of its folders begin with."""

    data: str = "shapes"
    """shapes, digits, cifar10:PATH, cifar100:PATH, pet:PATH or folder:PATH."""
    model: str = "vit_tiny_patch16_224"
    """Name of a timm model; image size, patch size, channels and classes follow the data."""
    skips: bool = True
    """Keep the skip connections, or cut those that --cut names."""
    cut: Literal["both", "attention", "mlp"] = "both"
    """What --no-skips cuts: the skips around attention, those around the MLP, or both."""
    init: Literal["default", "conditioned"] = "default"
    """The model's own initialization, or the conditioned one (arXiv 2510.00345)."""
    gray: Literal["none", "dct", "svd"] = "none"
    """Token Graying of every image's patches (arXiv 2505.01996)."""
    gray_eps: float | None = None
    """Its power, in (0, 1]; the paper's if None: 0.95 for dct, 0.7 for svd."""
    gray_at: Literal["patches", "tokens"] = "patches"
    """What is grayed: the pixels before they are embedded, or the embedded patches."""
    attention: Literal["softmax", "degree-1", "degree-2", "degree-3", "relu", "sigmoid"] = "softmax"
    """What attention applies to its logits: softmax, a power (arXiv 2410.18613), ReLU / n or sigmoid."""
    attention_scale: Literal["fixed", "learned", "none"] = "fixed"
    """Of a power: 1 / sqrt(n) for a row that sees n keys, that with a learned factor for each head, or 1."""
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
    """Compile the model with torch.compile; on one GPU it is replayed as CUDA graphs, which takes more memory."""

    repeatable: bool = True
    """On a GPU, only kernels that give the same bits every time; without, runs are faster and resume up to rounding."""

    patch_size: int | None = None
    """Of a ViT, chosen to give 16 to 256 tokens if None; or of a ConvMixer, its own if None."""
    image_size: int | None = None
    """For sets without a size of their own: shapes (32 if None), pet and folder (224)."""
    pool: Literal["avg", "token"] = "avg"
    """What a ViT's head sees: the mean of the patch tokens, or the class token."""
    model_args: ModelArgs = field(default_factory=dict)
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
    clip: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""

    workers: int = 4
    """Processes that read images of sets which do not fit in memory."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    checkpoint_minutes: float = 10.0
    """A checkpoint is written at the end of each epoch, and when this much time has passed since the last."""
    keep_every: int = 0
    """Epochs between two copies of the tested weights that stay, in kept/, to be evaluated later; 0 keeps none."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for name, value in vars(self).items():
            object.__setattr__(self, name, _fitted(name, value, hints[name]))

    def check(self) -> None:
        """Raise InvalidArgumentError where a number lies outside what it is defined for."""
        for name in ("epochs", "batch_size", "log_every", "precondition_frequency"):
            require(self, name, getattr(self, name) >= 1, "at least 1")
        for name in ("patch_size", "image_size"):
            require(self, name, getattr(self, name) is None or getattr(self, name) >= 1, "at least 1")
        for name in ("lr", "weight_decay", "warmup_epochs", "clip", "workers", "checkpoint_minutes", "seed"):
            require(self, name, 0 <= (getattr(self, name) or 0) < math.inf, "a finite number, at least 0")
        require(self, "keep_every", self.keep_every >= 0, "at least 0")
        require(self, "lr", (self.lr or 0) <= 1e30, "at most 1e30")
        require(self, "betas", all(0 <= beta < 1 for beta in self.betas or ()), "two numbers in [0, 1)")
        require(self, "seed", self.seed < 2**63, "less than 2^63")
        require(self, "device", re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device), "auto, cpu, cuda or cuda:1")
        if self.skips and self.cut != "both":
            raise InvalidArgumentError(f"cut={self.cut!r} with the skips kept: expected it with --no-skips")
        if self.gray == "none" and (self.gray_eps is not None or self.gray_at != "patches"):
            raise InvalidArgumentError("gray_eps and gray_at without graying: expected them with --gray dct or svd")
        require(self, "gray_eps", 0 < (self.gray_eps or 1) <= 1 and self.gray_eps != 0, "a number in (0, 1]")
        if self.attention_scale != "fixed" and not self.attention.startswith("degree"):
            raise InvalidArgumentError(
                f"attention_scale={self.attention_scale!r} with attention={self.attention!r}: expected it with "
                "--attention degree-1, degree-2 or degree-3"
            )
        for name in self.model_args:
            if name in _DECIDED:
                raise InvalidArgumentError(f"model_args has {name!r}, which {_DECIDED[name]} decides; leave it out")

    @property
    def folder(self) -> Path:
        """`out`, or where the run goes if that is None."""
        kind = "skip" if self.skips else "skipless" if self.cut == "both" else f"no-{self.cut}-skip"
        gray = "" if self.gray == "none" else f"-{self.gray}{self.gray_eps or ''}-{self.gray_at}"
        attention = "" if self.attention == "softmax" else f"-{self.attention}"
        attention += "" if self.attention_scale == "fixed" else f"-scale-{self.attention_scale}"
        name = f"{self.data.partition(':')[0]}-{self.model}-{kind}-{self.init}{gray}{attention}-{self.optimizer}"
        return self.out or Path("runs") / f"{self.prefix}{name}-{self.seed}"

    @classmethod
    def load(cls, source: str | Path) -> Self:
        """The configuration in the file `source` (.toml or .json), or the preset of that name."""
        path = cls.presets / f"{source}.toml"
        if not path.is_file():
            path = Path(source)
        try:
            text = path.read_text(encoding="utf-8")
            found = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        except FileNotFoundError as error:
            names = ", ".join(sorted(preset.stem for preset in cls.presets.glob("*.toml")))
            raise InvalidArgumentError(
                f"config={str(source)!r}: neither a file nor one of the presets {names}"
            ) from error
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(f"config={str(source)!r} cannot be read: {error}") from error
        return cls.from_dict(found, str(source))

    @classmethod
    def of_run(cls, out: Path | None) -> Self:
        """The configuration of the run in the folder `out`."""
        if out is None:
            raise RunError("resume: say which run to go on with, as in --resume --out runs/mine")
        path = out / RUN_CONFIG
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8"))["config"], str(path))
        except FileNotFoundError as error:
            raise RunError(f"there is no run in {out} to resume; leave out --resume to start one") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path} cannot be read ({error}); put it back, or start another run") from error

    @classmethod
    def from_dict(cls, found: Any, source: str) -> Self:
        """The configuration that `found`, read from `source`, describes."""
        names = [known.name for known in fields(cls)]
        if isinstance(found, dict) and isinstance(found.get("config"), dict):  # a run's own file
            found = found["config"]
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

    def resumed_from(self, stored: Self, given: Collection[str] | None = None) -> Self:
        """`stored`, with those fields of this one that may differ; another value of any other field is refused.

        Args:
            stored: the configuration of the run to go on with.
            given: the fields that were given here; if None, those that differ from their default.
        """
        default = type(self)()
        if given is None:
            given = [name for name, value in vars(self).items() if value != getattr(default, name)]
        for name in given:
            if name not in FREE and getattr(self, name) != getattr(stored, name):
                raise InvalidArgumentError(
                    f"{name}={getattr(self, name)}: the run in {self.out} was started with {getattr(stored, name)}; "
                    f"resume it without that flag, or start another run in another --out"
                )
        return replace(stored, **{name: getattr(self, name) for name in given if name in FREE})


def require(config: RunConfig, name: str, valid: object, expected: str) -> None:
    """Raise InvalidArgumentError, with what was `expected` of the field `name`, unless it is `valid`."""
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
