"""Per-sample gradients of a model's outputs, as the layers that `layer_products` multiplies.

Every sample goes through the model by itself, under vmap, and each layer's output is shifted by 0: derivatives by that
shift are the layer's gradients g, in one backward pass per output and without those of the parameters.

Shapes: N samples of K outputs; layers of S maps of T tokens to O features.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellposed.errors import InvalidArgumentError
from wellposed.spectrum.layer_products import Layer, Size
from wellposed.spectrum.modes import in_eval_mode

Values = dict[str, Tensor]
HF_LINEAR = "transformers.pytorch_utils.Conv1D"
"""Linear, with its weight transposed."""
Hook = Callable[[Any, Tensor, Tensor], Tensor]


@contextmanager
def evaluated(model: nn.Module) -> Iterator[Values]:
    """The model in eval mode, ready for all derivatives; afterwards its modules are in the modes they were in.

    Gives its parameters and copies of its buffers, in float32 where they have 16 bits.
    """
    half = {torch.float16, torch.bfloat16}
    derivable = torch.inference_mode(False), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH)
    with ExitStack() as contexts:
        for context in (in_eval_mode(model), *derivable, warnings.catch_warnings()):
            contexts.enter_context(context)
        # The fused kernels have no forward-mode derivative, and torch warns of itself when it first takes one.
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        tensors = {name: buffer.clone() for name, buffer in model.named_buffers()} | dict(model.named_parameters())
        yield {name: (value.float() if value.dtype in half else value).detach() for name, value in tensors.items()}


@dataclass(frozen=True)
class Found:
    """What one sample tells about a model."""

    layers: list[Layer]
    outputs: int
    operations: float
    """Of a forward pass."""
    saved: int
    """Bytes that it keeps for a backward pass."""


def find_layers(model: nn.Module, values: Values, trained: list[str], x_1: Tensor) -> Found:
    """The layers through which the `trained` parameters reach the outputs.

    A module is a layer if it is called once and no other operation uses its parameters; other parameters are layers
    of their own.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports triton

    params = {name: values[name].detach().requires_grad_() for name in trained}
    named = {id(param): name for name, param in model.named_parameters() if name in params}
    own = {module: tuple(named[id(p)] for p in module.parameters() if id(p) in named) for module in model.modules()}
    called: list[Layer] = []
    saved: dict[int, int] = {}

    def record(module: Any, seen: Tensor, output: Tensor) -> Tensor:
        S, channels = (module.groups, output.shape[1]) if isinstance(module, nn.Conv2d) else (1, output.shape[-1])
        I = sum(params[name].numel() for name in own[module]) // channels  # noqa: E741
        size = Size(S, output.numel() // channels, I, channels // S, isinstance(module, nn.Embedding))
        called.append(Layer(own[module], size, module))
        return output

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = {module: record for module in model.modules() if own[module] and _is_linear(module)}
    keeping = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with _hooked(hooks), FlopCounterMode(display=False) as counter, keeping:
        output = outputs_of(model, values | params, x_1)
    if not output.requires_grad:
        raise InvalidArgumentError(f"the output, {output.dtype}, has no derivative by any parameter that requires it")
    uses = _uses(output)
    calls = Counter(layer.module for layer in called)
    layers = [
        layer
        for layer in called
        if calls[layer.module] == 1 and all(uses[id(params[name])] == 1 for name in layer.names)
    ]
    known = {name for layer in layers for name in layer.names}
    alone = [name for name, param in params.items() if uses[id(param)] and name not in known]
    layers += [Layer((name,), Size(1, 1, 1, params[name].numel())) for name in alone]
    weights_at = {value.untyped_storage().data_ptr() for value in values.values()}
    kept = sum(size for address, size in saved.items() if address not in weights_at)
    return Found(layers, output.shape[1], counter.get_total_flops(), kept)


def _uses(output: Tensor) -> Counter[int]:
    """How many operations between them and the output use each tensor, by its id."""
    uses: Counter[int] = Counter()
    nodes: list[Any] = [output.grad_fn]
    met = set(nodes)
    while nodes:
        for node, _ in nodes.pop().next_functions:
            if hasattr(node, "variable"):
                uses[id(node.variable)] += 1
            elif node is not None and node not in met:
                met.add(node)
                nodes.append(node)
    return uses


class Run(NamedTuple):
    """A forward pass that can be derived."""

    outputs: Tensor
    """(N, K)."""
    leaves: list[Tensor]
    """Of each layer the tensor (N, S, T, O) by which to derive the outputs: its output, or a parameter by itself."""
    seen: list[Tensor]
    """The input of each layer, (N, ...)."""


def run_per_sample(model: nn.Module, values: Values, layers: list[Layer], x: Tensor) -> Run:
    """The model on a batch, with derivatives sample by sample."""
    origins = [values[layer.names[0]].flatten() for layer in layers]
    leaves = [
        (origin if layer.module is None else origin.new_zeros(())).expand(len(x), *layer.size[:2], layer.size.O)
        for origin, layer in zip(origins, layers, strict=True)
    ]

    def of_sample(x: Tensor, leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        pairs = list(zip(layers, leaves, strict=True))
        alone = {name: leaf.view_as(values[name]) for ((name, *_), _, module), leaf in pairs if module is None}
        seen = {layer: leaf.new_ones(1) for layer, leaf in pairs}

        def shift(layer: Layer, leaf: Tensor) -> Hook:
            def hook(module: Any, input_: Tensor, output: Tensor) -> Tensor:
                seen[layer] = input_.detach()
                return layer.shifted(output, leaf)

            return hook

        with _hooked({layer.module: shift(layer, leaf) for layer, leaf in pairs if layer.module is not None}):
            output_1K = outputs_of(model, values | alone, x[None])
        return output_1K[0], list(seen.values())

    leaves = [leaf.requires_grad_() for leaf in leaves]
    output_NK, seen = torch.func.vmap(of_sample)(x, leaves)
    return Run(output_NK, leaves, seen)


def outputs_of(model: nn.Module, values: Values, x: Tensor) -> Tensor:
    """The model's outputs (N, K), with `values` for its parameters and buffers."""
    result = torch.func.functional_call(model, values, (x,))
    result = getattr(result, "logits", result)
    if not isinstance(result, Tensor) or result.ndim == 0 or len(result) != len(x):
        given = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise InvalidArgumentError(f"the model returns {given} for {len(x)} samples: expected a tensor, a row for each")
    return result.reshape(len(x), -1)


def _is_linear(module: Any) -> bool:
    """Whether `Layer` knows what the module computes from a weight of its own."""
    kind = type(module)
    if module._parameters.get("weight") is None or "forward" in vars(module):
        return False
    known = {nn.Linear.forward, nn.Conv2d.forward, nn.Embedding.forward}
    return kind.forward in known or f"{kind.__module__}.{kind.__name__}" == HF_LINEAR


@contextmanager
def _hooked(hooks: Mapping[nn.Module, Hook]) -> Iterator[None]:
    """Modules whose outputs become what the hook makes of the module, its input and its output."""

    def adapted(hook: Hook) -> Callable[..., Tensor]:
        return lambda module, arguments, options, output: hook(module, (*arguments, *options.values())[0], output)

    with ExitStack() as stack:
        for module, hook in hooks.items():
            handle = module.register_forward_hook(adapted(hook), prepend=True, with_kwargs=True)
            stack.callback(handle.remove)
        yield
