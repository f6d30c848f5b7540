"""Where a run takes place: accelerate's view of devices, precision and processes."""

import os
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from wellposed.errors import InvalidArgumentError
from wellposed.runs import device_named


def make_accelerator(device: str, precision: Literal["auto", "fp32", "bf16"], *, compile: bool) -> Accelerator:
    """An accelerator for `device` ("auto", "cpu", "cuda", "cuda:1"); alone, or one of the processes of a launch."""
    AcceleratorState._reset_state(reset_partial_state=True)  # it would not let a second run use another device
    if device not in {"auto", "cpu"}:
        place = device_named(device)
        if place.type == "cuda" and place.index is not None:
            torch.cuda.set_device(place)
    on_cpu = device == "cpu" or os.environ.get("ACCELERATE_USE_CPU", "").lower() in {"1", "true", "yes"}
    bf16 = precision == "bf16" or (
        precision == "auto" and not on_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    )
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision="bf16" if bf16 else "no",
        dynamo_backend="inductor" if compile else "no",
    )
    kind = accelerator.distributed_type
    if kind not in {DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU}:
        raise InvalidArgumentError(
            f"accelerate is set to {kind.value}; this training runs in one process or with DDP: "
            "accelerate launch --multi_gpu -m wellposed train ..."
        )
    return accelerator
