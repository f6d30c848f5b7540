"""Graying what a model's first block sees, once per image, and undoing it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

from torch import nn

from wellposed.errors import InvalidArgumentError, UnsuitableModelError
from wellposed.families import Sites, check_operable, drop_compiled_code, embeddings, set_sites, sites_of
from wellposed.graying.tensors import Graying, Kind, graying

Model = TypeVar("Model", bound=nn.Module)

PLACES = ("patches", "tokens")


def gray_tokens(
    model: Model,
    kind: Kind = "dct",
    *,
    eps: float | None = None,
    tol: float | None = None,
    at: Literal["patches", "tokens"] = "patches",
    only: Sequence[str] | None = None,
) -> Model:
    """Gray the input of `model`, in place, and return it; `ungray_tokens` undoes it.

    Each image is grayed as `gray` does it, as the matrix of its patches: one row per patch. There are no new parameters
    and the state-dict keys stay as they were. Of a model with several stages, the first embedding's input or output is
    grayed.

    Args:
        model: a timm VisionTransformer (DeiT, ...), Swin, CaiT or PVTv2, or a HuggingFace ViT.
        kind: "svd", or "dct", which costs less.
        eps: the power, in (0, 1]; 1 changes nothing. The paper's if None: 0.7 for "svd", 0.95 for "dct".
        tol: the floor under the power, see `gray`.
        at: "patches", the pixels before they are embedded, or "tokens", what the patch embedding returns. Where the
            patches overlap (PVTv2) only "tokens".
        only: names of patch embeddings, where `model` holds several models and not all of them are meant.

    Raises:
        InvalidArgumentError: an argument out of its range.
        UnknownFamilyError: the model has no patch embedding of a known kind.
        UnsuitableModelError: the model is grayed already, or its embedding has no such place. It is untouched.

    Example:
        >>> import timm, wellposed as wp
        >>> model = gray_tokens(timm.create_model("vit_tiny_patch16_224", depth=1), "dct")
        >>> wp.recipe(model)
        [{'change': 'gray_tokens', 'kind': 'dct', 'eps': 0.95, 'tol': 1e-06, 'at': 'patches'}]
    """
    how = graying(kind, eps, tol)
    if at not in PLACES:
        raise InvalidArgumentError(f"at={at!r}: expected 'patches' or 'tokens'")
    known = embeddings(model)
    found = [each for each in known if only is None or each[0] in only]
    if only is not None and len(found) != len(set(only)):
        names = ", ".join(name for name, _, _ in known)
        raise InvalidArgumentError(f"only={list(only)}: expected some of the model's patch embeddings {names}")
    for name, module, embedding in found:
        already = _grayings(sites_of(module))
        if already:
            raise UnsuitableModelError(
                f"{name} is grayed already: {already[0]}. Call wellposed.ungray_tokens(model) before graying it anew."
            )
        check_operable(module, embedding.forward, name)
        objection = embedding.forward.wp_objection(module) if at == "patches" else None
        if objection:
            raise UnsuitableModelError(f"cannot gray the pixel patches of {name}: {objection}. Use at='tokens'.")
    for _, module, embedding in found:
        sites = sites_of(module)
        sites = replace(sites, patches=how) if at == "patches" else replace(sites, tokens=how)
        set_sites(module, embedding.forward, sites)
    drop_compiled_code()
    return model


def ungray_tokens(model: Model) -> Model:
    """Undo what `gray_tokens` did to `model`, in place, and return it.

    Raises UnknownFamilyError for a model that could not be grayed.
    """
    grayed = [found for found in embeddings(model) if _grayings(sites_of(found[1]))]
    for name, module, embedding in grayed:
        check_operable(module, embedding.forward, name)
    for _, module, embedding in grayed:
        set_sites(module, embedding.forward, replace(sites_of(module), patches=None, tokens=None))
    if grayed:
        drop_compiled_code()
    return model


def read_grayings(model: nn.Module) -> list[dict[str, Any]]:
    """The arguments with which `gray_tokens` makes a fresh model like `model`, if it is grayed."""
    if not any(_grayings(sites_of(module)) for module in model.modules()):
        return []
    found = [(name, _grayings(sites_of(module))) for name, module, _ in embeddings(model)]
    kinds = [entries for index, (_, entries) in enumerate(found) if entries not in [e for _, e in found[:index]]]
    if len(kinds) == 1:
        return kinds[0]
    return [
        {**entry, "only": [name for name, entries in found if entry in entries]}
        for entries in kinds
        for entry in entries
    ]


def _grayings(sites: Sites) -> list[dict[str, Any]]:
    at_places = {place: getattr(sites, place) for place in PLACES}
    return [
        {"kind": how.kind, "eps": how.eps, "tol": how.tol, "at": place}
        for place, how in at_places.items()
        if isinstance(how, Graying)
    ]
