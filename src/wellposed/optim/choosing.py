"""Optimizers by name, each with the settings that suit it and weight decay where it belongs."""

from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from wellposed.errors import InvalidArgumentError
from wellposed.optim.soap import SOAP

LEARNING_RATES = {"adamw": 1e-3, "soap": 3e-3, "muon": 3e-3}
BETAS = {"adamw": (0.9, 0.999), "soap": (0.95, 0.95), "muon": (0.9, 0.95)}


def make_optimizer(
    name: str,
    model: nn.Module,
    *,
    lr: float | None = None,
    weight_decay: float = 0.3,
    betas: tuple[float, float] | None = None,
    **soap_options: Any,
) -> Optimizer:
    """The optimizer `name` for `model`; biases, norms and what the model exempts are not decayed.

    Args:
        name: "adamw", "soap" or "muon" (timm's: matrices by Muon, scaled to AdamW's step size, the rest by AdamW).
        model: whose parameters are optimized, all that require a gradient.
        lr: learning rate; that of `LEARNING_RATES` if None.
        weight_decay: decoupled, times lr.
        betas: decay of the moments; those of `BETAS` if None. Muon uses them where it falls back to AdamW.
        soap_options: further arguments of SOAP, which the others ignore.
    """
    if name not in LEARNING_RATES:
        raise InvalidArgumentError(f"optimizer={name!r}: expected one of {', '.join(LEARNING_RATES)}")
    lr = LEARNING_RATES[name] if lr is None else lr
    betas = BETAS[name] if betas is None else betas
    groups = _decay_groups(model, weight_decay)
    if name == "soap":
        return SOAP(groups, lr=lr, betas=betas, weight_decay=weight_decay, **soap_options)
    if name == "muon":
        from timm.optim import Muon

        return Muon(groups, lr=lr, betas=betas, weight_decay=weight_decay, nesterov=True, ns_coefficients="original")
    fused = all(param.is_cuda for group in groups for param in group["params"])
    return AdamW(groups, lr=lr, betas=betas, weight_decay=weight_decay, fused=fused)


def _decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    exempt: set[str] = getattr(model, "no_weight_decay", set)()
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    bare = {name for name, param in params.items() if param.ndim <= 1 or name in exempt}
    groups = [
        {"params": [param for name, param in params.items() if name not in bare], "weight_decay": weight_decay},
        {"params": [params[name] for name in params if name in bare], "weight_decay": 0.0, "use_fallback": True},
    ]
    return [group for group in groups if group["params"]]
