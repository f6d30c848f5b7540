"""`wellposed.load_adapter`: packed and plain folders onto a model."""

import os
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn

from wellposed.compression.files import read_packed
from wellposed.compression.folders import CONFIG, PlainAdapter, check_config, is_packed, write_plain
from wellposed.compression.updates import layers_of
from wellposed.errors import InvalidArgumentError, ModelFileError, WellposedError


def load_adapter(
    model: nn.Module, folder: str | os.PathLike[str], adapter_name: str = "default", is_trainable: bool = False
) -> Any:
    """The model with the adapter in `folder`, written by `wellposed compress` or PEFT, as a PeftModel.

    A packed adapter comes out as `peft.PeftModel.from_pretrained` would load it from the folder that
    `wellposed compress --expand` makes of it, bit by bit.

    Args:
        model: a base model; or a PeftModel, which gets one adapter more, not yet active.
        folder: packed or plain.
        adapter_name: as in PEFT.
        is_trainable: whether the factors ask for gradients; the model is in eval mode otherwise.

    Raises:
        ModelFileError: it is no adapter, it is damaged, or it does not fit the model.
        InvalidArgumentError: the model has an adapter of this name.
    """
    import peft

    import wellposed.adapters  # noqa: F401  PEFT has to know sine adapters

    folder = Path(folder)
    if adapter_name in getattr(model, "peft_config", {}):
        raise InvalidArgumentError(f"adapter_name={adapter_name!r}: the model has one of this name; expected another")
    if not is_packed(folder):
        if not (folder / CONFIG).is_file():
            raise ModelFileError(f"{folder} is no adapter: it has neither a packed file nor {CONFIG}")
        return _load(model, folder, adapter_name, is_trainable=is_trainable)
    packed = read_packed(folder)
    check_config(packed.config, folder)
    tensors = packed.tensors()
    _check_shapes(model, PlainAdapter(packed.config, tensors), folder)
    with TemporaryDirectory() as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found missing adapter keys")  # `_check_complete` makes an error of it
        write_plain(packed, Path(temporary))
        try:
            # On the meta device first: what the configuration asks for takes no memory that the file has no values for.
            loaded = _load(model, Path(temporary), adapter_name, is_trainable=is_trainable, low_cpu_mem_usage=True)
        except WellposedError:
            raise
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelFileError(f"{folder} does not fit {type(model).__name__}: {str(error)[:300]}") from error
    _check_complete(loaded, peft.get_peft_model_state_dict, tensors, adapter_name, folder)
    return loaded


def _load(model: nn.Module, folder: Path, adapter_name: str, **settings: Any) -> Any:
    import peft

    if isinstance(model, peft.PeftModel):
        model.load_adapter(str(folder), adapter_name, **settings)
        return model
    return peft.PeftModel.from_pretrained(model, str(folder), adapter_name, **settings)


def _check_shapes(model: nn.Module, adapter: PlainAdapter, folder: Path) -> None:
    """Raise, before the model is changed, where a layer it has is of another size than the adapter's."""
    whole: Any = model
    base = whole.get_base_model() if hasattr(model, "get_base_model") else model
    modules = dict(base.named_modules())
    layers = layers_of(adapter)
    if not any(layer.name in modules for layer in layers):
        raise ModelFileError(
            f"{folder} is for layers such as {layers[0].name}, which {type(base).__name__} does not have"
        )
    for layer in layers:
        module: Any = modules.get(layer.name)
        module = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        weight: Any = getattr(module, "weight", None)
        plain = (
            isinstance(weight, Tensor) and weight.is_floating_point() and type(weight).__module__.startswith("torch.")
        )
        if plain and weight.numel() != layer.a.shape[1] * len(layer.b):
            raise ModelFileError(
                f"{folder} has an update of shape {len(layer.b)} x {layer.a.shape[1]} for {layer.name}, whose weight "
                f"is {tuple(weight.shape)}. It was trained on another base model: load it onto that one."
            )


def _check_complete(loaded: Any, saved: Any, tensors: dict[str, Tensor], adapter_name: str, folder: Path) -> None:
    """Raise unless every tensor of the file is in the model, and every one of the model was in the file."""
    there = saved(loaded, adapter_name=adapter_name, save_embedding_layers=False)
    without = [name for name, tensor in there.items() if tensor.is_meta]
    unused = [name for name in tensors if name not in there]
    if without or unused:
        what = f"has no values for {without[0]}" if without else f"has {unused[0]}, for which there is no place"
        raise ModelFileError(
            f"{folder} does not fit {type(loaded).__name__}: it {what} ({len(without) + len(unused)} such tensors). It "
            "was trained on another base model: load it onto that one, and load this one again."
        )
