"""What PEFT calls a tuner: it finds the layers, puts adapters on them and gives each its omega."""

import warnings
from math import sqrt
from typing import Any, NoReturn

from peft import LoraModel
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from wellposed.adapters.base_weights import is_linear
from wellposed.adapters.config import SineLoraConfig
from wellposed.adapters.layers import SineLayer, SineLoraEmbedding, SineLoraLinear
from wellposed.errors import InvalidArgumentError, ModelFileError, UnsuitableModelError
from wellposed.families import readable_name
from wellposed.lowrank.targets import close_names, is_target, none_of

try:
    from peft.utils.error import NoMatchingPeftModuleError
except ImportError:  # PEFT 0.20 raises a ValueError
    NoMatchingPeftModuleError = ValueError


class NoMatchError(InvalidArgumentError, NoMatchingPeftModuleError):  # type: ignore[misc]
    """No layer has a name that target_modules asks for."""


class SineLoraModel(LoraModel):  # type: ignore[misc]
    """A model with sine adapters; `peft.get_peft_model` makes it from a `SineLoraConfig`."""

    tuner_layer_cls = SineLayer

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Put the adapter on its layers."""
        config: SineLoraConfig = self.peft_config[adapter_name]
        config.forget_resolved()
        patterns = set(config.omega_pattern)
        try:
            super().inject_adapter(model, adapter_name, *args, **kwargs)
        except ValueError as error:
            if "not found in the base model" not in str(error):
                raise
            names = [name for name, module in model.named_modules() if is_linear(module) or _is_embedding(module)]
            raise NoMatchError(f"{error} {none_of(config.target_modules, names)}") from error
        _warn_of_unused(patterns, self._adapted_names(adapter_name))

    def add_weighted_adapter(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the weighted sum of two sines is not the sine of any B A of their rank."""
        raise UnsuitableModelError(
            "sine adapters cannot be added into one: a sin(omega B A) + b sin(omega B' A') is not the sine of a matrix "
            "of low rank. Activate several at once (model.base_model.set_adapter([...]), with set_scale for weights), "
            "merge them one after the other, or turn each into LoRA (wellposed.to_lora) and add those."
        )

    def subtract_mutated_init(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: what LoRA subtracts is the product of its first factors."""
        raise UnsuitableModelError(
            "path_initial_model_for_weight_conversion is for initializations that change the base weights, which a "
            "sine adapter has none of. Save without it."
        )

    def _create_and_replace(
        self,
        lora_config: SineLoraConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        **kwargs: Any,
    ) -> None:
        if isinstance(target, LoraLayer) and not isinstance(target, SineLayer):
            raise UnsuitableModelError(
                f"{current_key} has a LoRA adapter of PEFT's: it and a sine adapter cannot be on one layer. Merge it "
                "first (merge_and_unload), or give this adapter other target_modules."
            )
        super()._create_and_replace(lora_config, adapter_name, target, target_name, parent, current_key, **kwargs)
        layer: Any = getattr(parent, target_name)
        rank = layer.r[adapter_name]
        if rank > min(layer.in_features, layer.out_features):
            warnings.warn(
                f"r={rank} for {current_key}, a {layer.out_features} x {layer.in_features} matrix, which has no rank "
                "above its smaller side. Use a smaller r, or rank_pattern for this layer.",
                stacklevel=2,
            )
        if is_target(current_key, getattr(lora_config, "target_modules_to_tie", None) or ()):
            embedding: Any = self.model.get_input_embeddings()
            layer.gain[adapter_name] = embedding.gain[adapter_name]
            layer.omega[adapter_name] = embedding.omega[adapter_name]
        else:
            std = _init_std(layer, rank, lora_config)
            layer.omega[adapter_name] = lora_config.resolve_omega(current_key, rank, std)

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """PEFT's, which makes new parameters of those of embeddings: they ask for a gradient as the old ones did.

        DoRA's m is made in float32; without PEFT's casting it gets the type of the factors.
        """
        asked = {name: parameter.requires_grad for name, parameter in self.named_parameters()}
        super()._cast_adapter_dtype(adapter_name, autocast_adapter_dtype=autocast_adapter_dtype)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(asked[name])
        for layer in self.modules():
            if not autocast_adapter_dtype and isinstance(layer, SineLayer) and adapter_name in layer.lora_magnitude:
                magnitude = layer.lora_magnitude[adapter_name]
                magnitude.data = magnitude.data.to(layer.factors(adapter_name)[0].dtype)

    @staticmethod
    def _create_new_module(
        lora_config: SineLoraConfig, adapter_name: str, target: nn.Module, **kwargs: Any
    ) -> nn.Module:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if _is_embedding(base):
            return SineLoraEmbedding(target, adapter_name, config=lora_config, **kwargs)
        if is_linear(base):
            return SineLoraLinear(target, adapter_name, config=lora_config, **kwargs)
        raise InvalidArgumentError(
            f"{kwargs.get('target_name', 'a target module')} is a {type(base).__module__}.{type(base).__qualname__}: "
            "target_modules of a sine adapter are torch.nn.Linear, torch.nn.Embedding and transformers' Conv1D, and "
            "linear layers quantized by bitsandbytes or torchao. Leave it out of target_modules."
        )

    def _adapted_names(self, adapter_name: str) -> list[str]:
        """The layers that have the adapter."""
        modules = self.model.named_modules()
        return [name for name, module in modules if isinstance(module, SineLayer) and adapter_name in module.omega]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Refuse the weights of layers that this model does not have; PEFT's loader would drop them without a word."""
        own = {prefix + readable_name(name) for name, _ in self.named_parameters(remove_duplicate=False)}
        strangers = [
            key for key in state_dict if key.startswith(prefix) and ".lora_" in key and readable_name(key) not in own
        ]
        if strangers:
            shown = ", ".join(key.removeprefix(f"{prefix}model.") for key in strangers[:3])
            raise ModelFileError(
                f"the adapter has weights for layers that {type(self.model).__name__} does not have: {shown}"
                f"{', ...' if len(strangers) > 3 else ''} ({len(strangers)} in all). It was trained on another base "
                "model: load it onto that one."
            )
        super()._load_from_state_dict(state_dict, prefix, *args)


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding)


def _init_std(layer: SineLayer, rank: int, config: SineLoraConfig) -> float:
    """Standard deviation of the factor that does not start at zero: A, or for embeddings, as PEFT has it, B."""
    if isinstance(layer, SineLoraEmbedding):
        return 1.0
    return 1 / rank if config.init_lora_weights == "gaussian" else 1 / sqrt(3 * layer.in_features)


def _warn_of_unused(patterns: set[str], names: list[str]) -> None:
    """As PEFT does for rank_pattern: a key that matches no layer is most likely a mistake."""
    unused = sorted(
        key for key in patterns - set(names) if not any(is_target(name, rf"(.*\.)?({key})") for name in names)
    )
    if unused:
        close = close_names(unused, names)
        warnings.warn(
            f"omega_pattern has keys that match no adapted layer: {unused[:6]}. "
            f"{f'Close names: {close}. ' if close else ''}They change nothing.",
            stacklevel=2,
        )
