"""What the study compares, as data."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wellposed.errors import InvalidArgumentError
from wellposed.training import TrainConfig
from wellposed.training.config import ModelArgs

KINDS = ("skip", "skipless", "conditioned")
NAMES = {
    "skip": "with skips",
    "skipless": "skipless, default initialization",
    "conditioned": "skipless, conditioned initialization",
}
OPTIMIZERS: tuple[Literal["adamw", "soap"], ...] = ("adamw", "soap")


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
    """Train one ViT with skips, without, and without but conditioned, by AdamW and by SOAP, and show the difference."""

    data: str = "digits"
    """digits, shapes, cifar10:PATH, cifar100:PATH or folder:PATH."""
    model: str = "vit_tiny_patch16_224"
    """Name of a timm ViT."""
    model_args: ModelArgs | None = None
    """Arguments of timm.create_model; if None, embed_dim 64 depth 8 num_heads 4 for digits, none for other sets."""
    out: Path = Path("runs/study")
    """Folder of the study; type the same command again to go on with one that was interrupted."""
    seed: int = 0
    """The first seed."""
    seeds: int = 1
    """Number of seeds."""
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

    def check(self) -> None:
        """Raise InvalidArgumentError where a number lies outside what it is defined for."""
        for name in ("seeds", "jobs"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name}={getattr(self, name)}: expected at least 1")
        for cell in self.cells():
            self.run(cell).check()

    def cells(self) -> Iterator[Cell]:
        """Every run, one seed after the other."""
        for seed in range(self.seed, self.seed + self.seeds):
            for optimizer in OPTIMIZERS:
                for kind in KINDS:
                    yield Cell(kind, optimizer, seed)

    def arguments(self) -> dict[str, bool | int | float | str]:
        """What timm.create_model is given beside what follows from the data."""
        if self.model_args is None:
            return {"embed_dim": 64, "depth": 8, "num_heads": 4} if self.data == "digits" else {}
        return self.model_args

    def learning_rate(self, cell: Cell) -> float:
        """That of the cell's kind and optimizer."""
        return float(getattr(self, f"lr_{cell.kind}_{cell.optimizer}"))

    def run(self, cell: Cell) -> TrainConfig:
        """What `cell` trains, and where."""
        return TrainConfig(
            data=self.data,
            model=self.model,
            model_args=self.arguments(),
            skips=cell.kind == "skip",
            init="conditioned" if cell.kind == "conditioned" else "default",
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
        )
