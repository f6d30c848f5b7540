"""The ways to fine-tune: all weights, or one of PEFT's and our adapters."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgumentError, UnsuitableModelError
from wellposed.families import readable_name
from wellposed.lowrank.targets import none_of
from wellposed.spectrum.extremes import gram_matrices, largest_eigenvalue
from wellposed.training.finetuning.config import FinetuneConfig


def adapter_config(config: FinetuneConfig, more: Mapping[str, Any]) -> Any:
    """What PEFT asks for to make the adapter of `config`; `more` is what it has to know of the model."""
    from peft import LoraConfig

    from wellposed.adapters import SineLoraConfig

    settings: dict[str, Any] = {
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "target_modules": list(config.target_modules) or "all-linear",
        "use_rslora": config.method == "rslora",
        "use_dora": config.method.endswith("dora"),
        **more,
    }
    if config.method.startswith("sine"):
        return SineLoraConfig(**settings, omega=config.omega, gain=config.gain)
    return LoraConfig(**settings)


def made_trainable(model: Any, config: FinetuneConfig, more: Mapping[str, Any]) -> Any:
    """`model` with what is trained in float32 and all else frozen, as `config.method` has it.

    Args:
        model: in the type that what is frozen is to have.
        config: what to train.
        more: what PEFT's configuration has to say of the model: its task_type, target_modules, modules_to_save.

    Raises:
        InvalidArgumentError: no layer is called as target_modules says.
        UnsuitableModelError: a layer of that name is of a kind that the method does not have.
    """
    import peft

    if config.method == "full":
        return model.requires_grad_(True)
    try:
        adapted = peft.get_peft_model(model, adapter_config(config, more))
    except (InvalidArgumentError, UnsuitableModelError):
        raise
    except (ValueError, TypeError, NotImplementedError, KeyError) as error:
        reason = " ".join(str(error).split())[:400]
        named = ", ".join(config.target_modules) or "all linear layers"
        if "not found in the base model" in reason or "No modules were targeted" in reason:
            layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
            raise InvalidArgumentError(
                f"target_modules={named}: no layer of {type(model).__name__} that is left to adapt is called so. "
                f"{none_of(config.target_modules, layers)}"
            ) from error
        raise UnsuitableModelError(
            f"method={config.method!r} cannot adapt {named} of {type(model).__name__}: {reason}. Name layers that it "
            "can with --target-modules, or use --method full"
        ) from error
    adapted.peft_config["default"].base_model_name_or_path = config.model
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    return adapted


def rounding_layers(model: nn.Module) -> list[Any]:
    """The adapted layers whose input PEFT brings to float32 for nothing where autocast makes bfloat16 of it again.

    DoRA's are none of them: their norms are then taken in float32.
    """
    from peft.tuners.lora import Linear

    return [layer for layer in model.modules() if type(layer) is Linear and not layer.lora_variant]


def compile_blocks(model: nn.Module) -> None:
    """Compile the blocks that `model` repeats, in place; those that are alike share their code."""
    blocks = list(_repeated(model))
    if not blocks:
        raise UnsuitableModelError(f"{type(model).__name__} has no repeated blocks: leave --compile out")
    for block in blocks:
        block.compile()


def _repeated(model: nn.Module) -> Iterator[nn.Module]:
    """Members of the outermost lists whose members are of one kind and have weights."""
    for child in model.children():
        members = list(child) if isinstance(child, nn.ModuleList | nn.Sequential) else []
        kinds = {type(member) for member in members}
        if len(members) > 1 and len(kinds) == 1 and any(True for _ in child.parameters()):
            yield from members
        else:
            yield from _repeated(child)


@torch.no_grad()
def layer_numbers(model: Any) -> dict[str, float]:
    """What an adapter has learned in each layer, under "layer/stable_rank" and "layer/argument_std".

    The stable rank ||D||_F^2 / ||D||_2^2 of the update D, before DoRA's norms, and of a sine adapter std(omega B A):
    below 1 it is LoRA with another scale. No random number is drawn.
    """
    from peft.tuners.lora import LoraLayer

    from wellposed.adapters.layers import SineLayer
    from wellposed.adapters.report import product_std

    found, ranks = dict[str, float](), dict[str, Tensor]()
    for full_name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or "default" not in layer.r:
            continue
        name = readable_name(full_name).removeprefix("base_model.model.")
        ranks[f"{name}/stable_rank"] = _stable_rank(layer.get_delta_weight("default").float().flatten(1))
        if isinstance(layer, SineLayer):
            found[f"{name}/argument_std"] = layer.omega["default"] * product_std(*layer.factors("default"))
    return found | dict(zip(ranks, torch.stack([*ranks.values()]).tolist() if ranks else (), strict=True))


def _stable_rank(matrix: Tensor) -> Tensor:
    """0 of a matrix of zeros; not read from the device. A GPU multiplies fast, and is slow to factor a small matrix."""
    from wellposed.adapters.subspace import dominant

    if matrix.device.type == "cpu":
        largest = dominant(matrix, 1)[1][0]
        return (matrix / largest.where(largest > 0, 1.0)).square().sum()
    gram = gram_matrices(matrix)
    largest = largest_eigenvalue(gram)
    return gram.trace() / largest.where(largest > 0, 1.0)


def update_numbers(model: Any) -> dict[str, float]:
    """The means of `layer_numbers` over the layers; nothing for a model without an adapter."""
    numbers = layer_numbers(model)
    means: dict[str, float] = {}
    for kind in ("stable_rank", "argument_std"):
        values = [value for name, value in numbers.items() if name.endswith(f"/{kind}")]
        means |= {f"mean_{kind}": sum(values) / len(values)} if values else {}
    return means
