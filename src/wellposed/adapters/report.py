"""What adapters have learned: how far the sine bends, and the spectrum of each update."""

import json
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wellposed.adapters.base_weights import whole
from wellposed.adapters.layers import SineLayer
from wellposed.errors import InvalidArgumentError
from wellposed.families import readable_name
from wellposed.reporting import Curves, Line, curves_figure, text_table
from wellposed.spectrum import product_singular_values, singular_values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#ee6677", "#4477aa", "#228833")


@dataclass(frozen=True)
class LayerUpdate:
    """The update that one adapter makes to one layer."""

    name: str
    """Of the layer in the model."""
    adapter: str
    rank: int
    """Columns of B."""
    omega: float
    argument_std: float
    """std(omega B A): below 1 the update is LoRA's with another scale, at 4 the sine has added what rank it can."""
    stable_rank: float
    """||D||_F^2 / ||D||_2^2 of the whole update D, DoRA's part included; 0 before training."""
    product_stable_rank: float
    """The same of B A, which is what LoRA would have."""
    norm: float
    """||D||_F."""
    relative_norm: float
    """||D||_F / ||W0||_F."""
    singular_values: tuple[float, ...]
    """Of D, the largest first."""


@dataclass(frozen=True)
class AdapterReport:
    """What `adapter_report` found, in the order of the model's layers."""

    layers: tuple[LayerUpdate, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able data."""
        return {"layers": [{**asdict(layer), "singular_values": list(layer.singular_values)} for layer in self.layers]}

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def plot(self, path: str | Path | None = None) -> "Figure":
        """std(omega B A), stable ranks and some spectra as a figure, also written to the file `path` if given."""
        x = range(1, len(self.layers) + 1)
        stds = [layer.argument_std for layer in self.layers]
        ranks = {
            "of the update": [layer.stable_rank for layer in self.layers],
            "of B A": [layer.product_stable_rank for layer in self.layers],
        }
        by_rank = sorted(self.layers, key=lambda layer: layer.stable_rank)
        shown = dict.fromkeys((by_rank[-1], by_rank[len(by_rank) // 2], by_rank[0]))
        spectra = [
            Line(layer.name, range(1, len(layer.singular_values) + 1), layer.singular_values, colour)
            for layer, colour in zip(shown, _COLOURS, strict=False)
        ]
        lines = [Line(name, x, values, colour) for (name, values), colour in zip(ranks.items(), _COLOURS, strict=False)]
        panels = [
            Curves("std of omega B A", [Line("all layers", x, stds, _COLOURS[0])], "layer", ""),
            Curves("stable rank", lines, "layer", ""),
            Curves("largest, median and smallest stable rank", spectra, "singular value of the update", "", log=True),
        ]
        return curves_figure(panels, across=3, path=path)

    def __str__(self) -> str:
        columns = ["layer", "adapter", "r", "omega", "std of omega B A", "stable rank", "of B A", "||D|| / ||W0||"]
        rows = [
            [
                *(layer.name, layer.adapter, f"{layer.rank}", f"{layer.omega:.4g}", f"{layer.argument_std:.2f}"),
                *(f"{layer.stable_rank:.1f}", f"{layer.product_stable_rank:.1f}", f"{layer.relative_norm:.4f}"),
            ]
            for layer in self.layers
        ]
        return text_table(columns, rows)


@torch.no_grad()
def adapter_report(model: nn.Module, adapter_names: list[str] | None = None) -> AdapterReport:
    """std(omega B A), stable rank and spectrum of the update of every layer, of all sine adapters or of those named.

    Args:
        model: a PEFT model with sine adapters, or any model that holds one.
        adapter_names: which adapters; all if None.

    Raises:
        InvalidArgumentError: there is no such adapter, or none at all.

    Example:
        >>> import peft, wellposed.adapters as wpa
        >>> net = nn.Sequential(nn.Linear(8, 8))
        >>> model = peft.get_peft_model(net, wpa.SineLoraConfig(r=2, target_modules=["0"]))
        >>> adapter_report(model).layers[0].argument_std
        0.0
    """
    found = []
    for name, layer, adapter in adapted_layers(model, adapter_names):
        delta, base = layer.change(adapter), whole(layer.base_weight())
        a, b = (whole(factor).float() for factor in layer.factors(adapter))
        values = singular_values(delta, torch.float32)
        norm = float(values.square().sum().sqrt())
        found.append(
            LayerUpdate(
                name=name,
                adapter=adapter,
                rank=layer.r[adapter],
                omega=layer.omega[adapter],
                argument_std=layer.omega[adapter] * product_std(a, b),
                stable_rank=_stable_rank(values),
                product_stable_rank=_stable_rank(product_singular_values(b, a.T, torch.float32)),
                norm=norm,
                relative_norm=norm / max(float(base.float().norm()), torch.finfo(torch.float32).tiny),
                singular_values=tuple(values.tolist()),
            )
        )
    return AdapterReport(tuple(found))


def product_std(a: Tensor, b: Tensor) -> float:
    """The standard deviation of the entries of B A, for A (r, in) and B (out, r), from r x r matrices.

    Example:
        >>> product_std(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0], [1.0]]))
        1.0
    """
    a, b = a.double(), b.double()
    count = b.shape[0] * a.shape[1]
    mean = float(b.sum(0) @ a.sum(1)) / count
    square = float(((a @ a.T) * (b.T @ b)).sum()) / count
    return sqrt(max(0.0, square - mean**2))


def adapted_layers(model: nn.Module, adapter_names: list[str] | None) -> list[tuple[str, SineLayer, str]]:
    """Every layer, under its name in the model, and every adapter on it that is asked for; all if None."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, SineLayer)]
    known = list(dict.fromkeys(adapter for _, layer in layers for adapter in layer.omega))
    unknown = [name for name in adapter_names or () if name not in known]
    if unknown or not known:
        what = f"no sine adapter {unknown[0]!r}" if unknown else "no sine adapter"
        raise InvalidArgumentError(f"{type(model).__name__} has {what}; it has {', '.join(known) or 'none'}")
    return [
        (readable_name(name).removeprefix("base_model.model."), layer, adapter)
        for name, layer in layers
        for adapter in layer.omega
        if adapter_names is None or adapter in adapter_names
    ]


def _stable_rank(values: Tensor) -> float:
    return float((values / values[0]).square().sum()) if values[0] > 0 else 0.0
