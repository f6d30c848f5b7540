"""The layers that PEFT puts in the place of linear layers and embeddings.

With s = (lora_alpha / r) / g and W0 the base layer's weight, (out, in), an adapter is W0 + D, D = s sin(omega B A); as
DoRA it is c (W0 + D) row by row, with c = m / ||W0 + D||, the norm taken as a constant. Several active adapters add
their changes of W0, and merging writes that same sum.
"""

import warnings
from collections.abc import Iterable
from math import sqrt
from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from wellposed.adapters.base_weights import (
    Kept,
    is_quantized,
    is_transposed,
    keep,
    read_weight,
    restore,
    whole,
    write_weight,
)
from wellposed.adapters.calling import Factor, is_called_by_others, weight_of
from wellposed.adapters.config import SineLoraConfig
from wellposed.adapters.dora import adapted_row_norms, row_norms
from wellposed.errors import UnsuitableModelError
from wellposed.lowrank import sine_delta, sine_linear
from wellposed.lowrank.eager import rank_product

_PLAIN = (nn.Linear, Conv1D)
"""Base layers that are x W0^T + bias and no more; what is derived from them may do more."""


class SineLayer(LoraLayer):  # type: ignore[misc]
    """What the two kinds of layers share: PEFT's bookkeeping, D, DoRA's factor, and merging."""

    adapter_layer_names = (*LoraLayer.adapter_layer_names, "lora_magnitude")
    other_param_names = (*LoraLayer.other_param_names, "omega", "gain")
    omega: dict[str, float]
    """Of each adapter."""
    gain: dict[str, float]
    """g of each adapter."""
    lora_magnitude: nn.ParameterDict
    """DoRA's m, (out,), of each adapter that has one."""
    base_kept: Kept | None = None
    """The base layer's own weight, while adapters are merged into it."""

    def factors(self, adapter_name: str) -> tuple[Tensor, Tensor]:
        """A (r, in) and B (out, r)."""
        raise NotImplementedError

    def resolve_lora_variant(self, *, config: Any, **kwargs: Any) -> None:
        """No variant of PEFT's: this layer has its own forward, DoRA's too."""

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        """Make room for one more adapter; `SineLoraModel` gives it its omega."""
        if not isinstance(config, SineLoraConfig):
            raise UnsuitableModelError(
                f"the layer has sine adapters, and {adapter_name!r} is a {type(config).__name__}: the two cannot be on "
                "one layer. Merge the first, or give the second other target_modules."
            )
        base = self.get_base_layer()
        if getattr(base, "_hf_tp_plan", None) is not None:
            raise UnsuitableModelError(
                "the base layer is split over devices (tensor parallelism), where a sine adapter cannot be: the rows "
                "and columns of its update are not on one device. Use FSDP."
            )
        if "lora_magnitude" not in self._modules:
            self.omega, self.gain = {}, {}
            self.lora_magnitude = nn.ParameterDict()
        super().update_layer(adapter_name, r, lora_alpha, config=config, **kwargs)
        self.gain[adapter_name] = sqrt(self.in_features) if config.gain is None else float(config.gain)
        if adapter_name in self.lora_A:
            self.lora_A[adapter_name].__class__ = self.lora_B[adapter_name].__class__ = Factor
        if config.use_dora:
            a, _ = self.factors(adapter_name)
            norms = torch.empty(self.out_features, device="meta") if a.is_meta else row_norms(read_weight(base))
            self.lora_magnitude[adapter_name] = nn.Parameter(norms.to(a.device))
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """PEFT also gives the adapter the base layer's type. A new one gets it; one that was loaded is not rounded."""
        if adapter_name not in self.omega:
            super()._move_adapter_to_device_of_base_layer(adapter_name, device)
            return
        device = device or self.get_base_layer().weight.device
        for name in self.adapter_layer_names:
            own = [value for key, value in getattr(self, name).items() if key == adapter_name]
            for parameter in (each for kept in own for each in _parameters_of(kept)):
                if not parameter.is_meta:
                    parameter.data = parameter.data.to(device)

    def scale(self, adapter_name: str) -> float:
        """The factor s = (lora_alpha / r) / g."""
        return self.scaling[adapter_name] / self.gain[adapter_name]

    def delta(self, adapter_name: str) -> Tensor:
        """D = s sin(omega B A), (out, in), in float32 at least."""
        a, b = self.factors(adapter_name)
        precise = torch.promote_types(b.dtype, torch.float32)
        return sine_delta(a, b, self.omega[adapter_name], self.scale(adapter_name), precise)

    def dora_factor(self, adapter_name: str, weight_OI: Tensor) -> Tensor:
        """The factor c = m / ||W0 + D||, (out,), of which only m has a gradient."""
        a, b = self.factors(adapter_name)
        norms = adapted_row_norms(weight_OI.to(a.device), a, b, self.omega[adapter_name], self.scale(adapter_name))
        return self.lora_magnitude[adapter_name] / norms.clamp_min(torch.finfo(norms.dtype).tiny)

    @torch.no_grad()
    def change(self, adapter_name: str) -> Tensor:
        """All that the adapter adds to W0, (out, in), in float32 at least: D or, with DoRA, c (W0 + D) - W0.

        Where FSDP2 has sharded the layer, all processes have to call this together.
        """
        delta = whole(self.delta(adapter_name))
        if not self.use_dora[adapter_name]:
            return delta
        weight = whole(self.base_weight()).to(delta)
        v, m = weight + delta, whole(self.lora_magnitude[adapter_name])
        return (m / row_norms(v).clamp_min(torch.finfo(v.dtype).tiny))[:, None] * v - weight

    def get_delta_weight(self, adapter: str) -> Tensor:
        """D in the layout and in the type that PEFT expects: the base layer's and the factors'."""
        delta = self.delta(adapter).to(self.factors(adapter)[1].dtype)
        return delta.T if is_transposed(self.get_base_layer()) else delta

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """Whether PEFT's own conversion knows the whole update; `wellposed.to_lora` also does DoRA."""
        return not self.use_dora.get(adapter_name, False)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Write W0 and the changes of the adapters into the base layer, added in float32 and rounded once.

        The layer holds on to W0 until `unmerge`, which gives it back bit by bit.
        """
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self._adapters()]
        if not names:
            return
        base = self.get_base_layer()
        with torch.no_grad():
            weight = self.base_weight()
            for name in [*self.merged_adapters, *names]:
                weight = weight + self.change(name).to(weight.device)
        if safe_merge and not torch.isfinite(weight).all():
            raise ValueError(f"NaNs detected in the merged weights. The adapter {names[-1]} seems to be broken")
        kept = keep(base) if self.base_kept is None else self.base_kept
        write_weight(base, weight, self.kwargs.get("get_apply_tensor_subclass"))
        self.base_kept = kept
        self.merged_adapters.extend(names)

    def unmerge(self) -> None:
        """Give the base layer back the weight it had before `merge`."""
        if self.base_kept is None:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        restore(self.get_base_layer(), self.base_kept)
        self.base_kept = None
        self.merged_adapters.clear()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """A model that is moved or cast while adapters are merged takes W0 along, or `unmerge` would not fit it."""
        super()._apply(fn, recurse)
        kept = None if self.base_kept is None else self.base_kept[0]
        if type(kept) is nn.Parameter:
            kept.data = fn(kept.data)
        return self

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._check_forward_args(x, *args, **kwargs)
        per_input = kwargs.pop("adapter_names", None)
        if self.disable_adapters:
            if self.merged:
                self.unmerge()
            return self.base_layer(x, *args, **kwargs)
        if per_input is not None:
            return self._each_its_own(x, self.base_layer(x, *args, **kwargs), per_input)
        if self.merged:
            return self.base_layer(x, *args, **kwargs)
        adapters = self._adapters()
        active = [name for name in self.active_adapters if name in adapters]
        if len(active) == 1 and not args and not kwargs:
            result = self._in_one_product(x, active[0])
            if result is not None:
                return result
        result = self.base_layer(x, *args, **kwargs)
        for name in active:
            result = result + self._update(x, name).to(result.dtype)
        return result

    def _each_its_own(self, x: Tensor, result: Tensor, adapter_names: list[str]) -> Tensor:
        """A batch of which each input has an adapter of its own, or "__base__"."""
        for name in dict.fromkeys(adapter_names):
            if name in self._adapters():
                rows = [row for row, own in enumerate(adapter_names) if own == name]
                result[rows] = result[rows] + self._update(x[rows], name).to(result.dtype)
        return result

    def base_weight(self) -> Tensor:
        """W0, (out, in), also while adapters are merged."""
        base = self.get_base_layer()
        if self.base_kept is None:
            return read_weight(base)
        merged = keep(base)
        restore(base, self.base_kept)
        try:
            return read_weight(base)
        finally:
            restore(base, merged)

    def _adapters(self) -> Iterable[str]:
        raise NotImplementedError

    def _in_one_product(self, x: Tensor, adapter_name: str) -> Tensor | None:
        """The output with one adapter from W0 + D, where that can stand for the base layer and `_update`, or None."""
        return None

    def _update(self, x: Tensor, adapter_name: str) -> Tensor:
        """What one adapter adds to the base layer's output, dropout included."""
        raise NotImplementedError


