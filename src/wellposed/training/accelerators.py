"""Where a run takes place: accelerate's view of devices, precision and processes."""

import os
import sys
from collections.abc import Callable
from shutil import which
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from wellposed.errors import InvalidArgumentError
from wellposed.runs import device_named


def make_accelerator(device: str) -> Accelerator:
    """An accelerator for `device` ("auto", "cpu", "cuda", "cuda:1"); alone, or one of the processes of a launch.

    Precision and compilation are left to the task: accelerate would wrap the model's forward for them.
    """
    AcceleratorState._reset_state(reset_partial_state=True)  # it would not let a second run use another device
    if device not in {"auto", "cpu"}:
        place = device_named(device)
        if place.type == "cuda" and place.index is not None:
            torch.cuda.set_device(place)
    on_cpu = device == "cpu" or os.environ.get("ACCELERATE_USE_CPU", "").lower() in {"1", "true", "yes"}
    accelerator = Accelerator(cpu=on_cpu, mixed_precision="no", dynamo_backend="no")
    kind = accelerator.distributed_type
    if kind not in {DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU}:
        raise InvalidArgumentError(
            f"accelerate is set to {kind.value}; this training runs in one process or with DDP: "
            "accelerate launch --multi_gpu -m wellposed train ..."
        )
    if device != "auto" and torch.device(device).type != accelerator.device.type:
        raise InvalidArgumentError(f"device={device!r}: accelerate is set to use {accelerator.device} here")
    return accelerator


def use_bf16(precision: Literal["auto", "fp32", "bf16"], device: torch.device) -> bool:
    """Whether to compute in bfloat16: as asked, or on GPUs that have it."""
    return precision == "bf16" or (precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported())


def compiled(function: Callable[..., Any], accelerator: Accelerator) -> Callable[..., Any]:
    """`function` compiled; alone on a GPU also replayed as CUDA graphs: to start its kernels takes as long as they do.

    What a call returns is overwritten by the next one.

    Raises:
        InvalidArgumentError: there is no compiler for what torch.compile writes.
    """
    _check_compiler(accelerator.device)
    graphs = accelerator.device.type == "cuda" and accelerator.num_processes == 1
    return torch.compile(function, mode="reduce-overhead" if graphs else None)


def _check_compiler(device: torch.device) -> None:
    """Say now what torch.compile would say late and at length."""
    on_cpu = {"darwin": ["clang++"], "win32": ["cl"]}.get(sys.platform, ["g++"])
    variable, names = {"cuda": ("CC", ["gcc", "clang", "cl"]), "cpu": ("CXX", on_cpu)}.get(device.type, ("", []))
    if names and not os.environ.get(variable) and not any(map(which, names)):
        raise InvalidArgumentError(
            f"torch.compile needs a compiler and found no {' or '.join(names)}: install one, set {variable} to its "
            "path, or do without (--no-compile)"
        )
