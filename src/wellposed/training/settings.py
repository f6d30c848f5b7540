"""The settings of a run as data: read from files and flags, written beside the run, compared when it goes on."""

import difflib
import json
import tomllib
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from wellposed.errors import InvalidArgumentError, RunError

RUN_CONFIG = "config.json"
# Fields in which a run may differ from the one it goes on with: where, how fast and how safely, not what it trains.
FREE = {"data", "out", "resume", "device", "compile", "workers", "checkpoint_minutes", "keep_every", "collapse"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the loop of any run asks for; a kind of run adds its own fields, and may have other defaults."""

    presets: ClassVar[Path]
    """Where the presets of this kind of run lie."""

    data: str | tuple[str, ...] = ""
    model: str = ""
    out: Path | None = None
    """Folder of the run; one under runs/ that says what is trained if None."""
    resume: bool = False
    """Go on with the run in --out, with the settings it was started with."""
    seed: int = 0
    epochs: int = 1
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    repeatable: bool = True
    """On a GPU, only kernels that give the same bits every time; without, runs are faster and resume up to rounding."""
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

    @property
    def folder(self) -> Path:
        """`out`, or where the run goes if that is None."""
        raise NotImplementedError

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
            missing = f"neither a file nor one of the presets {names}" if names else "there is no such file"
            raise InvalidArgumentError(f"config={str(source)!r}: {missing}") from error
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


def require(config: object, name: str, valid: object, expected: str) -> None:
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
        if kind is tuple and isinstance(value, list | tuple):
            arguments = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
            if len(value) != len(arguments):
                continue
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
