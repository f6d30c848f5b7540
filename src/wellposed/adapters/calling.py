"""Layers that have to be called for their weights to be there: under FSDP, offloading and other hooks."""

from torch import Tensor, nn


class Factor(nn.Linear):
    """A factor of an adapter. Called without an input it gives its weight.

    FSDP and offloading bring a module's weights in only while it is called, and each may have wrapped a single factor.
    """

    def forward(self, x: Tensor | None = None) -> Tensor:
        return self.weight.clone() if x is None else super().forward(x)


def weight_of(factor: nn.Module) -> Tensor:
    """The weight of a factor, wherever it is kept."""
    plain = type(factor) is Factor and not is_called_by_others(factor)
    return factor.weight if plain else factor()  # type: ignore[return-value]


def is_called_by_others(module: nn.Module) -> bool:
    """Whether something hangs on the module's call, so that it has to be called."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in module.__dict__
