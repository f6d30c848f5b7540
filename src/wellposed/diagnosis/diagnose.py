"""`diagnose`: one forward pass of a model, watched, and the linear algebra that says how well it is conditioned."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor, nn

from wellposed.diagnosis.jacobians import block_jacobians
from wellposed.diagnosis.measuring import attention_numbers, measured_attention, measured_tokens, measured_weights
from wellposed.diagnosis.predictions import predictions
from wellposed.diagnosis.report import BlockReport, Diagnosis, Tokens
from wellposed.diagnosis.watching import attention_seen, tokens_seen
from wellposed.errors import InvalidArgumentError, WellposedError
from wellposed.families import Block, blocks, library_class, sites_of, unwrapped
from wellposed.spectrum import in_eval_mode

if TYPE_CHECKING:
    from wellposed.adapters import AdapterReport

Inputs = Tensor | Mapping[str, Tensor]


@overload
def diagnose(model: nn.Module, inputs: Inputs, *, jacobians: bool = False) -> Diagnosis: ...
@overload
def diagnose(model: nn.Module) -> "AdapterReport": ...


@torch.no_grad()
def diagnose(model: nn.Module, inputs: Inputs | None = None, *, jacobians: bool = False) -> "Diagnosis | AdapterReport":
    """How `model` treats a batch, block by block, or what its sine adapters have learned; the model is left as it was.

    Args:
        model: of a known family; in training mode it is measured in eval mode, without dropout.
        inputs: a batch of images or token ids as the model takes it, or a mapping of its named arguments. Inputs of
            different lengths are to be given one length at a time, without padding. Without inputs, it is the adapters
            that are looked at: std(omega B A), stable rank and spectrum of each update.
        jacobians: also the extremes of the Jacobians of attention and MLP, for the first input. They take far longer
            than everything else.

    Example:
        >>> import timm, wellposed as wp
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> report = wp.diagnose(model, torch.randn(4, 3, 32, 32))
        >>> report.blocks[1].name, report.blocks[1].attention.frobenius <= report.blocks[1].attention.frobenius_bound
        ('blocks.1', True)
    """
    if inputs is None:
        return _of_adapters(unwrapped(model))
    model, found = unwrapped(model), blocks(model)
    inputs = _checked(inputs, model)
    dtype = next(model.parameters()).dtype
    if jacobians and dtype not in {torch.float32, torch.float64}:
        raise InvalidArgumentError(f"jacobians of a model in {dtype}: expected float32 or float64; call model.float()")
    notes = []
    if any(module.training for module in model.modules()):
        notes.append("The model is in training mode; it was measured in eval mode, without dropout.")
    if dtype in {torch.bfloat16, torch.float16}:
        notes.append(f"The model computes in {dtype}: what it rounds off passes for small singular values.")
    with in_eval_mode(model):
        with tokens_seen(model) as seen, attention_seen(model, attention_numbers) as looks:
            _run(model, inputs)
        tokens, extremes = measured_tokens(found, seen)
        attention, weights = measured_attention(looks), measured_weights(found, notes)
        spectra = block_jacobians(model, found, lambda: _run(model, _first_of(inputs))) if jacobians else None
    reports = []
    for i, block in enumerate(found):
        jacobian, cut = spectra[i] if spectra else None, _cut(block)
        reports.append(
            BlockReport(
                name=block.name,
                cut=tuple(sorted(cut)),
                tokens=tokens[i],
                attention=attention[i],
                weights=weights[i],
                jacobians=jacobian.whole if jacobian else {},
                predictions=predictions(
                    *(block, tokens[i], extremes[i], attention[i], weights[i], jacobian),
                    cut=cut,
                    n=seen[i]["output"].shape[1],
                ),
            )
        )
    n, d = seen[0]["input"].shape[1:]
    if any(attention) and n >= d and _is_singular(tokens[0]["attention input"]):
        notes.append(
            f"{n} tokens of {d} channels: LayerNorm leaves them one direction less, so that the condition number of "
            "what follows from it linearly is infinite. Cosine and stable rank tell more."
        )
    return Diagnosis(library_class(model).__name__, (len(seen[0]["input"]), n, d), tuple(reports), tuple(notes))


def _of_adapters(model: nn.Module) -> "AdapterReport":
    if not any(hasattr(module, "peft_config") for module in model.modules()):
        raise InvalidArgumentError(
            f"{type(model).__name__} has no adapter to look at, and no inputs were given: give it a batch"
        )
    from wellposed.adapters import adapter_report

    return adapter_report(model)


def _run(model: nn.Module, inputs: Inputs) -> None:
    try:
        model(inputs) if isinstance(inputs, Tensor) else model(**inputs)
    except WellposedError:
        raise
    except Exception as error:  # whatever a model raises for inputs that are not its own
        named = {"inputs": inputs} if isinstance(inputs, Tensor) else inputs
        given = ", ".join(f"{name} {tuple(value.shape)} of {value.dtype}" for name, value in named.items())
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InvalidArgumentError(f"the model cannot take {given}: {reason}") from error


def _first_of(inputs: Inputs) -> Inputs:
    return inputs[:1] if isinstance(inputs, Tensor) else {name: value[:1] for name, value in inputs.items()}


def _checked(inputs: Inputs, model: nn.Module) -> Inputs:
    """`inputs` on the device and in the type of the model, once they are known to be a batch without padding."""
    if not isinstance(inputs, Tensor | Mapping):
        raise InvalidArgumentError(f"inputs is a {type(inputs).__name__}: expected a tensor, or a mapping of tensors")
    named = {"inputs": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.ndim < 1 or 0 in value.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InvalidArgumentError(f"{name} is {shape}: expected a batch of at least one input, as a tensor")
        if value.is_floating_point() and not value.isfinite().all():
            raise InvalidArgumentError(f"{name} holds NaN or Inf: expected finite numbers")
        if value.ndim >= 4 and not value.is_floating_point():
            raise InvalidArgumentError(f"{name} is {value.dtype}: expected floating-point images, normalized")
    if "attention_mask" in named and not named["attention_mask"].bool().all():
        raise InvalidArgumentError("attention_mask leaves tokens out: give inputs of one length, without padding")
    param = next(model.parameters())
    if param.is_meta:
        raise InvalidArgumentError("the model is on the meta device and has no values: call model.to_empty(device=...)")
    named = {
        name: value.to(param.device, param.dtype if value.is_floating_point() else value.dtype)
        for name, value in named.items()
    }
    return named["inputs"] if isinstance(inputs, Tensor) else named


def _cut(block: Block) -> set[str]:
    """The skips that `block` has lost."""
    layers = {skip: block.module.get_submodule(name) for skip, (name, _) in block.family.skips.items()}
    return {skip for skip, layer in layers.items() if skip in sites_of(layer).cut}


def _is_singular(tokens: Tokens) -> bool:
    return tokens.condition.median == float("inf")
