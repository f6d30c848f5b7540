"""A field as one file: weights in safetensors, with what the network is made of in its header."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from wellposed.errors import ModelFileError
from wellposed.runs import atomic_path

WEIGHTS = "field.safetensors"
_HEADER = "wellposed.field"
_NETWORKS = {
    "coordinates": "networks:CoordinateNetwork",
    "nerf": "nerf_network:NerfNetwork",
}
"""Classes by the name that stands in a file, each in a module of this package."""


@dataclass(frozen=True)
class FieldSpec:
    """What a network is made of."""

    network: str
    """coordinates or nerf."""
    arguments: dict[str, Any]
    """Of its class, JSON-able."""
    facts: dict[str, Any]
    """What else a user of the file needs, such as the size of the picture."""

    def build(self) -> nn.Module:
        """The network, with fresh weights."""
        module, name = _NETWORKS[self.network].split(":")
        make: Callable[..., nn.Module] = getattr(import_module(f"wellposed.fields.{module}"), name)
        return make(**self.arguments)


def save_field(network: nn.Module, path: Path, spec: FieldSpec, *, half: bool = False) -> None:
    """Write the weights, in float16 if `half`, and what the network is made of; atomically."""
    weights = {name: tensor.half() if half else tensor for name, tensor in network.state_dict().items()}
    header = {_HEADER: json.dumps(vars(spec), separators=(",", ":"))}
    with atomic_path(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, temporary, metadata=header)


def load(path: str | Path, device: str | torch.device = "cpu") -> tuple[nn.Module, FieldSpec]:
    """The network in `path`, a field.safetensors or the folder of a run, in float32 and eval mode; and what it is.

    Raises:
        ModelFileError: there is no such file, or it is none of a field, or damaged.
    """
    file = Path(path) / WEIGHTS if Path(path).is_dir() else Path(path)
    try:
        with safe_open(file, framework="pt") as opened:
            header = (opened.metadata() or {})[_HEADER]
            weights = {name: opened.get_tensor(name).float() for name in opened.keys()}  # noqa: SIM118
        spec = FieldSpec(**json.loads(header))
        network = spec.build()
        network.load_state_dict(weights)
    except FileNotFoundError as error:
        raise ModelFileError(f"{file}: there is no such file; expected what `wellposed fit` wrote") from error
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelFileError(
            f"{file} cannot be read as a field ({reason}); expected a file of `wellposed fit`"
        ) from error
    return network.to(device).eval(), spec
