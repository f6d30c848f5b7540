"""Named protocols of the linear probe: all that its number depends on besides the features, printed with it.

"lbfgs": multinomial logistic regression, solved to its optimum, the strength of its penalty chosen on a part of the
training set that is held out. "dino": the schedule of DINO's linear evaluation (arXiv 2104.14294), for sets too large
for whole-batch steps; without its augmentation, which frozen features cannot have.
"""

from dataclasses import dataclass
from typing import Literal

from wellposed.errors import InvalidArgumentError


@dataclass(frozen=True)
class Lbfgs:
    """Full-batch logistic regression: mean cross-entropy + l2 / 2 x the squared norm of the weights, without bias."""

    l2: tuple[float, ...] = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    """Strengths to choose from, as scikit-learn's 1 / (C x samples)."""
    holdout: float = 0.1
    """Share of every class of train on which they are compared; afterwards all of train is used."""
    standardize: bool = True
    """Shift and scale every feature to mean 0 and variance 1 over train."""
    max_iter: int = 1000
    """Steps at most for each strength, to the next hundred."""
    seed: int = 0
    """Of what is held out."""

    def __post_init__(self) -> None:
        if not self.l2 or not all(0 <= strength < float("inf") for strength in self.l2):
            raise InvalidArgumentError(f"l2={self.l2}: expected one or more numbers, at least 0")
        if not 0 < self.holdout < 1 or self.max_iter < 1:
            raise InvalidArgumentError(
                f"holdout={self.holdout}, max_iter={self.max_iter}: expected a share in (0, 1) and at least 1"
            )

    def __str__(self) -> str:
        scaled = "standardized features" if self.standardize else "features as they are"
        strengths = ", ".join(f"{strength:g}" for strength in self.l2)
        chosen = (
            f"l2 of {strengths} chosen on {100 * self.holdout:g} % of train" if len(self.l2) > 1 else f"l2 {strengths}"
        )
        return f"lbfgs: logistic regression on {scaled}, {chosen}"


@dataclass(frozen=True)
class DinoSgd:
    """SGD with momentum 0.9, no weight decay, a learning rate that falls as a cosine, weights from N(0, 0.01^2)."""

    lr: float = 1e-3
    """For 256 samples in a batch; grows with the batch."""
    epochs: int = 100
    batch_size: int = 1024
    """Samples in a step; all of train where it is smaller."""
    seed: int = 0
    """Of the weights and of the order."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf") or self.epochs < 1 or self.batch_size < 1:
            raise InvalidArgumentError(
                f"lr={self.lr}, epochs={self.epochs}, batch_size={self.batch_size}: expected more than 0"
            )

    def __str__(self) -> str:
        return (
            f"dino: SGD for {self.epochs} epochs, batch {self.batch_size}, lr {self.lr:g} x batch / 256, momentum 0.9, "
            "cosine, features as they are, no augmentation"
        )


Protocol = Lbfgs | DinoSgd
PROTOCOLS: dict[str, Protocol] = {"lbfgs": Lbfgs(), "dino": DinoSgd()}
Name = Literal["lbfgs", "dino"]
