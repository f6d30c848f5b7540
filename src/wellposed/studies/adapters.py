"""A study of adapters: every method at every rank, trained with every seed, and the page that compares them."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wellposed.errors import WellposedError
from wellposed.reporting import curves_figure, markdown_table, page
from wellposed.runs import atomic_path, device_named, locked, write_json, writing_to
from wellposed.studies.adapter_config import AdapterStudy
from wellposed.studies.adapter_pictures import against_parameters, sections
from wellposed.studies.adapter_result import AdapterResult
from wellposed.studies.adapter_running import run_adapters, tried_out
from wellposed.studies.adapter_words import lead
from wellposed.studies.folders import REPORT, STUDY, check_out, claim, facts_of

_EXTENT = {"seeds", "methods", "ranks"}


def study_adapters(config: AdapterStudy) -> AdapterResult:
    """Fine-tune every cell of `config`, or those that are missing, and write the page that compares them.

    The folder then holds report.html, table.md, adapters.png, outcomes.json and runs/, a folder for each run as
    `wellposed finetune` makes it; and model/, what was in a .gguf file.

    Raises:
        RunError: the folder holds a study with other settings.
        InvalidArgumentError, DataError, ModelFileError, UnsuitableModelError: something in `config` cannot be; nothing
            is left behind by it.
        KeyboardInterrupt: after each run has written a checkpoint; the same call goes on.
    """
    config.check()
    config = tried_out(config)
    device_named("cpu" if config.device == "auto" else config.device)
    check_out(config.out)
    with writing_to(config.out):
        config.out.mkdir(parents=True, exist_ok=True)
    with locked(config.out):
        claim(config.out, _plain(config), _plain(AdapterStudy()), _EXTENT)
        try:
            outcomes = tuple(run_adapters(config))
        except WellposedError:
            _withdraw(config.out)
            raise
        facts = facts_of([config.run(cell) for cell in config.cells()], _plain(config))
        result = AdapterResult(config, outcomes, config.out / REPORT, facts)
        with writing_to(config.out):
            _write(result)
    return result


def _write(result: AdapterResult) -> None:
    out, models = result.config.out, result.trained()
    table = markdown_table(result.columns(), result.rows(), result.facts)
    text = lead(result.config, models)
    for path, content in {
        result.report: page("Which adapter learns most?", text, sections(result), result.facts),
        out / "table.md": f"{text}\n\n{table}",
    }.items():
        with atomic_path(path) as temporary:
            temporary.write_text(content, encoding="utf-8")
    curves_figure(against_parameters(models), across=2, path=out / "adapters.png")
    write_json(out / "outcomes.json", [asdict(outcome) for outcome in result.outcomes])


def _withdraw(out: Path) -> None:
    """Leave no trace of a study none of whose runs could begin: what was wrong with it may be said otherwise now."""
    if not (out / "runs").exists():
        (out / STUDY).unlink(missing_ok=True)
        for name in ("logs", "model"):
            shutil.rmtree(out / name, ignore_errors=True)


def _plain(config: AdapterStudy) -> dict[str, Any]:
    """The settings that the numbers depend on, as JSON holds them."""
    settings = {name: value for name, value in asdict(config).items() if name not in {"out", "jobs", "device"}}
    return json.loads(json.dumps(settings))
