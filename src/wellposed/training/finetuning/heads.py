"""The head of a vision model, new for the classes at hand, and the layers before it that an adapter goes to."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from wellposed.errors import InvalidArgumentError, UnsuitableModelError


def model_heads(model: Any) -> list[str]:
    """The names of the layers that give a score to each class; none where there are none."""
    if hasattr(model, "get_classifier"):  # timm's
        found = model.get_classifier()
        parts = {id(part) for part in (found if isinstance(found, tuple | list) else [found])}
        return [name for name, module in model.named_modules() if id(module) in parts]
    body = f"{model.base_model_prefix}."
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not name.startswith(body)
        and module.out_features == model.config.num_labels
    ]


def give_head(model: Any, classes: Sequence[str]) -> list[str]:
    """A new head for `classes` in the place of the model's own, and the names of the layers that it is made of."""
    if hasattr(model, "reset_classifier"):
        model.reset_classifier(len(classes))
        return model_heads(model)
    heads = model_heads(model)
    for name in heads:
        parent, _, leaf = name.rpartition(".")
        old = model.get_submodule(name)
        new = nn.Linear(old.in_features, len(classes), bias=old.bias is not None)
        setattr(model.get_submodule(parent), leaf, new)
    model.config.id2label = dict(enumerate(classes))
    model.config.label2id = {label: number for number, label in enumerate(classes)}
    model.num_labels = len(classes)
    return heads


def linear_layers(model: nn.Module, heads: Sequence[str]) -> list[str]:
    """Ends of names by which all linear layers but those of `heads` are meant, and nothing else.

    Of a timm ViT: attn.qkv, attn.proj, mlp.fc1 and mlp.fc2.
    """
    kinds = {name: isinstance(module, nn.Linear) for name, module in model.named_modules()}
    names = [name for name, is_linear in kinds.items() if is_linear and not _is_within(name, heads)]
    if not names:
        raise UnsuitableModelError(
            f"{type(model).__name__} has no linear layers but its head: name layers of another kind with "
            "--target-modules, which LoRA, rsLoRA and DoRA may have an adapter for, or use --method full"
        )
    ends = dict.fromkeys(".".join(name.split(".")[-2:]) for name in names)
    meant = {name for name in kinds if any(name == end or name.endswith(f".{end}") for end in ends)}
    return list(ends) if meant == set(names) else names


def check_targets(targets: Sequence[str], heads: Sequence[str]) -> None:
    """InvalidArgumentError where `targets` name the head, which is trained as a whole."""
    for head in heads:
        for target in targets:
            if head == target or head.endswith(f".{target}"):
                raise InvalidArgumentError(
                    f"target_modules has {target!r}, the head: it is new and trained as a whole; leave it out"
                )


def _is_within(name: str, heads: Sequence[str]) -> bool:
    return any(name == head or name.startswith(f"{head}.") for head in heads)
