"""What a study trains, as data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from wellposed.errors import InvalidArgumentError
from wellposed.studies.ablations import ABLATIONS, RANKS, Ablation, Kind, low_rank
from wellposed.training import TrainConfig
from wellposed.training.config import ModelArgs

OPTIMIZERS: tuple[Literal["adamw", "soap"], ...] = ("adamw", "soap")
SMALL: dict[str, dict[str, bool | int | float | str]] = {
    "vit": {"embed_dim": 64, "depth": 8, "num_heads": 4},
    "convmixer": {"dim": 64, "depth": 8, "kernel_size": 3},
}
"""For each family of names, the arguments of a model for digits."""


@dataclass(frozen=True)
class Cell:
    """One run of the study."""

    kind: str
    optimizer: Literal["adamw", "soap"]
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.optimizer}-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """Train one model in several ways, by AdamW and by SOAP, and show the difference."""

    ablation: Literal["conditioning", "skips", "graying", "attention", "low-rank"] = "conditioning"
    """conditioning: with skips, without, without but conditioned. skips: with, without attention's, the MLP's, any.
    graying: the input grayed by SVD and by DCT. attention: softmax, powers, ReLU and sigmoid. low-rank: MLPs of full
    rank, of low rank, and of low rank under a sine. Two more have their own flags:
    --ablation adapters -h and --ablation compression -h."""
    data: str = "digits"
    """digits, shapes, cifar10:PATH, cifar100:PATH or folder:PATH."""
    model: str = "vit_tiny_patch16_224"
    """Name of a timm ViT; for skips also of a ConvMixer, such as convmixer_tiny."""
    model_args: ModelArgs | None = None
    """Of timm.create_model; if None, embed_dim 64 depth 8 num_heads 4 (or dim 64 depth 8 kernel_size 3) for digits."""
    kinds: tuple[str, ...] | None = None
    """Those to compare of skip, skipless, conditioned; of all, no-mlp, no-attention, none; of plain, svd-0.9,
    svd-0.7, svd-0.5, dct-0.95, dct-0.8; of softmax, degree-1, degree-2, degree-3, unscaled, relu, sigmoid,
    skipless, conditioned; or of full, plain-1, sine-1, plain-4 and so on. If None, all it can be."""
    ranks: tuple[int, ...] = RANKS
    """In low-rank: the ranks to compare."""
    omega: float | Literal["auto"] = "auto"
    """In low-rank: the frequency of the sine; 6 sqrt(in) of each matrix with auto."""
    optimizers: tuple[Literal["adamw", "soap"], ...] = OPTIMIZERS
    out: Path = Path("runs/study")
    """Folder of the study; type the same command again to go on with one that was interrupted."""
    seed: int = 0
    """The first seed."""
    seeds: int = 1
    """Number of seeds."""
    more_seeds: ModelArgs = field(default_factory=dict)
    """Exceptions, kinds with more of them, such as softmax 3."""
    epochs: int = 15
    batch_size: int = 64
    device: str = "auto"
    jobs: int = 2
    """Runs side by side, in processes of their own."""
    compile: bool = False
    patch_size: int | None = None
    image_size: int | None = None
    weight_decay: float = 0.3
    alpha: float = 2.0
    beta: float = 0.6
    c: float = 3.0
    lr_skip_adamw: float = 1e-3
    lr_skipless_adamw: float = 1e-3
    lr_conditioned_adamw: float = 1e-3
    lr_skip_soap: float = 3e-3
    lr_skipless_soap: float = 3e-3
    lr_conditioned_soap: float = 3e-3
    lr_adamw: float = 1e-3
    """In the other ablations: of all that AdamW trains."""
    lr_soap: float = 3e-3
    rates: ModelArgs = field(default_factory=dict)
    """In the other ablations: exceptions, such as no-attention-soap 1e-3."""

    @property
    def described(self) -> Ablation:
        """What the ablation's name stands for."""
        return low_rank(self.ranks) if self.ablation == "low-rank" else ABLATIONS[self.ablation]

    @property
    def compared(self) -> tuple[Kind, ...]:
        """The kinds of model that are trained, in the order of the table."""
        return tuple(kind for kind in self.described.kinds if self.kinds is None or kind.key in self.kinds)

    def check(self) -> None:
        """Raise InvalidArgumentError where a value lies outside what it is defined for, or would have no effect."""
        if self.ablation not in ABLATIONS:
            raise InvalidArgumentError(f"ablation={self.ablation!r}: expected one of {', '.join(ABLATIONS)}")
        for name in ("seeds", "jobs"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name}={getattr(self, name)}: expected at least 1")
        if not self.ranks or len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 1:
            raise InvalidArgumentError(f"ranks={self.ranks}: expected whole numbers from 1, each once")
        _require_some("kinds", self.kinds, [kind.key for kind in self.described.kinds])
        _require_some("optimizers", self.optimizers, OPTIMIZERS)
        for name, default in self.unused().items():
            if getattr(self, name) != default:
                raise InvalidArgumentError(
                    f"{name}={getattr(self, name)}: --ablation {self.ablation} makes no use of it; leave it out"
                )
        for name, count in self.more_seeds.items():
            if name not in [kind.key for kind in self.compared] or type(count) is not int or count < self.seeds:
                raise InvalidArgumentError(
                    f"more_seeds has {name} {count}: expected a number of seeds, at least {self.seeds}, for one of "
                    f"{', '.join(kind.key for kind in self.compared)}"
                )
        known = [f"{kind.key}-{optimizer}" for kind in self.described.kinds for optimizer in OPTIMIZERS]
        for name, rate in self.rates.items():
            if name not in known or isinstance(rate, bool | str):
                raise InvalidArgumentError(f"rates has {name} {rate}: expected a number for one of {', '.join(known)}")
        for cell in self.cells():
            self.run(cell).check()

    def unused(self) -> dict[str, Any]:
        """The fields of other ablations that have no effect in this one, each with its default."""
        idle = frozenset[str]().union(*(ablation.uses for ablation in ABLATIONS.values())) - self.described.uses
        default = type(self)()
        return {known.name: getattr(default, known.name) for known in fields(self) if known.name in idle}

    def cells(self) -> Iterator[Cell]:
        """Every run, one seed after the other."""
        of_each = {kind.key: int(self.more_seeds.get(kind.key, self.seeds)) for kind in self.compared}
        for past in range(max(of_each.values())):
            for optimizer in self.optimizers:
                for kind, count in of_each.items():
                    if past < count:
                        yield Cell(kind, optimizer, self.seed + past)

    def arguments(self) -> dict[str, bool | int | float | str]:
        """What timm.create_model is given beside what follows from the data."""
        if self.model_args is None:
            return SMALL.get(self.model.partition("_")[0], SMALL["vit"]) if self.data == "digits" else {}
        return self.model_args

    def learning_rate(self, cell: Cell) -> float:
        """That of the cell's kind and optimizer."""
        own = f"lr_{cell.kind}_{cell.optimizer}"
        usual = getattr(self, own if own in self.described.uses else f"lr_{cell.optimizer}")
        return float(self.rates.get(f"{cell.kind}-{cell.optimizer}", usual))

    def run(self, cell: Cell) -> TrainConfig:
        """What `cell` trains, and where."""
        return TrainConfig(
            data=self.data,
            model=self.model,
            model_args=self.arguments(),
            optimizer=cell.optimizer,
            out=self.out / "runs" / str(cell),
            seed=cell.seed,
            epochs=self.epochs,
            batch_size=self.batch_size,
            lr=self.learning_rate(cell),
            weight_decay=self.weight_decay,
            device=self.device,
            compile=self.compile,
            patch_size=self.patch_size,
            image_size=self.image_size,
            alpha=self.alpha,
            beta=self.beta,
            c=self.c,
            low_rank_omega=self.omega if cell.kind.startswith("sine-") else "auto",
            **self.described.kind(cell.kind).settings,
        )


def _require_some(name: str, given: tuple[str, ...] | None, allowed: Sequence[str]) -> None:
    if given is not None and not (given and len(set(given)) == len(given) and set(given) <= set(allowed)):
        raise InvalidArgumentError(f"{name}={' '.join(given)!r}: expected some of {', '.join(allowed)}, each once")
