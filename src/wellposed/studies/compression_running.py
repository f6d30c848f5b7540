"""Copies of trained adapters in few bits, each tested as its adapter was."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from wellposed.compression.compressing import packed_copy
from wellposed.compression.folders import PlainAdapter, read_plain
from wellposed.compression.split import split_all
from wellposed.compression.updates import layers_of, update_error
from wellposed.data.language import open_language
from wellposed.errors import InvalidArgumentError, RunError
from wellposed.runs import device_named, write_json
from wellposed.studies.adapter_config import CONFIGS, AdapterCell
from wellposed.studies.adapter_running import by_set, metric_of
from wellposed.studies.compression_config import HALF, SPLIT, CompressionStudy, Copy
from wellposed.studies.side_by_side import run_side_by_side
from wellposed.training.accelerators import make_accelerator
from wellposed.training.finetuning.completions import CompletionTask
from wellposed.training.finetuning.config import FinetuneConfig, LanguageConfig
from wellposed.training.finetuning.labels import LabelTask
from wellposed.training.finetuning.vision_config import VisionConfig
from wellposed.training.guards import flushed_denormals, repeatable

_COPIES = "copies.json"


@dataclass(frozen=True)
class Copied:
    """What became of an adapter in one copy."""

    nbytes: int
    """Of its factors and magnitudes, with codebooks; heads that were trained beside it and headers are left out."""
    error: float
    """Of dW, the mean over layers."""
    points: dict[str, float]
    """The score of each test set that counts, times 100."""


@dataclass(frozen=True)
class CopiesOutcome:
    """All copies of one adapter, under their names."""

    cell: AdapterCell
    seconds: float
    copies: dict[str, Copied]

    def __str__(self) -> str:
        return ", ".join(f"{name} {mean(copy.points.values()):.1f}" for name, copy in self.copies.items())


@dataclass(frozen=True)
class CopiesRun:
    """One adapter to copy and test."""

    adapter: FinetuneConfig
    """The run that trained it, in `adapter.folder`."""
    study: CompressionStudy
    folder: Path
    epochs: int = 1


def trained_cells(study: CompressionStudy) -> tuple[dict[AdapterCell, FinetuneConfig], dict[AdapterCell, str]]:
    """The adapters that a finished study of adapters has left behind, one seed after the other, and why others are not.

    A mean over sets needs all of them: where one of a seed diverged, the others at that method and rank go with it.

    Raises:
        RunError: there is no such study, or it is not finished.
        InvalidArgumentError: nothing in it can be compared.
    """
    path = study.adapters / "outcomes.json"
    try:
        settings = json.loads((study.adapters / "study.json").read_text("utf-8"))
        outcomes = json.loads(path.read_text("utf-8"))
        complaints = {AdapterCell(**each["cell"]): each["complaint"] for each in outcomes}
        scores = {name: found for each in outcomes for name, found in each["scores"].items()}
        kind = CONFIGS[settings["modality"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{study.adapters} holds no finished study of adapters ({type(error).__name__}: {error}). Expected the "
            "--out of wellposed study --ablation adapters"
        ) from error
    written = [name for name, found in scores.items() if metric_of(name, found) == "written_accuracy"]
    if written:
        raise InvalidArgumentError(
            f"{study.adapters}: answers to {written[0]} were judged as they are written, which is not done for copies; "
            "expected sets with choices or labels"
        )
    missing = {cell: why for cell in complaints if (why := _why_not(cell, complaints))}
    folders = {cell: study.adapters / "runs" / str(cell) for cell in complaints if cell not in missing}
    if not folders:
        some = "; ".join(f"{cell}: {why}" for cell, why in list(missing.items())[:3])
        raise InvalidArgumentError(f"{study.adapters} has no adapter that was trained to its end ({some or 'no runs'})")
    return {cell: replace(kind.of_run(folder), out=folder) for cell, folder in folders.items()}, missing


def _why_not(cell: AdapterCell, complaints: dict[AdapterCell, str]) -> str:
    if cell.method == "full":
        return "all weights were trained, which is no adapter"
    if complaints[cell]:
        return complaints[cell]
    lost = next((each for each in complaints if complaints[each] and replace(each, task=cell.task) == cell), None)
    return f"with {lost}, another set of its seed" if lost else ""


def run_copies(study: CompressionStudy, trained: dict[AdapterCell, FinetuneConfig]) -> list[CopiesOutcome]:
    """Every copy of every adapter, those that have been tested already as they are."""
    runs = {cell: CopiesRun(adapter, study, study.out / "runs" / str(cell)) for cell, adapter in trained.items()}
    preload = ["wellposed.studies.compression_running", "wellposed.adapters"]
    return list(run_side_by_side(runs, score_copies, _finished, jobs=study.jobs, preload=preload).values())


def score_copies(run: CopiesRun, cell: AdapterCell) -> CopiesOutcome:
    """Test the copies of one adapter that are missing; each is written down at once."""
    import peft

    run.folder.mkdir(parents=True, exist_ok=True)
    done, begun = _read(run.folder), time.perf_counter()
    plain, place = read_plain(run.adapter.folder / "adapter"), device_named(run.study.device)
    with _tested_as(run) as task:
        for copy in run.study.copies(cell.method):
            if str(copy) not in done["copies"]:
                tensors, nbytes, error = _copied(plain, copy, run.study, place)
                peft.set_peft_model_state_dict(task.model, tensors)
                scores = by_set(task.evaluate(), cell.task or run.adapter.sets)
                points = {name: 100 * found[metric_of(name, found)] for name, found in scores.items()}
                done["copies"][str(copy)] = asdict(Copied(nbytes, error, points))
                done["seconds"] += time.perf_counter() - begun
                begun = time.perf_counter()
                write_json(run.folder / _COPIES, done)
    outcome = _finished(run, cell)
    assert outcome is not None
    return outcome


@contextmanager
def _tested_as(run: CopiesRun) -> Iterator[Any]:
    """What tested the adapter when it was trained, on the same sets in the same precision."""
    config: Any = replace(run.adapter, device=run.study.device)
    accelerator = make_accelerator(config.device)
    with flushed_denormals(), repeatable(accelerator.device, wanted=config.repeatable):
        torch.manual_seed(config.seed)
        if isinstance(config, VisionConfig):
            from wellposed.training.finetuning.images import ImageTask
            from wellposed.training.finetuning.vision import suited_sets
            from wellposed.training.finetuning.vision_models import open_vision_model

            opened = open_vision_model(config)
            yield ImageTask(config, opened, *suited_sets(config, opened), accelerator)
            return
        assert isinstance(config, LanguageConfig)
        config = replace(config, generate=0)
        data = open_language(config.data, config.test, config.limit, config.answers)
        yield (LabelTask if data.classes else CompletionTask)(config, data, accelerator)


def _copied(
    plain: PlainAdapter, copy: Copy, study: CompressionStudy, device: torch.device
) -> tuple[dict[str, Tensor], int, float]:
    """The tensors of a copy, the bytes that it takes without heads, and its mean error of dW."""
    heads = sum(tensor.nbytes for key, tensor in plain.tensors.items() if ".lora_" not in key)
    if copy.scheme == HALF:
        halves = {key: tensor.half().to(tensor) if ".lora_" in key else tensor for key, tensor in plain.tensors.items()}
        numbers = sum(tensor.numel() for key, tensor in plain.tensors.items() if ".lora_" in key)
        return halves, 2 * numbers, 0.0
    if copy.scheme == SPLIT:
        tensors, layers, errors = dict(plain.tensors), layers_of(plain), []
        splits = split_all([(layer.a.to(device), layer.b.to(device)) for layer in layers])
        for layer, split in zip(layers, splits, strict=True):
            a, b = split.a.cpu(), split.b.cpu()
            errors.append(update_error(layer, a, b))
            tensors[layer.a_key] = a.view_as(plain.tensors[layer.a_key])
            tensors[layer.b_key] = b.view_as(plain.tensors[layer.b_key])
        return tensors, sum(split.nbytes for split in splits), mean(errors)
    scheme: Any = copy.scheme
    packed, error = packed_copy(plain, copy.bits, scheme, study.per, device)
    return packed.to("cpu").tensors(), packed.nbytes - heads, error


def _finished(run: CopiesRun, cell: AdapterCell) -> CopiesOutcome | None:
    done = _read(run.folder)
    names = [str(copy) for copy in run.study.copies(cell.method)]
    if any(name not in done["copies"] for name in names):
        return None
    return CopiesOutcome(cell, done["seconds"], {name: Copied(**done["copies"][name]) for name in names})


def _read(folder: Path) -> dict[str, Any]:
    try:
        done: dict[str, Any] = json.loads((folder / _COPIES).read_text(encoding="utf-8"))
        if not {"copies", "seconds"} <= done.keys():
            raise ValueError("it is not whole")
    except FileNotFoundError:
        return {"copies": {}, "seconds": 0.0}
    except (OSError, ValueError, AttributeError) as error:
        raise RunError(f"{folder / _COPIES} cannot be read ({error}); remove it to go on") from error
    return done
