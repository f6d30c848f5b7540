"""Softmax against other attention beyond images: ListOps of Long Range Arena, and a causal language model on bytes.

wellposed sequences listops        BERT of width 64 with 3 layers, expressions of up to 64 tokens; CPU, minutes
wellposed sequences text           Llama of width 64 with 3 layers, 64 bytes at a time; CPU, minutes
wellposed sequences listops-full   as long as in Long Range Arena (arXiv 2011.04006), 500 to 2000 tokens; GPU
wellposed sequences text-full      Llama of width 512 with 8 layers, 1024 bytes at a time; GPU
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wellposed.errors import InvalidArgumentError
from wellposed.training import TrainConfig

Attention = Literal["softmax", "degree-1", "degree-2", "degree-3", "relu", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class SequenceRun(TrainConfig):
    """One run: `data` is "listops", read by BERT, or "text", by Llama; its sizes are `model_args`."""

    length: int = 64
    """Tokens of a sequence."""
    examples: int = 1000
    """Expressions to train on."""


@dataclass(frozen=True, kw_only=True)
class SequenceStudy:
    """Train one transformer on sequences, with softmax and with other attention in its place."""

    task: Literal["listops", "text"] = "listops"
    """The value of nested operations on digits, generated; or the next byte of a text."""
    text: Path | None = None
    """A file, or a folder of .txt files; the modules of Python's standard library if None."""
    attentions: tuple[Attention, ...] = ("softmax", "degree-3")
    out: Path = Path("runs/sequences")
    """Folder of the study; type the same command again to go on with one that was interrupted."""
    seed: int = 0
    """The first seed."""
    seeds: int = 1
    """Number of seeds."""
    epochs: int = 6
    batch_size: int = 64
    lr: float = 1e-3
    length: int = 64
    """Tokens of the longest expression, a quarter of it is the shortest; or bytes of a piece of text."""
    examples: int = 10_000
    """Expressions to train on; a tenth as many are tested."""
    width: int = 64
    depth: int = 3
    heads: int = 2
    device: str = "auto"
    compile: bool = False

    def check(self) -> None:
        """Raise InvalidArgumentError where a value lies outside what it is defined for, or would have no effect."""
        for name in ("seeds", "width", "depth", "heads"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.width % (2 * self.heads):
            raise InvalidArgumentError(
                f"width={self.width}, heads={self.heads}: expected a multiple of twice the heads, so that rotary "
                "embeddings find pairs"
            )
        for name, least in (("length", 4), ("examples", 10)):
            if getattr(self, name) < least:
                raise InvalidArgumentError(f"{name}={getattr(self, name)}: expected at least {least}")
        if not self.attentions or len(set(self.attentions)) != len(self.attentions):
            raise InvalidArgumentError(f"attentions={self.attentions}: expected at least one, each once")
        if self.text is not None and self.task != "text":
            raise InvalidArgumentError(f"text={self.text}: --task {self.task} makes no use of it; leave it out")
        for attention, seed in self.cells():
            self.run(attention, seed).check()

    def cells(self) -> Iterator[tuple[Attention, int]]:
        """Every run, one seed after the other."""
        for seed in range(self.seed, self.seed + self.seeds):
            for attention in self.attentions:
                yield attention, seed

    def run(self, attention: Attention, seed: int) -> SequenceRun:
        """What one run trains, and where."""
        sizes: dict[str, bool | int | float | str] = {
            "hidden_size": self.width,
            "intermediate_size": 4 * self.width,
            "num_hidden_layers": self.depth,
            "num_attention_heads": self.heads,
        }
        return SequenceRun(
            data=self.task if self.text is None else f"{self.task}:{self.text}",
            model="bert" if self.task == "listops" else "llama",
            model_args=sizes,
            attention=attention,
            out=self.out / f"{self.task}-{attention}-{seed}",
            seed=seed,
            epochs=self.epochs,
            batch_size=self.batch_size,
            lr=self.lr,
            warmup_epochs=self.epochs / 10,
            betas=(0.9, 0.98),
            weight_decay=0.1,
            label_smoothing=0.0,
            device=self.device,
            compile=self.compile,
            length=self.length,
            examples=self.examples,
        )


CONFIGS: dict[str, SequenceStudy] = {
    "listops": SequenceStudy(out=Path("runs/listops")),
    "text": SequenceStudy(out=Path("runs/text"), task="text", epochs=1, lr=3e-3),
    "listops-full": SequenceStudy(
        out=Path("runs/listops-full"),
        epochs=2,  # 6000 steps; Long Range Arena takes 5000
        batch_size=32,
        lr=1e-4,  # at 5e-4 the cube's attention grew several hundredfold, and what it had learned was lost
        length=2000,
        examples=96_000,
        width=512,
        depth=6,
        heads=8,
        device="cuda",
    ),
    "text-full": SequenceStudy(
        out=Path("runs/text-full"),
        task="text",
        epochs=10,
        batch_size=32,
        lr=6e-4,
        length=1024,
        width=512,
        depth=8,
        heads=8,
        device="cuda",
    ),
}