class SineLoraLinear(SineLayer, lora.Linear):  # type: ignore[misc]
    """A linear layer, or transformers' Conv1D, with sine adapters."""

    def factors(self, adapter_name: str) -> tuple[Tensor, Tensor]:
        """A (r, in) and B (out, r)."""
        return weight_of(self.lora_A[adapter_name]), weight_of(self.lora_B[adapter_name])

    def _adapters(self) -> Iterable[str]:
        return self.lora_A.keys()

    def _in_one_product(self, x: Tensor, adapter_name: str) -> Tensor | None:
        base: Any = self.base_layer
        if type(base) not in _PLAIN or is_called_by_others(base) or self._drops(adapter_name) or is_quantized(base):
            return None
        weight, bias = base.weight, base.bias
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            return None
        weight = weight.T if is_transposed(base) else weight
        a, b = self.factors(adapter_name)
        omega, scale = self.omega[adapter_name], self.scale(adapter_name)
        if not self.use_dora[adapter_name]:
            return sine_linear(x, weight, bias, a, b, omega, scale)
        product = sine_linear(x, weight, None, a, b, omega, scale)
        result = self.dora_factor(adapter_name, weight.detach()) * product
        return (result if bias is None else result + bias).to(product.dtype)

    def _update(self, x: Tensor, adapter_name: str) -> Tensor:
        x = self.lora_dropout[adapter_name](x)
        a, b = self.factors(adapter_name)
        update = sine_linear(x, None, None, a, b, self.omega[adapter_name], self.scale(adapter_name))
        if not self.use_dora[adapter_name]:
            return update
        weight = read_weight(self.get_base_layer())
        c = self.dora_factor(adapter_name, weight)
        return (c - 1) * F.linear(x, weight.to(x.dtype)) + c * update

    def _drops(self, adapter_name: str) -> bool:
        dropout = self.lora_dropout[adapter_name]
        return isinstance(dropout, nn.Dropout) and dropout.training and dropout.p > 0


