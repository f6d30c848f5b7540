"""The Jacobians of a block's attention and MLP for one input, and the two parts of attention's (arXiv 2510.00345).

All are taken with respect to what the sub-block sees, the output of its norm: LayerNorm removes two directions of
every token, so the Jacobian from before it would always be singular.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wellposed.diagnosis.watching import attention_seen, calls_seen
from wellposed.families import Block
from wellposed.runs import tracked
from wellposed.spectrum import JacobianSpectrum, jacobian_spectrum


@dataclass(frozen=True)
class BlockJacobians:
    """Spectra of one block."""

    whole: dict[str, JacobianSpectrum]
    """Of "attention" and "mlp"."""
    through_values: JacobianSpectrum | None
    """Of B, how attention's output follows its values while its weights stand still ..."""
    through_weights: JacobianSpectrum | None
    """... and of the rest, E."""


def block_jacobians(model: nn.Module, found: list[Block], run: Callable[[], None]) -> list[BlockJacobians]:
    """The spectra of every block; `run` runs the model on one input."""
    parts = [part for part in ("attention", "mlp") if part in found[0].family.stages]
    calls = {}
    with attention_seen(model) as matrices:
        for part in parts:
            with calls_seen(found, part) as calls[part]:
                run()
    spectra = []
    for i, block in enumerate(tracked(found, "Jacobians")):
        whole = {part: _spectrum(*calls[part][i]) for part in parts}
        values = weights = None
        if matrices[i] is not None:
            function, x = calls["attention"][i]
            frozen = _with_frozen_weights(block, matrices[i])
            values, weights = _spectrum(frozen, x), _spectrum(_difference(function, frozen), x)
        spectra.append(BlockJacobians(whole, values, weights))
    return spectra


def _spectrum(function: Callable[[Tensor], Tensor], x: Tensor) -> JacobianSpectrum:
    """The same for the same input, whatever random numbers were drawn before."""
    return jacobian_spectrum(function, x, k=2, generator=torch.Generator(x.device).manual_seed(0))


def _with_frozen_weights(block: Block, matrices_BHNN: Tensor) -> Callable[[Tensor], Tensor]:
    """The block's attention, up to biases, as a linear map of its input: its matrices do not follow."""
    weights = block.family.weights(block.module)
    value, output, h = weights.value.view(), weights.output.view(), weights.head_dim
    last = block.module.get_submodule(block.family.stages["attention"][0])
    first = block.module.get_submodule(block.family.stages["attention input"][0])
    shared = matrices_BHNN.shape[1] // (value.shape[0] // h)

    def function(x_BND: Tensor) -> Tensor:
        b, n, _ = x_BND.shape
        values = (x_BND @ value.T).view(b, n, -1, h).transpose(1, 2).repeat_interleave(shared, 1)
        mixed = (matrices_BHNN @ values).transpose(1, 2).reshape(b, n, -1) @ output.T
        is_scale = last is not first and last is not weights.output.module  # LayerScale, or nothing
        scaled: Tensor = last(mixed) if is_scale else mixed
        return scaled

    return function


def _difference(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: first(x) - second(x)
