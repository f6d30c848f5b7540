"""What a server saves by holding adapters packed: memory per adapter and time to switch, against PEFT's in float16.

PEFT keeps all adapters in the model and switches by `set_adapter`, which moves nothing; every forward pass then adds
the update, or builds W0 + s sin(omega B A). A shelf of packed adapters unpacks one into the factors of the model's only
adapter, with the same forward passes. A shelf of merged ones builds the weights from the packed form, and PEFT its own
by adding the update to W0, layer by layer; the model then runs as its base model does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from wellposed.bench.table import Table
from wellposed.bench.timing import seconds
from wellposed.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

    from wellposed.compression import AdapterShelf


@dataclass(frozen=True, kw_only=True)
class CompressBench:
    """Memory held per adapter, and time to switch to another: packed adapters against PEFT's in float16."""

    layers: tuple[tuple[int, int], ...] = ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 14336), (14336, 4096))
    """In and out of each adapted layer of a block: q, k, v, up and down of Llama-3-8B."""
    blocks: int = 32
    rank: int = 32
    bits: tuple[int, ...] = (2, 3, 4, 8)
    adapters: int = 4
    """Held at a time, and switched between."""
    sine: bool = True
    """Sine adapters, or plain LoRA."""
    repeats: int = 20
    """Timed switches, after some to warm up; the median is reported."""
    device: str = "cuda"
    seed: int = 0

    def run(self) -> Table:
        """Measure PEFT's adapters, then packed ones of each number of bits."""
        import torch

        from wellposed.runs import device_named, provenance

        device = device_named(self.device)
        sizes = {"layers": sum(self.layers, ()), "bits": self.bits}
        sizes |= {name: (getattr(self, name),) for name in ("blocks", "rank", "adapters", "repeats")}
        for name, each in sizes.items():
            if not each or min(each) < 1:
                raise InvalidArgumentError(f"{name}={getattr(self, name)}: expected at least one, and each at least 1")
        torch.manual_seed(self.seed)
        with TemporaryDirectory() as folder:
            rows = self._rows(Path(folder), device)
        kind = "sine adapters" if self.sine else "LoRA adapters"
        return Table(
            title=f"{self.adapters} {kind} of rank {self.rank} on {self.blocks * len(self.layers)} layers",
            columns=(
                *("held as", "MB per adapter", "times smaller", "ms to switch", "ms to switch, merged"),
                *("s to quantize", "mean error of dW"),
            ),
            rows=tuple(rows),
            facts=provenance(device, seed=self.seed),
        )

    def _rows(self, folder: Path, device: "torch.device") -> list[tuple[str, ...]]:
        from wellposed.compression import compress

        model = self._model(device)
        for i in range(self.adapters):
            _train(model)
            model.save_pretrained(str(folder / f"plain-{i}"))
        held, switch, merge = self._peft(model, device)
        times = (f"{1000 * switch:.2f}", f"{1000 * merge:.2f}")
        rows: list[tuple[str, ...]] = [("PEFT, float16", f"{held / 1e6:.2f}", "1.0", *times, "", "")]
        del model
        for bits in self.bits:
            errors, quantizing = [], []
            for i in range(self.adapters):
                source, target = folder / f"plain-{i}", folder / f"{bits}-{i}"
                quantizing += self._quantizing(source, bits, device)
                errors.append(compress(source, bits=bits, out=target, device=self.device).error)
            rows.append(self._packed(folder, bits, device, held, median(quantizing), sum(errors) / len(errors)))
        return rows

    def _packed(
        self, folder: Path, bits: int, device: "torch.device", peft_held: float, quantizing: float, error: float
    ) -> tuple[str, ...]:
        from wellposed.compression import AdapterShelf, MergedShelf, load_adapter

        cells = []
        for kind in (AdapterShelf, MergedShelf):
            shelf = kind(load_adapter(self._base(device), folder / f"{bits}-0"))
            before = _allocated(device)
            for i in range(self.adapters):
                shelf.add(f"{i}", folder / f"{bits}-{i}")
            held = (_allocated(device) - before or shelf.nbytes) / self.adapters
            times = seconds(partial(_use_next, shelf, cycle(shelf.packed)), device, repeats=self.repeats)
            cells.append(f"{1000 * median(times):.2f}")
            del shelf
        sizes = (f"{held / 1e6:.2f}", f"{peft_held / held:.1f}")
        return (f"packed, {bits} bits", *sizes, *cells, f"{quantizing:.2f}", f"{error:.3f}")

    def _quantizing(self, source: Path, bits: int, device: "torch.device") -> list[float]:
        """Seconds to quantize all factors of an adapter that is on the device."""
        from safetensors.torch import load_file

        from wellposed.compression import quantize

        rows = [each.reshape(1, -1).to(device) for each in load_file(source / "adapter_model.safetensors").values()]
        return seconds(partial(quantize, rows, bits), device, repeats=1)

    def _base(self, device: "torch.device") -> Any:
        import torch

        half: dict[str, Any] = {"bias": False, "dtype": torch.float16, "device": device}
        sides = [side for _ in range(self.blocks) for side in self.layers]
        return torch.nn.Sequential(*(torch.nn.Linear(cols, outs, **half) for cols, outs in sides))

    def _model(self, device: "torch.device") -> Any:
        try:
            import peft
        except ImportError as error:
            raise InvalidArgumentError("PEFT is missing: pip install 'wellposed[peft]'") from error
        from wellposed.adapters import SineLoraConfig

        base = self._base(device)
        targets = [str(i) for i in range(len(base))]
        config = (SineLoraConfig if self.sine else peft.LoraConfig)(r=self.rank, target_modules=targets)
        return peft.get_peft_model(base, config, autocast_adapter_dtype=False)

    def _peft(self, model: Any, device: "torch.device") -> tuple[float, float, float]:
        """Bytes per adapter that PEFT holds, and the seconds that it takes to switch, and to build all weights."""
        import copy

        from peft.tuners.lora import LoraLayer

        before, config = _allocated(device), model.peft_config["default"]
        for i in range(1, self.adapters + 1):
            model.add_adapter(f"{i}", copy.deepcopy(config), autocast_adapter_dtype=False)
        parameters = [parameter for name, parameter in model.named_parameters() if ".default." in name]
        held = (_allocated(device) - before) / self.adapters or sum(parameter.nbytes for parameter in parameters)
        names = cycle([f"{i}" for i in range(1, self.adapters + 1)])
        times = seconds(lambda: model.set_adapter(next(names), inference_mode=True), device, repeats=self.repeats)
        layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
        merged = seconds(lambda: _merge(layers, next(names)), device, repeats=self.repeats)
        return held, median(times), median(merged)


def _train(model: Any) -> None:
    """Give B the size that training gives it."""
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.01)


def _merge(layers: list[Any], name: str) -> None:
    """Build every layer's weight with the adapter of this name, as PEFT merges it."""
    import torch

    with torch.no_grad():
        for layer in layers:
            layer.get_base_layer().weight + layer.get_delta_weight(name)


def _use_next(shelf: "AdapterShelf", names: Iterator[str]) -> None:
    shelf.use(next(names))


def _allocated(device: "torch.device") -> int:
    """Bytes of tensors on a GPU; 0 where nobody counts them."""
    import torch

    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
