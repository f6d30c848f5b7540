"""Removing the residual additions of a model's blocks, and putting them back (arXiv 2510.00345, Section 3).

A pre-norm block computes x <- x + Attn(LN1(x)); x <- x + MLP(LN2(x)). Cut, it computes x <- Attn(LN1(x));
x <- MLP(LN2(x)), and nothing else about it changes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn

from wellposed.errors import InvalidArgumentError
from wellposed.families import Block, blocks, check_operable, drop_compiled_code, set_sites, sites_of

Model = TypeVar("Model", bound=nn.Module)

KINDS = ("attention", "mlp")


@dataclass(frozen=True)
class BlockSkips:
    """The skips of one block: True where it is there, False where it is cut, None where the architecture has none."""

    name: str
    family: str
    attention: bool | None
    mlp: bool | None

    def __str__(self) -> str:
        words = {True: "skip", False: "cut", None: "none"}
        return f"{self.name}: attention {words[self.attention]}, mlp {words[self.mlp]} ({self.family})"


def cut_skips(model: Model, attention: bool | Iterable[str] = True, mlp: bool | Iterable[str] = True) -> Model:
    r"""Remove the residual additions of every block of `model`, in place, and return it.

    Parameters, buffers and state-dict keys stay as they were. Drop-path of a cut branch is off; LayerScale stays
    in the branch (`condition_` sets it to 1). Cutting what is already cut changes nothing. A ConvMixer's one skip,
    around its mixing of tokens, counts as attention's. `restore_skips` undoes it.

    Only the forward changes, so models on the meta device or with quantized weights can be cut too.

    Args:
        model: a model, or part of one, of a known family.
        attention: cut the skips around attention; or the names of the blocks to cut them in, as `skips` lists them.
        mlp: the same for the skips around the MLP.

    Raises:
        UnknownFamilyError: the model or one of its blocks is of no known family; it is untouched.
        InvalidArgumentError: a name is not that of a block with such a skip, or no block has the kind asked for.

    Example:
        >>> import timm
        >>> model = cut_skips(timm.create_model("vit_tiny_patch16_224", depth=2), mlp=False)
        >>> print(*skips(model), sep="\n")
        blocks.0: attention cut, mlp skip (timm VisionTransformer)
        blocks.1: attention cut, mlp skip (timm VisionTransformer)
    """
    found = blocks(model)
    wanted = {kind: _chosen(found, kind, choice) for kind, choice in zip(KINDS, (attention, mlp), strict=True)}
    if (attention or mlp) and not any(wanted.values()):
        raise InvalidArgumentError(
            f"attention={attention!r}, mlp={mlp!r} asks for skips {type(model).__name__} does not have: the blocks "
            f"of {found[0].family.name} have {', '.join(found[0].family.skips)}"
        )
    _set_skips([(block, kind) for block in found for kind in KINDS if block.name in wanted[kind]], present=False)
    return model


def restore_skips(model: Model) -> Model:
    """Put back every residual addition that `cut_skips` removed from `model`, in place, and return it.

    Raises UnknownFamilyError for a model of no known family.
    """
    _set_skips([(block, kind) for block in blocks(model) for kind in block.family.skips], present=True)
    return model


def skips(model: nn.Module) -> list[BlockSkips]:
    """Each block of `model` with the skips it has.

    Raises UnknownFamilyError for a model of no known family.
    """
    return [_block_skips(block) for block in blocks(model)]


def read_cuts(model: nn.Module) -> list[dict[str, Any]]:
    """The arguments with which `cut_skips` makes a fresh model like `model`, if any skip is cut."""
    if not any(sites_of(module).cut for module in model.modules()):
        return []
    listed = skips(model)
    arguments: dict[str, Any] = {}
    for kind in KINDS:
        cut = [block.name for block in listed if getattr(block, kind) is False]
        kept = [block.name for block in listed if getattr(block, kind) is True]
        arguments[kind] = cut if cut and kept else bool(cut)
    return [arguments] if any(arguments.values()) else []


def _block_skips(block: Block) -> BlockSkips:
    present = {kind: _has_skip(block, kind) for kind in block.family.skips}
    return BlockSkips(block.name, block.family.name, present.get("attention"), present.get("mlp"))


def _chosen(found: list[Block], kind: str, choice: bool | Iterable[str]) -> set[str]:
    """Names of the blocks whose skip of this kind is to be cut."""
    having = {block.name for block in found if kind in block.family.skips}
    if isinstance(choice, bool):
        return having if choice else set()
    names: set[Any] = set(choice) if isinstance(choice, Iterable) and not isinstance(choice, str) else {None}
    if not all(isinstance(name, str) for name in names):
        raise InvalidArgumentError(f"{kind}={choice!r}: expected True, False or block names, as in ['blocks.0']")
    if not names <= having:
        raise InvalidArgumentError(
            f"{kind}={sorted(names - having)!r} names no block with such a skip; wellposed.skips(model) lists them "
            f"({', '.join(sorted(having)[:3])}, ...)"
        )
    return names


def _has_skip(block: Block, kind: str) -> bool:
    return kind not in sites_of(_adder(block, kind)).cut


def _adder(block: Block, kind: str) -> nn.Module:
    """The module inside `block` that adds this skip."""
    return block.module.get_submodule(block.family.skips[kind][0])


def _set_skips(which: list[tuple[Block, str]], *, present: bool) -> None:
    """Make the given skips present or not; either all of them change or, with an error, none."""
    changing = [(block, kind) for block, kind in which if _has_skip(block, kind) != present]
    for block, kind in changing:
        check_operable(_adder(block, kind), block.family.skips[kind][1], block.name)
    for block, kind in changing:
        module = _adder(block, kind)
        sites = sites_of(module)
        cut = sites.cut - {kind} if present else sites.cut | {kind}
        set_sites(module, block.family.skips[kind][1], replace(sites, cut=cut))
    if changing:
        drop_compiled_code()
