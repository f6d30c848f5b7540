"""One field at several ranks, full, low-rank and sine, side by side: the table, the curve and the page."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any, Protocol

from wellposed.errors import DivergedError, InvalidArgumentError, WellposedError
from wellposed.fields.config import FieldConfig
from wellposed.fields.layers import KINDS, Kind
from wellposed.fields.results import FITTED, FieldResult
from wellposed.reporting import curves_figure, markdown_table, page, text_table
from wellposed.runs import atomic_path, locked, write_json, writing_to
from wellposed.studies.field_pictures import columns_of, lead, rank_curves, rows_of, sections
from wellposed.studies.folders import REPORT, STUDY, check_out, claim, facts_of
from wellposed.studies.side_by_side import LostError, run_side_by_side
from wellposed.training.settings import FREE, RUN_CONFIG

DEFAULT_RANKS = (1, 5, 10, 20, 30)


class Fit(Protocol):
    """`fit_image`, `fit_occupancy` or `fit_nerf`."""

    def __call__(self, config: Any, *, quiet: bool = False) -> FieldResult:
        """Fit as `config` says."""
        ...


@dataclass(frozen=True)
class RankComparison:
    """How the runs ended, and where the page about them is."""

    results: tuple[FieldResult, ...]
    report: Path

    def __str__(self) -> str:
        columns = columns_of(self.results)
        return f"{text_table(columns, rows_of(self.results))}\n{lead(self.results)}\nreport: {self.report}"


def compare_ranks(
    config: FieldConfig, fit: Fit, *, kinds: Sequence[Kind] = KINDS, ranks: Sequence[int] = DEFAULT_RANKS, jobs: int = 1
) -> RankComparison:
    """Fit a field once for each of `kinds` and `ranks`, once for full rank, and write report.html and table.md.

    Killed at any moment, the same call goes on with it; with other kinds and ranks it adds to what is there. Where
    runs diverge or break off, the page has the others, and the error of the first is raised once it is written.

    Args:
        config: everything else, with the folder for all of them.
        fit: what fits one, a function of a module.
        kinds: full, low-rank, sine.
        ranks: of the latter two.
        jobs: runs at a time, in processes of their own.
    """
    if config.resume:
        raise InvalidArgumentError("--resume with --kinds or --ranks: the same command goes on without it")
    if jobs < 1:
        raise InvalidArgumentError(f"jobs={jobs}: expected at least 1")
    out = config.out or Path("runs") / f"fit-{config.name}-{Path(config.data).stem}-ranks-{config.seed}"
    check_out(out)
    runs = _runs(replace(config, out=out), kinds or KINDS, ranks or DEFAULT_RANKS)
    with writing_to(out):
        out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        settings = {name: value for name, value in config.to_dict().items() if name not in {*FREE, "kind", "rank"}}
        settings = {"field": config.name, "data": config.data, **settings}
        claim(out, settings, {}, ())
        module = fit.__module__
        try:
            ended = run_side_by_side(runs, partial(_fitted, fit), _finished, jobs=jobs, preload=[module])
        except (DivergedError, LostError) as error:
            ended = {key: result for key, each in runs.items() if (result := _finished(each, key))}
            if not ended:
                _give_back(out, keep_logs=True)
                raise
            facts = facts_of([runs[key] for key in ended], settings)
            lost = ", ".join(key for key in runs if key not in ended)
            _write(out, config, tuple(ended.values()), {"lost": lost, **facts})
            raise type(error)(f"{error}. What came to its end is in {out / REPORT}") from error
        except WellposedError:
            _give_back(out, keep_logs=False)
            raise
        results = tuple(ended.values())
        _write(out, config, results, facts_of(runs.values(), settings))
    return RankComparison(results, out / REPORT)


def _runs(config: FieldConfig, kinds: Sequence[Kind], ranks: Sequence[int]) -> dict[str, FieldConfig]:
    """The runs by their labels, each checked."""
    chosen = [replace(config, kind="full")] if "full" in kinds else []
    low = [kind for kind in KINDS if kind != "full" and kind in kinds]
    chosen += [replace(config, kind=kind, rank=rank) for rank in sorted(set(ranks)) for kind in low]
    for each in chosen:
        each.check()
    assert config.out is not None
    return {each.label: replace(each, out=config.out / "runs" / each.label) for each in chosen}


def _fitted(fit: Fit, config: FieldConfig, key: str) -> FieldResult:
    """Fit, or go on."""
    return fit(replace(config, resume=(config.folder / RUN_CONFIG).exists()), quiet=True)


def _finished(config: FieldConfig, key: str) -> FieldResult | None:
    return FieldResult.read(config) if (config.folder / FITTED).exists() else None


def _give_back(out: Path, *, keep_logs: bool) -> None:
    """Leave the folder free for other settings where no run has begun, as with a file that cannot be read."""
    if (out / "runs").exists():
        return
    (out / STUDY).unlink(missing_ok=True)
    if not keep_logs:
        rmtree(out / "logs", ignore_errors=True)


def _write(out: Path, config: FieldConfig, results: Sequence[FieldResult], facts: dict[str, str]) -> None:
    with writing_to(out):
        _write_page(replace(config, out=out), results, facts)
        with atomic_path(out / "table.md") as file:
            table = markdown_table(columns_of(results), rows_of(results), facts)
            file.write_text(f"{lead(results)}\n\n{table}", encoding="utf-8")
        curves_figure(rank_curves(results), across=2, path=out / "ranks.png")
        write_json(out / "results.json", [asdict(result) | {"out": str(result.out)} for result in results])


def _write_page(config: FieldConfig, results: Sequence[FieldResult], facts: dict[str, str]) -> None:
    title = (
        f"{Path(config.data).stem}: {config.name} with {', '.join(dict.fromkeys(each.kind for each in results))} layers"
    )
    with atomic_path(config.folder / REPORT) as file:
        file.write_text(page(title, lead(results), sections(results), facts), encoding="utf-8")


def fit_or_compare(
    config: FieldConfig,
    fit: Callable[..., FieldResult],
    given: list[str] | None,
    kinds: Sequence[Kind],
    ranks: Sequence[int],
    jobs: int,
) -> None:
    """What `wellposed fit` does: one fit, or with kinds or ranks all of them; and a page that shows how it ended."""
    if kinds or ranks:
        print(compare_ranks(config, fit, kinds=kinds, ranks=ranks, jobs=jobs))
        return
    result = fit(config, given=given)
    config = type(config).of_run(result.out)
    with writing_to(result.out):
        _write_page(config, [result], facts_of([config], config.to_dict()))
    print(f"report: {result.out / REPORT}")
