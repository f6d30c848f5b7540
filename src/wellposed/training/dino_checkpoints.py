"""Networks to and from DINO's own checkpoints, whose names `recipes.dino_names` explains."""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from wellposed.errors import ModelFileError
from wellposed.recipes import check_same_changes, load, recipe
from wellposed.recipes.dino_names import RECIPE, WRAPPED, Who, from_dino, open_dino, recipe_of
from wellposed.runs import Checkpoints, atomic_path
from wellposed.training.dino_network import Head, Network
from wellposed.training.dino_task import REST


def to_dino(student: Network, teacher: Network) -> dict[str, dict[str, Tensor]]:
    """Both networks as DINO's authors name their weights; `torch.save` of it is what their code reads."""
    return {
        "student": {f"{WRAPPED}{name}": tensor.detach() for name, tensor in student.state_dict().items()},
        "teacher": {name: tensor.detach() for name, tensor in teacher.state_dict().items()},
    }


def load_dino(model: nn.Module, path: str | os.PathLike[str], who: Who = "teacher") -> nn.Module:
    """Load the backbone in DINO's checkpoint at `path` into a timm ViT of the same shape, and return it.

    A classifier that the model has on top keeps its weights. RecipeMismatchError if it is not changed as the backbone
    was; one of DINO's authors was not changed at all: cut skips and the like after it is loaded.
    """
    found = open_dino(path)
    check_same_changes(model, recipe_of(found), str(path))
    backbone, _ = from_dino(found, who)
    own = model.state_dict()
    classifier = {name for name in own if name.startswith(("head.", "fc_norm."))}
    fits = own.keys() - classifier == backbone.keys() - classifier
    wrong = [name for name in backbone.keys() & own.keys() if backbone[name].shape != own[name].shape]
    if not fits or wrong:
        odd = sorted((own.keys() ^ backbone.keys()) - classifier)[:3] + sorted(wrong)[:3]
        raise ModelFileError(
            f"the backbone in {path} is not a {type(model).__name__} like this one: they differ in {', '.join(odd)}. "
            "Expected the same width, depth, patch size and image size"
        )
    model.load_state_dict(backbone, strict=False)
    return model


def save_dino(path: str | os.PathLike[str], student: Network, teacher: Network) -> Path:
    """Write both networks as one of DINO's checkpoints; the recipe of the backbone stands beside them."""
    with atomic_path(path) as temporary:
        torch.save({**to_dino(student, teacher), RECIPE: json.dumps(recipe(teacher.backbone))}, temporary)
    return Path(path)


def open_networks(run: str | os.PathLike[str]) -> tuple[Network, Network]:
    """Student and teacher of a run of `wellposed pretrain`, as its newest whole checkpoint has them, on the CPU."""
    checkpoint, _ = Checkpoints(Path(run) / "checkpoints").newest()
    rest = load_file(checkpoint / REST)
    networks = []
    for head in ("student.head.", "teacher.head."):
        weights = {name.removeprefix(head): tensor for name, tensor in rest.items() if name.startswith(head)}
        hidden, width = weights["mlp.0.weight"].shape
        outputs, bottleneck = weights["last_layer.weight_v"].shape
        network = Network(load(checkpoint), Head(width, hidden, bottleneck, outputs))
        network.head.load_state_dict(weights)
        networks.append(network)
    student, teacher = networks
    own = {
        name.removeprefix("student.backbone."): tensor for name, tensor in rest.items() if "student.backbone" in name
    }
    student.backbone.load_state_dict(own)
    return student, teacher
