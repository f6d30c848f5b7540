"""Finding the blocks of a model."""

import re
from collections import Counter
from dataclasses import dataclass

from torch import nn

from wellposed.errors import InvalidArgumentError, UnknownFamilyError, UnsuitableModelError
from wellposed.families import huggingface, timm
from wellposed.families.family import Family, class_path
from wellposed.families.surgery import SitedModule, library_class

FAMILIES: tuple[Family, ...] = timm.FAMILIES + huggingface.FAMILIES

_BY_BLOCK = {family.block: family for family in FAMILIES}
_LIBRARIES = ("timm.models.", "transformers.models.")
# Names that torch's compile, checkpoint and FSDP wrappers put into the path of a module.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_IN_A_NAME = re.compile(rf"(?:^|\.)(?:{'|'.join(_WRAPPERS)})(?=\.|$)")


@dataclass(frozen=True)
class Block:
    """One block of a model: its name in the model, the module and the family it belongs to."""

    name: str
    module: nn.Module
    family: Family


def blocks(model: nn.Module) -> list[Block]:
    """Every block of `model`, in the order of its definition.

    Raises UnknownFamilyError where it has none, where a known block has a forward of its own, stands beside an unknown
    one or is part of a model with skips elsewhere: changing such a model in part would go unnoticed.
    """
    model = unwrapped(model)
    modules = dict(model.named_modules())
    found = []
    for name, module in modules.items():
        family = _BY_BLOCK.get(class_path(module))
        if family is not None:
            _check_surroundings(name, modules, family)
            objection = family.objection(module)
            if objection:
                raise UnknownFamilyError(f"{_name_of(module)} at {name!r} is not supported: {objection}. {_known()}")
            found.append(Block(readable_name(name), module, family))
        elif _paths(library_class(module)) & _BY_BLOCK.keys():
            raise UnknownFamilyError(
                f"{_name_of(module)} at {name!r} derives from a known block but has a forward of its own, which "
                f"wellposed does not know. {_known()}"
            )
    if not found:
        raise UnknownFamilyError(
            f"{_name_of(model)} has no block of a known family{_its_own_blocks(model)}. {_known()}"
        )
    _check_siblings(model)
    return found


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DataParallel, DDP and torch.compile."""
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"expected a torch.nn.Module, got {type(model).__name__}: {model!r}")
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        else:
            return model


def readable_name(name: str) -> str:
    """The name of a module without what torch.compile, checkpoint and FSDP wrappers added to it."""
    return _IN_A_NAME.sub("", name).removeprefix(".")


def check_operable(module: nn.Module, forward: type[SitedModule], name: str) -> None:
    """Raise where giving `module` the class with `forward` would change nothing, or undo what someone else did."""
    if class_path(module) != forward.wp_forward_of:
        raise UnknownFamilyError(
            f"{_name_of(module)} in {name} has a forward of its own, expected {forward.wp_forward_of}'s. {_known()}"
        )
    if "forward" in vars(module):
        raise UnsuitableModelError(
            f"{name} has its forward replaced on the instance (accelerate's device_map hooks do this), so a change of "
            "its class would have no effect. Change the model first, then dispatch or patch it."
        )
    if isinstance(module, SitedModule) and "wp_sites" not in vars(type(module)):
        raise UnsuitableModelError(
            f"{name} is now a {type(module).__name__}: its class was changed again after wellposed changed it "
            "(FSDP2's fully_shard does this). Make all changes before sharding."
        )


def _check_surroundings(name: str, modules: dict[str, nn.Module], family: Family) -> None:
    """Raise where a block of `family` is part of another architecture, whose other skips nobody would see."""
    parts = name.split(".")
    for depth in range(len(parts)):
        around = ".".join(parts[:depth])
        home = library_class(modules[around]).__module__
        if around != name and home.startswith(_LIBRARIES) and home not in family.homes:
            raise UnknownFamilyError(
                f"{_name_of(modules[around])} holds blocks of {family.name} but is another one, with skips that "
                f"wellposed does not know. Call it on the part you mean, such as {'.'.join(parts[:-1])!r}. {_known()}"
            )


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
    for attribute in _WRAPPERS:
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
