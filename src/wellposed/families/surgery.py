"""The one mechanism of surgery: a block's class is swapped for a subclass whose forward has named sites.

A *site* is a named place in a block's forward where a method may act. `Sites` says what happens at each of
them; its default is what the block's own library does. Because only the class of the instance changes,
parameters, buffers, state-dict keys, hooks, `deepcopy`, pickling, `torch.compile` and FSDP see the block they
saw before, several changes compose on one block, and setting the default sites puts the library's class back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

LOG_GAIN = "log_scale_bias"
"""The parameter (H,) that an attention layer may have at its site; optimizers do not let a bias decay."""


class Attending(Protocol):
    """What may take the place of softmax(logit_scale q k^T) v in an attention layer.

    `causal`: each row sees the keys up to its own, the last row all of them. `mask`: True for what can be seen, (B, M)
    or to be broadcast to (B, H, N, M), as is `bias`, which is added to the logits. `log_gain`: the logarithm of a
    factor for each head, (H,).
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        logit_scale: float,
        causal: bool = False,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        log_gain: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """What the heads return, (B, H, N, d)."""
        ...

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        *,
        logit_scale: float,
        causal: bool = False,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        log_gain: Tensor | None = None,
    ) -> Tensor:
        """The matrices (B, H, N, M) by which it multiplies the values."""
        ...


@dataclass(frozen=True)
class Sites:
    """What a block does at its named sites."""

    cut: frozenset[str] = frozenset()
    """The residual additions that are left out, a subset of {"attention", "mlp"}."""
    patches: Callable[[Tensor], Tensor] | None = None
    """What is done to the pixel patches of every image, (B, N, channels x height x width), before they are embedded."""
    tokens: Callable[[Tensor], Tensor] | None = None
    """What is done to the embedded patches, (B, N, D), before position embedding and class token."""
    attention: Attending | None = None
    """What an attention layer computes from its queries, keys and values."""


class SitedModule(nn.Module):
    """A library's module whose forward is written once more, with its sites named.

    Subclasses hold nothing but that forward. With the default `Sites` it computes exactly what the library's does.
    """

    wp_forward_of: ClassVar[str]
    """Path of the library's class whose forward this is."""
    wp_sites: ClassVar[Sites] = Sites()
    wp_forward: ClassVar[type[SitedModule]]
    wp_library_class: ClassVar[type[nn.Module]]

    def wp_residual(
        self, skip: str, x: Tensor, branch: Tensor, drop_path: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """The site of a residual addition: x + drop_path(branch), or the branch alone where the skip is cut.

        Without its skip a dropped branch would leave no signal at all, so drop-path is off there.
        """
        if skip in self.wp_sites.cut:
            return branch
        return x + (branch if drop_path is None else drop_path(branch))

    def wp_attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """The site of attention: what stands there makes of queries, keys and values, (B, H, N, d)."""
        site = self.wp_sites.attention
        assert site is not None
        return site(q, k, v, log_gain=getattr(self, LOG_GAIN, None), **options)

    def wp_attention_weights(self, q: Tensor, k: Tensor, **options: Any) -> Tensor:
        """The matrices (B, H, N, M) of what stands at the site of attention."""
        site = self.wp_sites.attention
        assert site is not None
        return site.weights(q, k, log_gain=getattr(self, LOG_GAIN, None), **options)

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        """Pickle and deepcopy by what the class was made from: it has no importable name of its own."""
        if "wp_sites" not in vars(type(self)):
            return super().__reduce_ex__(protocol)
        return _new_instance, (self.wp_forward, self.wp_library_class, self.wp_sites), self.__getstate__()


def sites_of(module: nn.Module) -> Sites:
    """What `module` does at its sites."""
    return module.wp_sites if isinstance(module, SitedModule) else Sites()


def library_class(module: nn.Module) -> type[nn.Module]:
    """The class `module` had before any surgery."""
    return module.wp_library_class if isinstance(module, SitedModule) else type(module)


def set_sites(module: nn.Module, forward: type[SitedModule], sites: Sites) -> None:
    """Make `module` run `forward` with `sites`, or the library's own forward when the sites are the default ones."""
    original = library_class(module)
    module.__class__ = original if sites == Sites() else _sited_class(forward, original, sites)


def drop_compiled_code() -> None:
    """Make torch.compile start anew: not every torch notices that a module it has compiled has another class."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


# One class for the same changes: torch.compile, pickle and wrapping policies compare classes.
_SITED_CLASSES: dict[tuple[type[SitedModule], type[nn.Module], Sites], type[SitedModule]] = {}


def _sited_class(forward: type[SitedModule], original: type[nn.Module], sites: Sites) -> type[SitedModule]:
    """The subclass of `original` that runs `forward` with `sites`; same __name__, so wrapping policies find it."""
    key = (forward, original, sites)
    if key not in _SITED_CLASSES:
        attributes = {
            "wp_sites": sites,
            "wp_forward": forward,
            "wp_library_class": original,
            "__module__": forward.__module__,
            "__doc__": original.__doc__,
        }
        _SITED_CLASSES[key] = type(original.__name__, (forward, original), attributes)
    return _SITED_CLASSES[key]


def _new_instance(forward: type[SitedModule], original: type[nn.Module], sites: Sites) -> SitedModule:
    sited = _sited_class(forward, original, sites)
    return sited.__new__(sited)
