"""What adapters learn while they are trained: as numbers, and in a file beside what transformers' Trainer writes."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from wellposed.adapters.base_weights import whole
from wellposed.adapters.layers import SineLayer
from wellposed.adapters.report import adapted_layers, product_std
from wellposed.adapters.subspace import dominant
from wellposed.runs import Journal
from wellposed.spectrum import singular_values


@torch.no_grad()
def adapter_numbers(model: nn.Module, adapter_names: list[str] | None = None) -> dict[str, float]:
    """std(omega B A) and stable rank of the update of every layer, to be logged during training.

    Cheap enough for that: one update at a time is formed, and its largest singular value found by some products. No
    random number is drawn, so that training goes on as it would have.

    Args:
        model: a PEFT model with sine adapters, or any model that holds one; sharded by FSDP2, on all processes.
        adapter_names: which adapters; all if None.

    Returns:
        Under "layer/argument_std" and "layer/stable_rank"; where there are several adapters, "layer (adapter)/...".

    Example:
        >>> import peft, wellposed.adapters as wpa
        >>> net = nn.Sequential(nn.Linear(8, 8))
        >>> adapter_numbers(peft.get_peft_model(net, wpa.SineLoraConfig(r=2, target_modules=["0"])))
        {'0/argument_std': 0.0, '0/stable_rank': 0.0}
    """
    numbers = {}
    for name, layer, adapter in _named(model, adapter_names):
        a, b = (whole(factor) for factor in layer.factors(adapter))
        numbers[f"{name}/argument_std"] = layer.omega[adapter] * product_std(a, b)
        change = layer.change(adapter)
        largest = float(dominant(change, 1)[1])
        numbers[f"{name}/stable_rank"] = float((change / largest).square().sum()) if largest > 0 else 0.0
    return numbers


class AdapterLog(TrainerCallback):  # type: ignore[misc]
    """Give it to transformers' Trainer, Trainer(..., callbacks=[AdapterLog()]), to see sine adapters learn.

    `output_dir/adapters` then holds TensorBoard curves of `adapter_numbers`, with a point whenever the loss is logged,
    and metrics.jsonl, the same numbers and at every checkpoint the singular values of all updates.
    """

    journal: Journal | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the file; a run that is taken up again goes on in it, from its checkpoint."""
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / "adapters"
            folder.mkdir(parents=True, exist_ok=True)
            kept = _length(folder / "metrics.jsonl", state.global_step)
            self.journal = Journal(folder, length=kept, step=state.global_step or None)

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **kwargs: Any) -> None:
        """One point of each curve."""
        if "loss" in (logs or {}):
            self._write("adapters", state.global_step, adapter_numbers(model))

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """The spectra."""
        spectra = {
            name: singular_values(layer.change(adapter), torch.float32).tolist()
            for name, layer, adapter in _named(model, None)
        }
        self._write("spectra", state.global_step, spectra)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the file."""
        if self.journal is not None:
            self.journal.__exit__(None, None, None)
            self.journal = None

    def _write(self, event: str, step: int, values: dict[str, Any]) -> None:
        if self.journal is not None:
            self.journal.write(event, step, **values)


def _length(file: Path, step: int) -> int:
    """Bytes of the lines of `file` up to `step`."""
    length = 0
    for line in file.read_bytes().splitlines(keepends=True) if file.exists() else ():
        try:
            if json.loads(line)["step"] > step:
                break
        except ValueError:  # the line at which the run was killed
            break
        length += len(line)
    return length


def _named(model: nn.Module, adapter_names: list[str] | None) -> list[tuple[str, SineLayer, str]]:
    """What `adapted_layers` finds, with the adapter in the name where there are several."""
    found = adapted_layers(model, adapter_names)
    several = len({adapter for _, _, adapter in found}) > 1
    return [(f"{name} ({adapter})" if several else name, layer, adapter) for name, layer, adapter in found]
