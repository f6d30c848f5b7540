"""A study of compressed adapters: every adapter of another study in few bits, tested again, and the page about it."""

import json
from dataclasses import asdict
from typing import Any

from wellposed.errors import InvalidArgumentError
from wellposed.reporting import curves_figure, markdown_table, page
from wellposed.runs import atomic_path, device_named, locked, provenance, write_json, writing_to
from wellposed.studies.compression_config import CompressionStudy
from wellposed.studies.compression_pictures import lead, left_out, over_bits, over_bytes, sections
from wellposed.studies.compression_result import COLUMNS, CompressionResult
from wellposed.studies.compression_running import run_copies, trained_cells
from wellposed.studies.folders import REPORT, check_out, claim

_EXTENT = {"bits", "schemes", "split"}


def study_compression(config: CompressionStudy) -> CompressionResult:
    """Test every copy that `config` asks for, or those that are missing, and write the page that compares them.

    The folder then holds report.html, table.md, compression.png, outcomes.json and runs/, with the scores of the
    copies of each adapter.

    Raises:
        RunError: the folder holds another study, or `config.adapters` none that is finished.
        InvalidArgumentError: something in `config` cannot be; nothing is left behind by it.
        KeyboardInterrupt: the same call goes on with the copies that are missing.
    """
    config.check()
    place = device_named(config.device)
    trained, missing = trained_cells(config)
    check_out(config.out)
    if config.out.resolve() == config.adapters.resolve():
        raise InvalidArgumentError(f"out={config.out}: expected another folder than that of the adapters")
    with writing_to(config.out):
        config.out.mkdir(parents=True, exist_ok=True)
    with locked(config.out):
        claim(config.out, _plain(config), _plain(CompressionStudy()), _EXTENT)
        outcomes = tuple(run_copies(config, trained))
        result = CompressionResult(config, outcomes, config.out / REPORT, {}, missing)
        facts = provenance(place, seed=result.seeds[0]) | {"settings": _settings(config)}
        facts["seeds"] = ", ".join(map(str, result.seeds))
        del facts["seed"]
        result.facts.update(facts)
        with writing_to(config.out):
            _write(result)
    return result


def _write(result: CompressionResult) -> None:
    out, text = result.config.out, lead(result)
    missing = "".join(f"* left out: {each}\n" for each in left_out(result)) + "\n" * bool(result.missing)
    rates = markdown_table(result.rate_columns(), result.rates(), {})
    table = markdown_table(COLUMNS, result.rows(), result.facts)
    for path, content in {
        result.report: page("How few bits does an adapter need?", text, sections(result), result.facts),
        out / "table.md": f"{text}\n\n{missing}{rates}\n{table}",
    }.items():
        with atomic_path(path) as temporary:
            temporary.write_text(content, encoding="utf-8")
    curves_figure([*over_bytes(result), *over_bits(result)], across=3, path=out / "compression.png")
    write_json(out / "outcomes.json", [asdict(outcome) for outcome in result.outcomes])


def _plain(config: CompressionStudy) -> dict[str, Any]:
    """The settings that the numbers depend on, as JSON holds them."""
    settings = {name: value for name, value in asdict(config).items() if name not in {"out", "jobs", "device"}}
    return json.loads(json.dumps(settings, default=str))


def _settings(config: CompressionStudy) -> str:
    return ", ".join(f"{name} {value}" for name, value in _plain(config).items())
