"""Packed adapters that take turns in the weights themselves, so that the model runs at the speed of its base model."""

from typing import Any

import torch
from torch import Tensor, nn

from wellposed.compression.shelf import AdapterShelf
from wellposed.compression.weights import packed_weight
from wellposed.errors import UnsuitableModelError


class MergedShelf(AdapterShelf):
    """A shelf whose `use` writes W0 + s sin(omega Q(B) Q(A)), or W0 + s Q(B) Q(A), over the weights of the base layers.

    One pass over each weight, from the packed form (`wellposed.compression.packed_weight`). W0 is kept for the next
    adapter: the adapted layers take their memory twice, and each adapter on the shelf its bits. What merges or unmerges
    otherwise has to wait until `leave` has given the layers W0 back.

    Example:
        shelf = MergedShelf(wp.load_adapter(model, "one-3bit/"))
        shelf.add("one", "one-3bit/")
        shelf.use("one")
        shelf.leave()
    """

    def __init__(self, model: nn.Module, adapter_name: str = "default") -> None:
        super().__init__(model, adapter_name)
        from peft.tuners.lora import LoraLayer

        self.adapter_name = adapter_name
        self._layers: dict[str, Any] = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, LoraLayer) and adapter_name in layer.r
        }
        self._kept: dict[str, nn.Parameter] = {}
        for name, layer in self._layers.items():
            reason = _hindrance(layer, adapter_name)
            if reason or f"{name}.lora_A.weight" not in self.places:
                raise UnsuitableModelError(
                    f"{name} {reason or 'is of another PEFT model'}: expected linear layers in 16 or 32 bits, nothing "
                    "merged into them, with LoRA or SineLoRA. Use wellposed.compression.AdapterShelf."
                )

    @torch.no_grad()
    def use(self, name: str) -> None:
        """Merge the adapter of this name, in the place of the one before."""
        held = self._held(name)
        factors = {key: packed for stack in held.stacks for key, packed in stack.packed.items()}
        for stem, layer in self._layers.items():
            base = layer.get_base_layer()
            if stem not in self._kept:
                self._kept[stem] = base.weight
                base.weight = nn.Parameter(torch.empty_like(base.weight), requires_grad=False)
                layer.merged_adapters.append(self.adapter_name)
            a, b = (factors[f"{stem}.lora_{letter}.weight"] for letter in "AB")
            packed_weight(self._kept[stem], a, b, *_frequency_and_scale(layer, self.adapter_name), out=base.weight.data)
        self._write(held.others)

    def leave(self) -> None:
        """Give every layer its own weight back."""
        for stem, weight in self._kept.items():
            self._layers[stem].get_base_layer().weight = weight
            self._layers[stem].merged_adapters.clear()
        self._kept.clear()


def _frequency_and_scale(layer: Any, adapter_name: str) -> tuple[float | None, float]:
    """The numbers omega, None for LoRA, and s."""
    if hasattr(layer, "omega"):
        return layer.omega[adapter_name], layer.scale(adapter_name)
    return None, layer.scaling[adapter_name]


def _hindrance(layer: Any, adapter_name: str) -> str:
    """Why the weight of a layer is not W0 and an update of the factors; nothing if it is."""
    base = layer.get_base_layer()
    weight: Tensor | None = getattr(base, "weight", None)
    if type(base) is not nn.Linear or weight is None or weight.dtype.itemsize == 1:
        return f"is a {type(base).__name__}" + ("" if weight is None else f" in {weight.dtype}")
    if layer.use_dora.get(adapter_name, False):
        return "has a DoRA adapter, whose norms need the whole weight first"
    if layer.lora_bias.get(adapter_name, False):
        return "has an adapter with a bias"
    return f"has {', '.join(layer.merged_adapters)} merged" if layer.merged_adapters else ""
