"""Devices by name."""

from typing import TYPE_CHECKING

from wellposed.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch


def device_named(name: str) -> "torch.device":
    """The device `name`, once it is sure that this machine has it; "auto" is a GPU where there is one."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidArgumentError(f"device {name!r} cannot be used here ({reason}); 'cpu' always can") from error
    return device
