"""What the flags of a command that trains default to: the preset, the file or the run that its words name."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from wellposed.training.settings import Settings

Config = TypeVar("Config", bound=Settings)


def named_default(kind: type[Config], command: str, argv: Sequence[str]) -> Config:
    """The settings that `argv` names by --config, or by --resume and --out; the usual ones for another command."""
    words = command.split()
    if list(argv[: len(words)]) != words:
        return kind()
    if "--resume" in argv and (folders := values_of(argv, "--out")):
        return kind.of_run(Path(folders[-1]))
    sources = values_of(argv, "--config")
    return kind.load(sources[-1]) if sources else kind()


def given_fields(options: Config, default: Config) -> list[str] | None:
    """Of a run that goes on because of --resume, the fields that flags have set; else None."""
    if not options.resume or default.resume:
        return None
    given = [name for name, value in vars(options).items() if value != getattr(default, name)]
    return [*given, "out", "resume"]


def values_of(argv: Sequence[str], flag: str) -> list[str]:
    """What follows each `flag` in `argv`, as its own word or after an equals sign."""
    following = [after for word, after in pairwise(argv) if word == flag]
    return following + [word.removeprefix(f"{flag}=") for word in argv if word.startswith(f"{flag}=")]
