"""Softmax against other attention on sequences: the runs of a `SequenceStudy`, and how they ended."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import log
from typing import Any

import torch
from torch import nn

from wellposed.data.images import ImageSet
from wellposed.data.sequences import listops_set, text_set
from wellposed.diagnosis import attention_seen
from wellposed.errors import DivergedError, InvalidArgumentError
from wellposed.runs import read_journal, write_json, writing_to
from wellposed.studies.sequence_config import SequenceRun, SequenceStudy
from wellposed.studies.sequence_task import SequenceTask, read
from wellposed.training.guards import flushed_denormals
from wellposed.training.running import carry_out, described_model, described_place
from wellposed.training.settings import RUN_CONFIG

LOOKED_AT = 16
"""Test sequences on which the norm of attention is taken."""


@dataclass(frozen=True)
class SequenceOutcome:
    """How a run ended; without numbers where it diverged."""

    attention: str
    seed: int
    accuracy: float | None = None
    loss: float | None = None
    norms: tuple[float, float] | None = None
    """Mean Frobenius norm of the attention of all heads, before the first step and at the end."""

    def row(self, task: str) -> tuple[str, ...]:
        """As the table shows it."""
        if self.accuracy is None or self.loss is None or self.norms is None:
            return self.attention, str(self.seed), "diverged", "", ""
        loss = f"{self.loss / log(2):.3f} bits per byte" if task == "text" else f"{self.loss:.3f}"
        norms = " to ".join(f"{norm:.3g}" for norm in self.norms)
        return self.attention, str(self.seed), f"{100 * self.accuracy:.1f}", loss, norms


def sequences(config: SequenceStudy) -> list[SequenceOutcome]:
    """Train every run of `config`, or those that are missing, and write outcomes.json with all of them.

    Each is a folder as `wellposed.train` makes it; its metrics hold the norm of attention in every block before the
    first step and after each epoch, as "observe" events.

    Raises:
        InvalidArgumentError, DataError: something in `config` cannot be, or is not what the folder was made with.
        KeyboardInterrupt: after the run has written a checkpoint; the same call goes on.
    """
    config.check()
    train, test = _sets(config)
    with flushed_denormals():
        runs = [config.run(attention, seed) for attention, seed in config.cells()]
        outcomes = [_outcome(run, train, test) for run in runs]
    with writing_to(config.out):
        write_json(config.out / "outcomes.json", [asdict(outcome) for outcome in outcomes])
    return outcomes


def _sets(config: SequenceStudy) -> tuple[ImageSet, ImageSet]:
    if config.task == "listops":
        sizes = (config.examples, config.examples // 10)
        train, test = (listops_set(size, config.length, seed) for seed, size in enumerate(sizes))
    else:
        train, test = (text_set(config.text, config.length, split) for split in ("train", "test"))
    if config.batch_size > len(train):
        raise InvalidArgumentError(
            f"batch_size={config.batch_size}: expected at most {len(train)}, the size of the set"
        )
    return train, test


def _outcome(run: SequenceRun, train: ImageSet, test: ImageSet) -> SequenceOutcome:
    result = run.folder / "result.json"
    if (run.folder / RUN_CONFIG).exists():
        run = replace(run, resume=True).resumed_from(SequenceRun.of_run(run.folder), given=list(vars(run)))
    if not result.exists():
        try:
            carry_out(
                *(run, train, lambda place: SequenceTask(run, train, test, place)),
                lambda task, place: f"{described_model(run, task.model)}; {described_place(run, task, place)}",
                quiet=False,
                observe=_norms_on(run.data, test),
            )
        except DivergedError:
            return SequenceOutcome(run.attention, run.seed)
    numbers = json.loads(result.read_text(encoding="utf-8"))
    seen = [event["attention_norms"] for event in read_journal(run.folder, "observe")]
    first, last = (sum(norms) / len(norms) for norms in (seen[0], seen[-1]))
    return SequenceOutcome(run.attention, run.seed, numbers["accuracy"], numbers["loss"], (first, last))


def _norms_on(task: str, test: ImageSet) -> Callable[[nn.Module], dict[str, Any]]:
    """What gives the mean Frobenius norm of the attention matrices of every block on some test sequences."""
    tokens = test.images[:LOOKED_AT].flatten(1).long()

    def look(model: nn.Module) -> dict[str, Any]:
        with (
            torch.no_grad(),
            attention_seen(model, lambda a: float(torch.linalg.matrix_norm(a.float()).mean())) as seen,
        ):
            read(model, tokens.to(next(model.parameters()).device), task)
        return {"attention_norms": seen}

    return look
