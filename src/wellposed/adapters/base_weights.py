"""The weight of the layer that an adapter sits on, as a plain matrix (out, in), whatever it is stored as."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from peft.utils.integrations import dequantize_bnb_weight, dequantize_module_weight
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from wellposed.errors import UnsuitableModelError

Kept = tuple[Any, ...]
"""What `restore` needs to undo `write_weight`."""

_QUANTIZERS = ("torchao", "bitsandbytes")


def is_linear(base: nn.Module) -> bool:
    """Whether `base` is a linear layer that an adapter can sit on: torch's, Conv1D, bitsandbytes' or torchao's."""
    return isinstance(base, nn.Linear | Conv1D) and isinstance(getattr(base, "weight", None), Tensor)


def is_quantized(base: nn.Module) -> bool:
    """Whether the weight is stored as something else than numbers of 16 bits or more."""
    weight: Any = base.weight
    return _library(weight) in _QUANTIZERS or not weight.is_floating_point() or weight.dtype.itemsize == 1


def is_transposed(base: nn.Module) -> bool:
    """Whether the layer stores (in, out)."""
    return isinstance(base, Conv1D | nn.Embedding)


def read_weight(base: nn.Module) -> Tensor:
    """The weight (out, in): a view, or a dequantized copy, without gradient."""
    stored: Any = base.weight
    if is_quantized(base) and _library(stored) not in _QUANTIZERS:
        raise UnsuitableModelError(
            f"the base layer stores its weight as {stored.dtype}, and how to read that is not known. Its adapters can "
            "be trained and used, without DoRA and unmerged."
        )
    if _library(stored) == "bitsandbytes":
        # PEFT's dequantize_module_weight leaves an 8-bit layer on a CPU without its scales.
        if getattr(getattr(stored, "quant_state", None), "packing_format_for_cpu", False):
            base.state_dict()  # puts a 4-bit weight back from the layout that is only for products on a CPU
        weight = dequantize_bnb_weight(stored, state=getattr(base, "state", None)).detach()
    else:
        weight = dequantize_module_weight(base).detach()
    return weight.T if is_transposed(base) else weight


def whole(tensor: Tensor) -> Tensor:
    """The tensor, put together again if FSDP2 has sharded it; all processes have to call this together then."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def keep(base: nn.Module) -> Kept:
    """What the layer has now. It holds on to the weight itself, so that undoing is exact and ties are tied again."""
    state: Any = getattr(base, "state", None)
    return base.weight, getattr(state, "CB", None), getattr(state, "SCB", None)


def restore(base: nn.Module, kept: Kept) -> None:
    """Give the layer back what it had."""
    base.weight, state_weight, state_scales = kept
    state: Any = getattr(base, "state", None)
    if state is not None:
        state.CB, state.SCB = state_weight, state_scales


def write_weight(base: nn.Module, weight_OI: Tensor, quantization: Callable[[], Any] | None = None) -> None:
    """Give the layer another weight, stored as its own is.

    Args:
        base: the layer.
        weight_OI: (out, in), in any precision; rounded once.
        quantization: for torchao, what makes the configuration that quantizes the layer.
    """
    old: Any = base.weight
    dense = weight_OI.T if is_transposed(base) else weight_OI
    if _library(old) == "torchao":
        if quantization is None:
            raise UnsuitableModelError(
                "the base layer is quantized by torchao in a way PEFT does not know, so that a merged weight could not "
                "be quantized again. Load the base model through transformers with a TorchAoConfig."
            )
        quantize_ = import_module("torchao.quantization").quantize_
        base.weight = nn.Parameter(dense.to(old.dtype), requires_grad=False)
        quantize_(base, quantization())
    elif _library(old) == "bitsandbytes":
        base.weight = _bitsandbytes_weight(old, dense.to(torch.float32))
        state: Any = getattr(base, "state", None)
        if state is not None:
            state.reset_grads()
    else:
        # A parameter of its own: where the old one is tied, the other layer keeps it.
        base.weight = nn.Parameter(dense.to(old.dtype).contiguous(), requires_grad=old.requires_grad)


def _bitsandbytes_weight(old: Any, dense: Tensor) -> Any:
    """`dense` as a Params4bit or Int8Params like `old`."""
    if type(old).__name__ == "Int8Params":
        like = {"has_fp16_weights": old.has_fp16_weights}
    else:
        hidden = {"data", "bnb_quantized", "quant_state", "requires_grad"}
        like = {name: value for name, value in vars(old).items() if not name.startswith("_") and name not in hidden}
    return type(old)(dense.to("cpu"), requires_grad=False, **like).to(old.device)


def _library(weight: Any) -> str:
    """The package that the weight's class is from."""
    return type(weight).__module__.partition(".")[0]
