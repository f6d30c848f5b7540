"""What the training loop asks of a task."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from wellposed.data import Loader


@dataclass(frozen=True)
class Remark:
    """What a task has to say about its own numbers: a sentence, and whether the run is lost."""

    text: str
    lost: bool = False


class Task(Protocol):
    """What is trained: a model, its data, and what one step does."""

    loader: Loader

    @property
    def model(self) -> nn.Module:
        """What learns."""
        ...

    @property
    def last_good(self) -> int | None:
        """The step after which its numbers began to look as if the run were lost; None while all is well."""
        ...

    def train_step(self, images: Tensor, targets: Tensor, step: int) -> dict[str, Tensor]:
        """Take step number `step`, counted from 0; "loss" and other numbers to report, on the device, unread."""
        ...

    def learning_rate(self, step: int) -> float:
        """Of step number `step`."""
        ...

    def judge(self, step: int, values: dict[str, float]) -> Remark | None:
        """Look at the numbers reported after `step` steps, the same in every process, and say what is to be said."""
        ...

    def evaluate(self) -> dict[str, float]:
        """What to report at the end of an epoch."""
        ...

    def save_weights(self, folder: Path) -> None:
        """Write the weights that are trained into `folder`."""
        ...

    def save_tested(self, folder: Path) -> None:
        """Write the weights that are tested into `folder`: those above, or their average."""
        ...

    def load_weights(self, folder: Path) -> None:
        """Read what `save_weights` wrote."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything else that the next step depends on."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        ...
