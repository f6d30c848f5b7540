"""Functions of fixed tensors, launched kernel by kernel at first and as CUDA graphs later."""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Graph:
    """The CUDA graph of a function that reads and writes the same tensors at every call.

    A call runs the function as it is until `patience` calls in a row had the same key; then the function is captured,
    and replayed as long as the key stays. Patience doubles with every capture, so that where the key keeps changing
    little time goes into capturing; a capture that fails was the last. What the function allocates stays allocated.
    """

    def __init__(self, patience: float = 1) -> None:
        self.patience = patience
        self._key: Hashable = None
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    @property
    def pool(self) -> Any:
        """The handle of the memory that the captured function allocates from."""
        return None if self._graph is None else self._graph.pool()

    def run(self, function: Callable[[], object], key: Hashable, device: torch.device, pool: Any = None) -> None:
        """Run `function`; `key` holds all that its work on this device depends on, `pool` is memory it may share."""
        if key != self._key:
            self.forget()
            self._key = key
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():  # by someone else, who wants the kernels themselves
                function()
                return
            if self._graph is None and self._calls >= self.patience:
                self._capture(function, pool)
        if self._graph is not None:
            self._graph.replay()
            return
        self._calls += 1
        function()

    def forget(self) -> None:
        """Let go of the captured graph and of what the key holds."""
        self._key, self._graph, self._calls = None, None, 0

    def _capture(self, function: Callable[[], object], pool: Any) -> None:
        """Record `function` without running it; the calls before this one have warmed up all that it uses."""
        self.patience *= 2
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                function()
        except RuntimeError:
            torch.cuda.set_stream(stream)
            self.patience = math.inf
        else:
            self._graph = graph


class Graphs:
    """The graphs, by name, of functions that run one after the other and leave nothing in the memory they share."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[Hashable, torch.device], Graph] = {}

    def run(self, name: Hashable, function: Callable[[], object], key: Hashable, device: torch.device) -> None:
        graph = self._graphs.setdefault((name, device), Graph())
        pools = (other.pool for (_, where), other in self._graphs.items() if where == device)
        graph.run(function, key, device, next(filter(None, pools), None))

    def forget(self, name: Hashable) -> None:
        """Let go of what `name` has captured."""
        for (known, _), graph in self._graphs.items():
            if known == name:
                graph.forget()

    def captured(self) -> list[Hashable]:
        """The names of the functions that are replayed."""
        return [name for (name, _), graph in self._graphs.items() if graph.is_captured]


def side_by_side(jobs: Sequence[Callable[[], T]], device: torch.device) -> list[T]:
    """The results of jobs that do not depend on each other; while a graph is captured, on parallel branches of it."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return [job() for job in jobs]
    trunk, branches, results = torch.cuda.current_stream(device), _branches(device), []
    for branch in branches:
        branch.wait_stream(trunk)
    for i, job in enumerate(jobs):
        with torch.cuda.stream(branches[i % len(branches)]):
            results.append(job())
    for branch in branches:
        trunk.wait_stream(branch)
    return results


@cache
def _branches(device: torch.device) -> list[torch.cuda.Stream]:
    """As many as have something to do in a transformer: each holds memory of its own."""
    return [torch.cuda.Stream(device) for _ in range(3)]
