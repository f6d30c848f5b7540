"""The study of Cutting the Skip (arXiv 2510.00345): with skips, without, and without but conditioned."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from wellposed.data import open_data
from wellposed.errors import InvalidArgumentError, RunError
from wellposed.families import blocks
from wellposed.reporting import page
from wellposed.runs import atomic_path, device_named, is_free, locked, write_json, writing_to
from wellposed.studies.config import KINDS, NAMES, OPTIMIZERS, Cell, StudyConfig
from wellposed.studies.pictures import save_accuracies, sections
from wellposed.studies.running import Outcome, run_cells
from wellposed.training.guards import is_repeatable
from wellposed.training.models import build_model, fitted_to_data

_STUDY, _REPORT = "study.json", "report.html"


@dataclass(frozen=True)
class StudyResult:
    """The accuracies of a study and its page."""

    config: StudyConfig
    outcomes: tuple[Outcome, ...]
    report: Path
    facts: dict[str, str]

    def rows(self) -> list[tuple[str, ...]]:
        """A row per kind of model: its name and the accuracy under each optimizer."""
        return [(NAMES[kind], *(self._cell(kind, optimizer) for optimizer in OPTIMIZERS)) for kind in KINDS]

    def accuracies(self, kind: str, optimizer: str) -> list[float]:
        """Of the runs that did not diverge, one per seed."""
        found = [o for o in self.outcomes if (o.cell.kind, o.cell.optimizer) == (kind, optimizer)]
        return [outcome.accuracy for outcome in found if outcome.accuracy is not None]

    def _cell(self, kind: str, optimizer: str) -> str:
        values = [100 * value for value in self.accuracies(kind, optimizer)]
        if not values:
            return "diverged"
        spread = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
        lost = self.config.seeds - len(values)
        return f"{mean(values):.1f}{spread}" + (f", {lost} diverged" if lost else "")


def study(config: StudyConfig) -> StudyResult:
    """Train every cell of `config`, or those that are missing, and write the page that compares them.

    Raises:
        RunError: the folder holds a study with other settings.
        InvalidArgumentError, DataError: something in `config` cannot be; nothing has been written then.
        KeyboardInterrupt: after each run has written a checkpoint; the same call goes on.
    """
    config.check()
    _try_out(config)
    with writing_to(config.out):
        config.out.mkdir(parents=True, exist_ok=True)
    with locked(config.out):
        _claim(config)
        outcomes = tuple(run_cells(config))
        result = StudyResult(config, outcomes, config.out / _REPORT, _facts(config))
        with writing_to(config.out):
            with atomic_path(result.report) as temporary:
                text = page("Do transformers need their skips?", lead(result), sections(config, result), result.facts)
                temporary.write_text(text, encoding="utf-8")
            save_accuracies(config, config.out / "accuracy.png")
            write_json(config.out / "outcomes.json", [asdict(outcome) for outcome in outcomes])
    return result


def lead(result: StudyResult) -> str:
    """What the table says, in words that follow its numbers."""
    config = result.config
    first = f"{config.model} on {config.data.partition(':')[0]}, trained three ways for {config.epochs} epochs. "
    best = {kind: _best(result, kind) for kind in KINDS}
    skip, skipless, conditioned = (f"{100 * best[kind]:.1f} %" for kind in KINDS)
    first += (
        f"With its skip connections it reaches {skip}. " if best["skip"] else "With its skip connections it diverges. "
    )
    gap = best["conditioned"] - best["skipless"]
    if gap > 0.02:
        return first + (
            f"With all of them cut, its default initialization gets to {skipless}; started from "
            f"well-conditioned weights, the very same network without skips reaches {conditioned}."
        )
    compared = "less far than" if gap < -0.02 else "as far as"
    return first + (
        f"With all of them cut it reaches {skipless} from its default initialization and {conditioned} from "
        f"well-conditioned weights, {compared} by default."
    )


def _best(result: StudyResult, kind: str) -> float:
    """The mean over seeds under the optimizer that does best; 0 if every run diverged."""
    return max((mean(values) for o in OPTIMIZERS if (values := result.accuracies(kind, o))), default=0.0)


def _try_out(config: StudyConfig) -> None:
    """Raise what a run would raise about its data or model, before anything is written."""
    device_named("cpu" if config.device == "auto" else config.device)
    if config.out.exists() and not config.out.is_dir():
        raise RunError(f"out={config.out} is a file; expected a folder, or a name that is free")
    run = config.run(Cell("conditioned", "adamw", config.seed))
    train, _ = (open_data(run.data, split, run.image_size) for split in ("train", "test"))
    if run.batch_size > len(train):
        raise InvalidArgumentError(f"batch_size={run.batch_size}: expected at most {len(train)}, the size of the set")
    with torch.random.fork_rng([]):
        model = build_model(fitted_to_data(run, train), train)
    is_repeatable(model, torch.zeros(2, *train.image_shape))
    if any(block.family.attention is None for block in blocks(model)):
        raise InvalidArgumentError(f"model={config.model}: the study looks at attention; expected a timm ViT")


def _facts(config: StudyConfig) -> dict[str, str]:
    """Where the numbers come from, as the runs noted it; what differs between them is listed."""
    runs = [json.loads((config.run(cell).folder / "config.json").read_text("utf-8")) for cell in config.cells()]
    facts = {
        name: "; ".join(dict.fromkeys(run[name] for run in runs))
        for name in ("command", "commit", "hardware", "versions", "date")
    }
    facts["seeds"] = ", ".join(str(seed) for seed in range(config.seed, config.seed + config.seeds))
    facts["settings"] = ", ".join(f"{name} {value}" for name, value in _plain(config).items())
    return facts


def _claim(config: StudyConfig) -> None:
    """Make the folder this study's own, or see that it already is."""
    path, ours = config.out / _STUDY, _plain(config)
    if not path.exists():
        if not is_free(config.out):
            raise RunError(f"out={config.out} is not empty and holds no study; choose another --out")
        write_json(path, ours)
        return
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))
        different = [name for name in ours if name != "seeds" and ours[name] != theirs.get(name)]
    except (OSError, ValueError, AttributeError) as error:
        raise RunError(f"{path} cannot be read ({error}); choose another --out") from error
    if different:
        name = different[0]
        raise RunError(
            f"the study in {config.out} was made with {name}={theirs.get(name)}, now it is {ours[name]}: "
            "choose another --out, or give the same settings to go on with it"
        )


def _plain(config: StudyConfig) -> dict[str, Any]:
    """The settings that the numbers depend on."""
    free = {"out", "jobs", "device"}
    return {name: value for name, value in asdict(config).items() if name not in free} | {
        "model_args": config.arguments()
    }