class SineLoraEmbedding(SineLayer, lora.Embedding):  # type: ignore[misc]
    """An embedding with sine adapters: W0 is (width, number of tokens), so that a token's row is a column here.

    The sine is taken of the columns that the batch needs, never of all, other than for DoRA's norms. Dropout leaves
    out the update of a token, which is what dropout on a one-hot input does.
    """

    def factors(self, adapter_name: str) -> tuple[Tensor, Tensor]:
        """A (r, tokens) and B (width, r)."""
        return self.lora_embedding_A[adapter_name], self.lora_embedding_B[adapter_name]

    def _adapters(self) -> Iterable[str]:
        return self.lora_embedding_A.keys()

    def _update(self, x: Tensor, adapter_name: str) -> Tensor:
        a, b = self.factors(adapter_name)
        of_tokens_Nr = self._embed(x, a.T).reshape(-1, len(a))
        argument = rank_product(b.T, of_tokens_Nr).reshape(*x.shape, len(b))
        update = self.scale(adapter_name) * torch.sin(self.omega[adapter_name] * argument)
        if self.use_dora[adapter_name]:
            weight = read_weight(self.get_base_layer())
            c = self.dora_factor(adapter_name, weight)
            update = (c - 1) * F.embedding(x, weight.T) + c * update
        kept = self.lora_dropout[adapter_name](torch.ones_like(update[..., :1]))
        embed_scale = self._get_embed_scale()
        return kept * update if embed_scale is None else kept * update * embed_scale.to(update.dtype)


def _parameters_of(kept: nn.Module | nn.Parameter) -> Iterable[nn.Parameter]:
    return kept.parameters() if isinstance(kept, nn.Module) else [kept]
