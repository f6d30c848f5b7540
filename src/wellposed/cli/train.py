"""wellposed train: supervised training."""

from collections.abc import Callable, Sequence
from typing import Annotated

import tyro

from wellposed.cli.runs_named import given_fields, named_default
from wellposed.training import TrainConfig


def command(argv: Sequence[str]) -> Callable[..., None]:
    """The command; its flags default to what the preset, the file or the run that `argv` names has for them."""
    default = named_default(TrainConfig, "train", argv)

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

        run(options, given=given_fields(options, default))

    return train
