"""Adapter folders: PEFT's own, packed ones, and writing either of them whole or not at all."""

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from wellposed.compression.files import PACKED, write_packed
from wellposed.compression.packed import PackedAdapter
from wellposed.errors import InvalidArgumentError, ModelFileError, RunError

SINE_LORA = "WELLPOSED_SINE_LORA"
KINDS = ("LORA", SINE_LORA)
CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_POINTER = (
    "a packed adapter of wellposed: load it with wellposed.load_adapter(model, folder), or make an ordinary PEFT "
    "folder of it with `wellposed compress FOLDER --expand --out DIR`"
)
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class PlainAdapter:
    """What PEFT saves of a LoRA, DoRA, rsLoRA or sine adapter."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


def is_packed(folder: Path) -> bool:
    """Whether `compress` wrote the folder."""
    return (folder / PACKED).is_file()


def read_plain(folder: Path) -> PlainAdapter:
    """The adapter in a folder of PEFT's; on the CPU.

    Raises:
        ModelFileError: it is no folder of an adapter that can be packed, or one that is damaged.
    """
    if is_packed(folder):
        raise ModelFileError(
            f"{folder} is packed already. Expand it first: wellposed compress {folder} --expand --out DIR"
        )
    if not (folder / CONFIG).is_file():
        raise ModelFileError(
            f"{folder} is no adapter: it has no {CONFIG}. Expected a folder that PEFT's save_pretrained wrote"
        )
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{folder / CONFIG} cannot be read ({error}); save the adapter again") from error
    check_config(config, folder)
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        raise ModelFileError(
            f"{folder} was initialized by {init!r}, which also changes the base model. Save it as an ordinary LoRA "
            "first: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    tensors = _weights(folder)
    broken = [name for name, each in tensors.items() if each.is_floating_point() and not each.isfinite().all()]
    if broken:
        raise ModelFileError(
            f"{broken[0]} in {folder} holds NaN or Inf ({len(broken)} such tensors): nothing to compress"
        )
    return PlainAdapter(config, tensors)


def check_config(config: Any, where: Path) -> None:
    """ModelFileError unless `config` is of a kind of adapter that can be packed."""
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind not in KINDS:
        raise ModelFileError(f"{where} has an adapter of type {str(kind)[:80]!r}: expected one of {', '.join(KINDS)}")
    if config.get("target_parameters"):
        raise ModelFileError(
            f"{where} adapts single parameters (target_parameters): only adapters of layers can be packed"
        )


def write_plain(adapter: PackedAdapter, folder: Path) -> None:
    """Write an ordinary PEFT folder."""
    tensors = {name: tensor.contiguous() for name, tensor in adapter.tensors().items()}
    save_file(tensors, str(folder / WEIGHTS), metadata={"format": "pt"})
    _write_config(folder, adapter.config)


def write_packed_folder(adapter: PackedAdapter, folder: Path) -> None:
    """Write the packed file, and beside it a configuration on which PEFT stops with what to do instead."""
    write_packed(adapter, folder / PACKED)
    base = adapter.config.get("base_model_name_or_path")
    _write_config(folder, {"base_model_name_or_path": base, "peft_type": _POINTER})


@contextmanager
def new_folder(out: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a folder beside `out` that takes its place in the end, or on any error is removed.

    Raises:
        InvalidArgumentError: there is something at `out`.
        RunError: it cannot be written.
    """
    target = Path(out)
    check_free(target)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        permissions = (temporary / CONFIG).stat().st_mode
        for file in temporary.iterdir():
            file.chmod(permissions)  # safetensors makes its own files more private than others are here
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        temporary.replace(target)
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot write {target} ({error}). Make room, or choose another place for it.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_free(out: Path) -> None:
    """InvalidArgumentError if there is something at `out`."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidArgumentError(
            f"out={str(out)!r}: there is something; expected a name that is free, or an empty folder"
        )


def _weights(folder: Path) -> dict[str, Tensor]:
    try:
        if (folder / WEIGHTS).is_file():
            tensors = load_file(str(folder / WEIGHTS))
        elif (folder / PICKLED).is_file():
            tensors = torch.load(folder / PICKLED, map_location="cpu", weights_only=True)
        else:
            raise ModelFileError(
                f"{folder} has neither {WEIGHTS} nor {PICKLED}: expected what PEFT's save_pretrained writes"
            )
    except ModelFileError:
        raise
    except Exception as error:  # torch.load's share no class
        raise ModelFileError(
            f"the weights in {folder} cannot be read ({str(error)[:200]}); save the adapter again"
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(each, Tensor) for each in tensors.values()):
        raise ModelFileError(f"{folder / PICKLED} holds something else than tensors by their names")
    return tensors


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
