"""A sine adapter as plain LoRA, for programs that know nothing else."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from wellposed.adapters.config import SineLoraConfig
from wellposed.adapters.layers import SineLayer, SineLoraEmbedding
from wellposed.adapters.subspace import dominant
from wellposed.errors import InvalidArgumentError
from wellposed.families import unwrapped
from wellposed.runs import atomic_path, tracked

_EXACT_SIDE = 1024
"""Up to this many rows or columns a matrix is decomposed as a whole."""
_SHARED = (
    *("base_model_name_or_path", "revision", "task_type", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "bias", "modules_to_save", "auto_mapping", "trainable_token_indices", "ensure_weight_tying"),
)


@dataclass(frozen=True)
class LoraExport:
    """A LoRA adapter that comes as close to a sine adapter as its rank allows."""

    config: LoraConfig
    state_dict: dict[str, Tensor]
    """As PEFT saves it."""
    errors: dict[str, float]
    """||D - B A||_F / ||D||_F of each layer, D the sine adapter's update; 0 where there is no update."""

    @property
    def error(self) -> float:
        """The mean of `errors`."""
        return sum(self.errors.values()) / len(self.errors)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write what `peft.PeftModel.from_pretrained` and other programs load, and return the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(folder / "adapter_model.safetensors") as temporary:
            save_file(self.state_dict, str(temporary), metadata={"format": "pt"})
        self.config.save_pretrained(str(folder))
        return folder

    def __str__(self) -> str:
        worst = max(self.errors, key=lambda name: self.errors[name])
        return (
            f"LoRA of rank {self.config.r} for {len(self.errors)} layers: relative error {self.error:.3f} on average, "
            f"{self.errors[worst]:.3f} in {worst}"
        )


@torch.no_grad()
def to_lora(adapter: nn.Module, r: int, adapter_name: str | None = None) -> LoraExport:
    """The LoRA adapter of rank `r` that is nearest to a sine adapter, layer by layer, and how near that is.

    Each update, DoRA's norms included, is cut off after `r` singular values; no matrix of that rank is closer. A sine
    adapter has a far higher rank than r, so look at the error before using the result.

    Args:
        adapter: a PEFT model with a sine adapter.
        r: LoRA's rank, above 0; where a matrix is smaller, the rest is zeros.
        adapter_name: which adapter; the active one if None.

    Raises:
        InvalidArgumentError: an r below 1, or no such sine adapter.

    Example:
        >>> import peft, wellposed.adapters as wpa
        >>> net = nn.Sequential(nn.Linear(16, 16))
        >>> config = wpa.SineLoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
        >>> model = peft.get_peft_model(net, config)
        >>> to_lora(model, r=2).error > to_lora(model, r=8).error > to_lora(model, r=16).error
        True
    """
    if not isinstance(r, int) or isinstance(r, bool) or r < 1:
        raise InvalidArgumentError(f"r={r!r}: expected a whole number above 0")
    model: Any = unwrapped(adapter)
    layers = [(key, layer) for key, layer in model.named_modules() if isinstance(layer, SineLayer)]
    name = adapter_name or next((active for _, layer in layers for active in layer.active_adapters), "default")
    layers = [(key.removeprefix("base_model.model."), layer) for key, layer in layers if name in layer.omega]
    if not layers:
        configs = getattr(model, "peft_config", {})
        known = ", ".join(key for key, config in configs.items() if isinstance(config, SineLoraConfig))
        raise InvalidArgumentError(f"{type(model).__name__} has no sine adapter {name!r}; it has {known or 'none'}")
    others = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    # Copies: tied weights are one tensor under two names, which a safetensors file cannot hold.
    state = {key: value.detach().cpu().clone() for key, value in others.items() if ".lora_" not in key}
    errors = {}
    for key, layer in tracked(layers, "to LoRA"):
        a, b, errors[key] = nearest_factors(layer.change(name), r)
        embedding = isinstance(layer, SineLoraEmbedding)
        for letter, factor in (("A", a), ("B", b)):
            end = f"lora_embedding_{letter}" if embedding else f"lora_{letter}.weight"
            state[f"base_model.model.{key}.{end}"] = factor.contiguous().cpu()
    own = model.peft_config[name]
    shared = {field: getattr(own, field, None) for field in _SHARED}
    if own.use_dora and getattr(own, "target_modules_to_tie", None):
        # Tied layers share their factors, but DoRA's norms are along the rows of one and the columns of the other.
        by_name = {"target_modules": [key for key, _ in layers], "layers_to_transform": None, "layers_pattern": None}
        shared |= by_name | {"ensure_weight_tying": False}
    transposed = any(isinstance(layer.get_base_layer(), Conv1D) for _, layer in layers)
    config = LoraConfig(r=r, lora_alpha=r, inference_mode=True, fan_in_fan_out=transposed, **shared)
    return LoraExport(config, state, errors)


def nearest_factors(delta: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """A (rank, in) and B (out, rank) with B A nearest to `delta` (out, in), and ||delta - B A|| / ||delta||.

    Example:
        >>> a, b, error = nearest_factors(torch.diag(torch.tensor([4.0, 3.0])), 1)
        >>> round(error, 6)
        0.6
    """
    kept = min(rank, *delta.shape)
    if min(delta.shape) <= max(_EXACT_SIDE, 4 * kept):
        u, values, vh = torch.linalg.svd(delta, full_matrices=False)
    else:
        u, values, vh = dominant(delta, kept)
    root = values[:kept].sqrt()
    a, b = delta.new_zeros(rank, delta.shape[1]), delta.new_zeros(delta.shape[0], rank)
    a[:kept], b[:, :kept] = root[:, None] * vh[:kept], u[:, :kept] * root
    whole = float(delta.norm())
    return a, b, float((delta - b @ a).norm()) / whole if whole > 0 else 0.0
