"""wellposed train: supervised training."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import tyro

from wellposed.training import TrainConfig


def command(argv: Sequence[str]) -> Callable[..., None]:
    """The command; its flags default to what the preset, the file or the run that `argv` names has for them."""
    resumes = argv[:1] == ["train"] and "--resume" in argv
    default = TrainConfig()
    if argv[:1] == ["train"] and (sources := _values(argv, "--config")):
        default = TrainConfig.load(sources[-1])
    if resumes and (folders := _values(argv, "--out")):
        default = TrainConfig.of_run(Path(folders[-1]))

    def train(
        options: TrainConfig = default,
        config: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE")] = None,
    ) -> None:
        """Train a timm model on labelled images, with or without skip connections.

        Args:
            options: what to train.
            config: a preset or a .toml or .json file of these settings, which flags then override.
        """
        from wellposed.training import train as run

        given = [name for name, value in vars(options).items() if value != getattr(default, name)]
        run(options, given=[*given, "out", "resume"] if resumes else None)

    return train


def _values(argv: Sequence[str], flag: str) -> list[str]:
    """What follows each `flag` in `argv`, as its own word or after an equals sign."""
    following = [after for word, after in pairwise(argv) if word == flag]
    return following + [word.removeprefix(f"{flag}=") for word in argv if word.startswith(f"{flag}=")]
