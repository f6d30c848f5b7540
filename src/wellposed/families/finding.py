"""Finding the blocks of a model."""

import re
from collections import Counter
from dataclasses import dataclass

from torch import nn

from wellposed.errors import UnknownFamilyError
from wellposed.families import huggingface, timm
from wellposed.families.family import Family, class_path
from wellposed.families.surgery import library_class

FAMILIES: tuple[Family, ...] = timm.FAMILIES + huggingface.FAMILIES

_BY_BLOCK = {family.block: family for family in FAMILIES}
# Names that torch's compile, checkpoint and FSDP wrappers put into the path of a module.
_WRAPPERS = re.compile(r"(?:^|\.)(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")


@dataclass(frozen=True)
class Block:
    """One block of a model: its name in the model, the module and the family it belongs to."""

    name: str
    module: nn.Module
    family: Family


def blocks(model: nn.Module) -> list[Block]:
    """Every block of a known family in `model`, in the order of its definition; none if there is none.

    Raises UnknownFamilyError where a known block stands beside an unknown one, or has a forward of its own, since
    changing a part of such a model would leave the rest as it was without a word.
    """
    found = []
    for name, module in model.named_modules():
        family = _BY_BLOCK.get(class_path(module))
        if family is not None:
            objection = family.objection(module)
            if objection:
                raise UnknownFamilyError(f"{_name_of(module)} at {name!r} is not supported: {objection}. {_known()}")
            found.append(Block(readable_name(model, name), module, family))
        elif _paths(library_class(module)) & _BY_BLOCK.keys():
            raise UnknownFamilyError(
                f"{_name_of(module)} at {name!r} derives from a known block but has a forward of its own, which "
                f"wellposed does not know. {_known()}"
            )
    _check_siblings(model)
    return found


def blocks_or_error(model: nn.Module) -> list[Block]:
    """As `blocks`, but a model without any known block is an UnknownFamilyError."""
    found = blocks(model)
    if not found:
        raise UnknownFamilyError(
            f"{_name_of(model)} has no block of a known family{_its_own_blocks(model)}. {_known()}"
        )
    return found


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DataParallel, DDP and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        else:
            return model


def readable_name(model: nn.Module, name: str) -> str:
    """`name` without what DataParallel, DDP, torch.compile, checkpoint and FSDP wrappers added to it."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        name = name.removeprefix("module").removeprefix(".")
    return _WRAPPERS.sub("", name).removeprefix(".")


def _check_siblings(model: nn.Module) -> None:
    for name, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        children = [_inside_wrapper(child) for child in container]
        known = [class_path(child) in _BY_BLOCK for child in children]
        # A ConvMixer's Residual stands among plain layers; whole blocks stand among their own kind.
        stacked = any(known) and not any(class_path(c).startswith("torch.nn.") for c in children)
        if stacked and not all(known):
            stranger = children[known.index(False)]
            raise UnknownFamilyError(
                f"{_name_of(stranger)} at {f'{name}.{known.index(False)}'!r} stands among known blocks but is not one. "
                f"{_known()}"
            )


def _inside_wrapper(module: nn.Module) -> nn.Module:
    for attribute in ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"):
        module = getattr(module, attribute, module)
    return module


def _its_own_blocks(model: nn.Module) -> str:
    """The class that stands most often in one of the model's lists, which is what its author would call a block."""
    counts = Counter(
        _name_of(child)
        for container in model.modules()
        if isinstance(container, nn.ModuleList | nn.Sequential)
        for child in container
        if not class_path(child).startswith("torch.nn.")
    )
    return f" (its blocks seem to be {counts.most_common(1)[0][0]})" if counts else ""


def _paths(cls: type) -> set[str]:
    return {f"{c.__module__}.{c.__qualname__}" for c in cls.__mro__}


def _name_of(module: nn.Module) -> str:
    cls = library_class(module)
    return f"{cls.__module__}.{cls.__qualname__}"


def _known() -> str:
    return "Known families: " + ", ".join(family.name for family in FAMILIES) + "."
