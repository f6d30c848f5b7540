"""Every checkpoint of a training, evaluated one after the other (Figure 2 of arXiv 2510.00345)."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from wellposed.errors import InvalidArgumentError, ModelFileError, RunError
from wellposed.evaluation.backbones import Backbone, open_backbone
from wellposed.evaluation.curves import Curve, Point
from wellposed.recipes import WEIGHTS
from wellposed.runs import Checkpoints, atomic_path, locked, read_journal, step_of, tracked, writing_to

JSONL = "curve.jsonl"
_OF_A_RUN = ("kept", "checkpoints")  # the first that there is: the weights a run keeps, or those it goes on with
_FILES = (".safetensors", ".pt", ".pth")


@dataclass(frozen=True)
class Checkpoint:
    """Weights, and after which step of a training they were written."""

    step: int
    path: Path


def through_checkpoints(
    folder: Path,
    evaluate: Callable[[Backbone], Mapping[str, float]],
    *,
    out: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    model: str | None = None,
    model_args: Mapping[str, Any] | None = None,
    image_size: int | None = None,
    data: str | None = None,
    device: str = "auto",
    on_error: Literal["raise", "skip"] = "raise",
) -> Curve:
    """What `evaluate` says about every checkpoint in `folder`, the earliest first.

    With `out`, each answer is written to out/curve.jsonl as soon as it is known, and weights that have one there under
    the same settings are not evaluated again: after Ctrl-C, or when the training has gone on, call it once more.

    Args:
        folder: a run, of which the weights that it keeps are evaluated, or else the checkpoints that it goes on with;
            a folder of folders with a model each; or one of weights files. The last number in a name is the step.
        evaluate: a model, in eval mode and on its device, to the numbers that make the curve.
        out: made where it does not exist; None writes nothing.
        settings: all that the numbers depend on apart from the weights, JSON-able.
        model: the timm model that files of weights belong to; folders say themselves what they hold.
        model_args: further arguments of timm.create_model for it.
        image_size: pixels a side; the model's own if None.
        data: where the set of a run now is, as `open_backbone` has it.
        device: auto (a GPU where there is one), cpu, cuda, cuda:1, ...
        on_error: what to do with a checkpoint that cannot be read: end, or name it, count it and go on.
    """
    if on_error not in {"raise", "skip"}:
        raise InvalidArgumentError(f"on_error={on_error!r}: expected 'raise' or 'skip'")
    checkpoints = find_checkpoints(folder)
    epochs_per_step = _epochs_per_step(folder)
    points, skipped = [], []
    if out is not None:
        with writing_to(out):
            out.mkdir(parents=True, exist_ok=True)
    with nullcontext() if out is None else locked(out):
        record = _Record(out, {**(settings or {}), "image_size": image_size})
        for found in tracked(checkpoints, f"checkpoints of {folder.name}"):
            try:
                backbone = _opened(found.path, model, model_args, image_size=image_size, data=data, device=device)
            except ModelFileError as error:
                if on_error == "raise":
                    raise
                skipped.append(str(error))
                continue
            values = record.values(backbone.fingerprint)
            if values is None:
                values = _checked(evaluate(backbone), found)
            epoch = None if epochs_per_step is None else found.step * epochs_per_step
            points.append(Point(found.step, epoch, found.path.name, backbone.fingerprint, values))
            record.add(points[-1])
    if not points:
        raise ModelFileError(f"none of the checkpoints in {folder} can be read: {'; '.join(skipped[:3])}")
    return Curve(tuple(points), tuple(skipped))


def find_checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints in `folder`, the earliest first."""
    if not folder.is_dir():
        raise ModelFileError(f"checkpoints={folder}: there is no such folder")
    for name in _OF_A_RUN:
        if of_run := Checkpoints(folder / name).all():
            return [Checkpoint(step_of(path), path) for path in reversed(of_run)]
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    found = [entry for entry in entries if _holds_model(entry)]
    found = found or [entry for entry in entries if entry.suffix in _FILES and entry.is_file()]
    if not found:
        raise ModelFileError(
            f"checkpoints={folder} holds none: expected a run, folders with a model each, or files of weights named by "
            f"their step, such as step-1000{_FILES[0]}"
        )
    checkpoints = sorted((Checkpoint(_step_in(path), path) for path in found), key=lambda found: found.step)
    steps = [found.step for found in checkpoints]
    if len(set(steps)) < len(steps):
        twice = next(step for step in steps if steps.count(step) > 1)
        names = ", ".join(found.path.name for found in checkpoints if found.step == twice)
        raise ModelFileError(f"checkpoints={folder} has several for step {twice}: {names}; leave one of them")
    return checkpoints


def _holds_model(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    return (folder / WEIGHTS).is_file() or ((folder / "config.json").is_file() and any(folder.glob("*.safetensors")))


def _step_in(path: Path) -> int:
    numbers = re.findall(r"\d+", path.name if path.is_dir() else path.stem)
    if not numbers:
        raise ModelFileError(f"{path}: its name has no number; expected the step it was written at, as in step-1000")
    return int(numbers[-1])


def _opened(path: Path, model: str | None, model_args: Mapping[str, Any] | None, **settings: Any) -> Backbone:
    if path.is_dir():
        return open_backbone(str(path), **settings)
    if model is None:
        raise InvalidArgumentError(f"{path} holds weights only: say which timm model they belong to, as model")
    return open_backbone(model, checkpoint=path, model_args=model_args, **settings)


def _epochs_per_step(folder: Path) -> float | None:
    """From what the run in `folder` wrote about its steps."""
    try:
        events = read_journal(folder)
        return next((event["epoch"] / event["step"] for event in events if event["step"] > 0), None)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _checked(values: Mapping[str, float], found: Checkpoint) -> dict[str, float]:
    if not values or not all(isinstance(value, int | float) for value in values.values()):
        raise InvalidArgumentError(f"evaluate gave {values!r} for {found.path}: expected numbers by their names")
    return {name: float(value) for name, value in values.items()}


class _Record:
    """curve.jsonl: a line for each point, written as a whole or not at all; one that does nothing if `out` is None."""

    def __init__(self, out: Path | None, settings: Mapping[str, Any]) -> None:
        try:
            self._settings = json.loads(json.dumps(settings))
        except TypeError as error:
            raise InvalidArgumentError(f"settings={settings!r}: expected what JSON can hold ({error})") from error
        self._out = out
        self._lines = self._read() if out is not None and (out / JSONL).exists() else []

    def values(self, fingerprint: str) -> dict[str, float] | None:
        """What is known about these weights under these settings."""
        known = (
            line for line in self._lines if (line["fingerprint"], line["settings"]) == (fingerprint, self._settings)
        )
        return next((line["values"] for line in known), None)

    def add(self, point: Point) -> None:
        line = {**vars(point), "values": dict(point.values), "settings": self._settings}
        if self._out is None or line in self._lines:
            return
        self._lines.append(line)
        with writing_to(self._out), atomic_path(self._out / JSONL) as file:
            file.write_text("".join(json.dumps(line) + "\n" for line in self._lines), encoding="utf-8")

    def _read(self) -> list[dict[str, Any]]:
        assert self._out is not None
        path = self._out / JSONL
        try:
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            for line in lines:
                _ = line["fingerprint"], line["settings"], line["values"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path} cannot be read ({error!r}); mend it, remove it or choose another --out") from error
        return lines
