"""What keeps a run safe: a gentle Ctrl-C, flushed denormals, repeatable kernels, and the layer that failed first."""

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgumentError

_OMP_PAUSE_SOFT = 1


class Interrupts:
    """Turns the first SIGINT or SIGTERM into a wish to stop, which the loop grants; the second stops at once."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Numbers below 1e-38 count as 0 on the CPU: tokens that collapse produce them, and they slow a run threefold."""
    _flush_denormals(True)
    try:
        yield
    finally:
        _flush_denormals(False)


def _flush_denormals(on: bool) -> None:
    torch.set_flush_denormal(on)
    # The setting belongs to a thread, and only new threads inherit it: have OpenMP end those of its pool.
    for library in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        with suppress(OSError, AttributeError):  # an OpenMP older than 5.0
            ctypes.CDLL(str(library)).omp_pause_resource_all(_OMP_PAUSE_SOFT)


@contextmanager
def repeatable(device: torch.device, *, wanted: bool = True) -> Iterator[None]:
    """On a GPU, only kernels that give the same result every time; what torch has none for raises RuntimeError."""
    if device.type != "cuda" or not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def is_repeatable(model: nn.Module, *images: Tensor) -> bool:
    """Whether torch has repeatable kernels for all that `model` does; where not, it is told to make do without.

    To be called within `repeatable`, before anything depends on the model: one forward and backward pass in eval mode
    tells, and nothing is left of it. Of several outputs the first is used. A model that cannot take the images raises
    InvalidArgumentError.
    """
    try:
        found = model.eval()(*images)
        (found if isinstance(found, Tensor) else found[0]).float().sum().backward()
    except Exception as error:
        if torch.are_deterministic_algorithms_enabled() and "deterministic" in str(error):
            torch.use_deterministic_algorithms(True, warn_only=True)
            return False
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        shapes = " and ".join(str(tuple(part.shape[1:])) for part in images)
        raise InvalidArgumentError(
            f"the model cannot be trained on images of shape {shapes} ({reason}); "
            "choose another --model, --image-size or --model-args"
        ) from error
    finally:
        model.zero_grad()
        model.train()
    return True


class FirstFailure:
    """Watches every layer of `model` and remembers the first whose output or gradient is not finite."""

    def __init__(self, model: nn.Module) -> None:
        self.where: str | None = None
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            if not list(module.children()):
                self._handles.append(module.register_forward_hook(self._watch_output(name)))
        for name, param in model.named_parameters():
            if param.requires_grad:
                self._handles.append(param.register_post_accumulate_grad_hook(self._watch_gradient(name)))

    def __enter__(self) -> "FirstFailure":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _watch_output(self, name: str) -> Any:
        def watch(module: nn.Module, inputs: Any, output: Any) -> None:
            if self.where is None and isinstance(output, Tensor) and not output.isfinite().all():
                own = all(param.isfinite().all() for param in module.parameters())
                self.where = f"the output of {name}" if own else f"a weight of {name}"

        return watch

    def _watch_gradient(self, name: str) -> Any:
        def watch(param: Tensor) -> None:
            if self.where is None and param.grad is not None and not param.grad.isfinite().all():
                self.where = f"the gradient of {name}"

        return watch
