"""The training step one writes first, which ours are compared with."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


def plain_step(
    model: "nn.Module", images: "Tensor", labels: "Tensor", *, compiled: bool, mode: str | None = None
) -> Callable[[], None]:
    """One batch that is used again and again: bf16 on a GPU, fused AdamW, no clipping, no schedule, no metrics."""
    import torch

    torch.compiler.reset()
    device = images.device
    model = model.to(device).train()
    forward = torch.compile(model, mode=mode) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.3, fused=device.type == "cuda")

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = torch.nn.functional.cross_entropy(forward(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step
