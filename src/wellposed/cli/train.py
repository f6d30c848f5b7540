"""wellposed train: supervised training."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated

import tyro

from wellposed.training import TrainConfig


def command(argv: Sequence[str]) -> Callable[..., None]:
    """The command, its flags' defaults being those of the file or preset that `argv` names with --config."""
    sources = [after for flag, after in pairwise(argv) if flag == "--config"]
    sources += [flag.removeprefix("--config=") for flag in argv if flag.startswith("--config=")]
    default = TrainConfig.load(sources[0]) if sources and argv[0] == "train" else TrainConfig()

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

        run(options)

    return train
