"""The ways to fine-tune: all weights, or one of PEFT's and our adapters."""

from typing import Any

import torch

from wellposed.errors import InvalidArgumentError, UnsuitableModelError
from wellposed.training.finetuning.config import LanguageConfig


def adapter_config(config: LanguageConfig, *, classifies: bool) -> Any:
    """What PEFT asks for to make the adapter of `config`."""
    from peft import LoraConfig

    from wellposed.adapters import SineLoraConfig

    settings: dict[str, Any] = {
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "target_modules": list(config.target_modules) or "all-linear",
        "task_type": "SEQ_CLS" if classifies else "CAUSAL_LM",
        "use_rslora": config.method == "rslora",
        "use_dora": config.method.endswith("dora"),
    }
    if config.method.startswith("sine"):
        return SineLoraConfig(**settings, omega=config.omega, gain=config.gain)
    return LoraConfig(**settings)


def made_trainable(model: Any, config: LanguageConfig, *, classifies: bool) -> Any:
    """`model` with what is trained in float32 and all else frozen, as `config.method` has it.

    Raises:
        InvalidArgumentError: no layer is called as target_modules says.
        UnsuitableModelError: a layer of that name is of a kind that the method does not have.
    """
    import peft

    if config.method == "full":
        return model.requires_grad_(True)
    try:
        adapted = peft.get_peft_model(model, adapter_config(config, classifies=classifies))
    except (InvalidArgumentError, UnsuitableModelError):
        raise
    except (ValueError, TypeError, NotImplementedError, KeyError) as error:
        reason = " ".join(str(error).split())[:400]
        named = ", ".join(config.target_modules) or "all linear layers"
        kind = InvalidArgumentError if "not found in the base model" in reason else UnsuitableModelError
        raise kind(
            f"method={config.method!r} cannot adapt {named} of {type(model).__name__}: {reason}. Name layers that it "
            "can with --target-modules, or use --method full"
        ) from error
    adapted.peft_config["default"].base_model_name_or_path = config.model
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    return adapted


@torch.no_grad()
def update_numbers(model: Any) -> dict[str, float]:
    """What an adapter has learned, on average over its layers; nothing for a model without one.

    The stable rank ||D||_F^2 / ||D||_2^2 of the update D, before DoRA's norms, and of a sine adapter std(omega B A):
    below 1 it is LoRA with another scale.
    """
    from peft.tuners.lora import LoraLayer

    from wellposed.adapters.layers import SineLayer
    from wellposed.adapters.report import product_std
    from wellposed.adapters.subspace import dominant

    ranks, stds = [], []
    for layer in model.modules():
        if isinstance(layer, LoraLayer) and "default" in layer.r:
            delta = layer.get_delta_weight("default").float()
            largest = float(dominant(delta, 1)[1])
            ranks.append(float((delta / largest).square().sum()) if largest > 0 else 0.0)
        if isinstance(layer, SineLayer):
            stds.append(layer.omega["default"] * product_std(*layer.factors("default")))
    found = {"mean_stable_rank": ranks, "mean_argument_std": stds}
    return {name: sum(values) / len(values) for name, values in found.items() if values}
