"""Graying what a model's first block sees, once per image, and undoing it."""

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
    found = embeddings(model)
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
    found = [entry for module in model.modules() for entry in _grayings(sites_of(module))]
    return [entry for index, entry in enumerate(found) if entry not in found[:index]]


def _grayings(sites: Sites) -> list[dict[str, Any]]:
    at_places = {place: getattr(sites, place) for place in PLACES}
    return [
        {"kind": how.kind, "eps": how.eps, "tol": how.tol, "at": place}
        for place, how in at_places.items()
        if isinstance(how, Graying)
    ]
