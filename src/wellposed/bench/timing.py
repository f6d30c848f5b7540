"""How long a piece of work takes."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def seconds(work: Callable[[], Any], device: "torch.device", *, repeats: int, warm_up: int = 1) -> list[float]:
    """The times of `repeats` runs of `work`, each with all that it starts on `device`, after some that do not count."""
    import torch

    times = []
    for _ in range(warm_up + repeats):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return times[warm_up:]
