"""The recipe of a model: every change made to it, as JSON-able entries that can be made again.

Changes keep a model's state-dict keys, so weights trained under one recipe would load without a word into a model
with another. The entries are read off the model as it is, not logged, so they cannot drift from it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from wellposed.attention.replacing import read_attention, replay_attention
from wellposed.errors import ModelFileError, RecipeMismatchError, WellposedError
from wellposed.families import unwrapped
from wellposed.graying.tokens import gray_tokens, read_grayings
from wellposed.lowrank.factorize import read_factorizations, replay_factorization
from wellposed.skipless.conditioning import forget_conditioning, note_conditioning, read_conditioning
from wellposed.skipless.skips import cut_skips, read_cuts

Entry = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """One kind of change: how it is read off a model, and how it is made on a fresh one whose weights come later."""

    read: Callable[[nn.Module], list[Entry]]
    replay: Callable[..., Any]
    changes_forward: bool
    """Whether weights mean something else under this change; if not, it only tells where they came from."""


CHANGES = {
    "cut_skips": Change(read_cuts, cut_skips, changes_forward=True),
    "gray_tokens": Change(read_grayings, gray_tokens, changes_forward=True),
    "factorize": Change(read_factorizations, replay_factorization, changes_forward=True),
    "use_attention": Change(read_attention, replay_attention, changes_forward=True),
    "condition_": Change(read_conditioning, note_conditioning, changes_forward=False),
}


def recipe(model: nn.Module) -> list[Entry]:
    """Every change made to `model`, one JSON-able entry each; empty for a model nobody changed.

    Example:
        >>> import timm, wellposed as wp
        >>> wp.recipe(wp.cut_skips(timm.create_model("vit_tiny_patch16_224", depth=1)))
        [{'change': 'cut_skips', 'attention': True, 'mlp': True}]
    """
    model = unwrapped(model)
    return [{"change": name, **arguments} for name, change in CHANGES.items() for arguments in change.read(model)]


def replay(model: nn.Module, entries: list[Entry]) -> None:
    """Make the changes of `entries` on `model`, in place; initializations are noted, for the weights carry them."""
    for entry in entries:
        change, arguments = _parsed(entry)
        try:
            change.replay(model, **arguments)
        except (TypeError, AttributeError, WellposedError) as error:
            raise ModelFileError(f"the recipe entry {entry!r} does not fit {type(model).__name__}: {error}") from error


def check_same_changes(model: nn.Module, entries: list[Entry], source: str) -> None:
    """Raise RecipeMismatchError unless `model` computes under the same changes as the weights from `source`."""
    ours, theirs = _forward_changes(recipe(model)), _forward_changes(entries)
    if ours != theirs:
        raise RecipeMismatchError(
            f"the weights in {source} belong to a model changed in another way than this one.\n"
            f"  weights: {theirs or 'no change'}\n"
            f"  model:   {ours or 'no change'}\n"
            "Make the model's changes those of the weights, or let wellposed.load(folder) build the model."
        )


def take_provenance(model: nn.Module, entries: list[Entry]) -> None:
    """Note on `model`, whose weights were just loaded, where they come from according to `entries`."""
    forget_conditioning(model)
    replay(model, [entry for entry in entries if not _parsed(entry)[0].changes_forward])


def _forward_changes(entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if _parsed(entry)[0].changes_forward]


def _parsed(entry: Entry) -> tuple[Change, Entry]:
    name = entry.get("change") if isinstance(entry, dict) else None
    if not isinstance(name, str) or name not in CHANGES:
        raise ModelFileError(
            f"the recipe entry {entry!r} is of no known kind ({', '.join(CHANGES)}). "
            "If a newer wellposed wrote the file, upgrade."
        )
    return CHANGES[name], {key: value for key, value in entry.items() if key != "change"}
