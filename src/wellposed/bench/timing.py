"""How long a piece of work takes."""

import time
from collections.abc import Callable
from math import ceil
from statistics import median
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


def queued_seconds(
    work: Callable[[], Any], device: "torch.device", *, repeats: int, calls: int = 5
) -> tuple[float, float]:
    """Median seconds of `work` on a GPU by its own clock, and of the host to ask for it; three windows warm up.

    Before each window of `calls` enough large products are queued for all its calls to have been asked for by the time
    these are over, so that the first number knows nothing of the second.
    """
    import torch

    filler = torch.ones(8192, 8192, dtype=torch.bfloat16, device=device)
    products, on_gpu, on_host = 3, [], []
    with torch.cuda.device(device):
        for _ in range(3 + repeats):
            before, start, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            before.record()
            for _ in range(products):
                filler @ filler
            start.record()
            asking = time.perf_counter()
            for _ in range(calls):
                work()
            on_host.append(time.perf_counter() - asking)
            end.record()
            end.synchronize()
            on_gpu.append(start.elapsed_time(end) / 1e3)
            if len(on_host) == 2:  # the first had to compile
                each = before.elapsed_time(start) / 1e3 / products
                products = max(products, ceil(1.5 * on_host[1] / each))
    return median(on_gpu[3:]) / calls, median(on_host[3:]) / calls
