"""`wellposed study --ablation compression`, on adapters that train in a second, and LoRA split by its directions."""

import html
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from small_language import causal_folder, encoder_folder, first_letters, marked_sentences
from wellposed.cli import main
from wellposed.compression import quantize
from wellposed.compression.split import split_by_direction
from wellposed.runs import write_json
from wellposed.studies.adapter_config import AdapterCell, AdapterStudy
from wellposed.studies.adapter_running import run_adapter, tried_out
from wellposed.studies.compression_config import CompressionStudy
from wellposed.studies.compression_pictures import lead
from wellposed.studies.compression_result import CompressionResult
from wellposed.studies.compression_running import Copied, CopiesOutcome, CopiesRun, score_copies, trained_cells


def trained(study: AdapterStudy, **changes: Any) -> Path:
    """What a finished study of adapters leaves behind, its runs made one after the other in this process."""
    study = tried_out(study)
    outcomes = [run_adapter(replace(study.run(cell), **changes), cell) for cell in study.cells()]
    write_json(study.out / "study.json", {"modality": study.modality})
    write_json(study.out / "outcomes.json", [asdict(outcome) for outcome in outcomes])
    return study.out


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("compression")
    return trained(
        AdapterStudy(
            model=str(causal_folder(home / "llama")),
            data=(str(first_letters(home / "letters", 24)), str(first_letters(home / "more", 16))),
            methods=("lora", "sine"),
            ranks=(2,),
            seeds=1,
            epochs=1,
            batch_size=4,
            lr=3e-3,
            settings={"max_length": 32, "generate": 0},
            device="cpu",
            out=home / "adapters",
        )
    )


def flags(adapters: Path, out: Path, *more: str) -> list[str]:
    words = ["--adapters", str(adapters), "--bits", "1", "8", "--device", "cpu", "--jobs", "1", "--out", str(out)]
    return ["study", "--ablation", "compression", *words, *more]


@pytest.fixture(scope="module")
def done(adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compression") / "study"
    assert main(flags(adapters, out)) == 0
    return out


def copies(out: Path, cell: str) -> dict[str, dict[str, Any]]:
    return json.loads((out / "runs" / cell / "copies.json").read_text())["copies"]


def test_copies_are_tested_as_their_adapter_was(adapters: Path, done: Path) -> None:
    for cell in ("lora-r2-0", "sine-r2-0"):
        result = json.loads((adapters / "runs" / cell / "result.json").read_text())
        found = copies(done, cell)
        split = {"split-2"} if cell.startswith("lora") else set()
        assert set(found) == {"half-16", "kmeans-1", "kmeans-8", "uniform-1", "uniform-8"} | split
        scores = {name: 100 * result[f"{name}/accuracy"] for name in ("letters", "more")}
        assert found["half-16"]["points"] == found["kmeans-8"]["points"] == scores
        numbers, factors = result["trained_parameters"], 2 * 14
        assert found["half-16"]["nbytes"] == 2 * numbers
        assert found["kmeans-1"]["nbytes"] == numbers // 8 + factors * 2 * 2
        assert found["kmeans-8"]["nbytes"] == numbers + factors * 256 * 2
        errors = [found[name]["error"] for name in ("uniform-1", "kmeans-1", "uniform-8", "kmeans-8")]
        assert errors == sorted(errors, reverse=True)
        assert errors[-1] < 0.02


def test_the_page_and_the_table_hold_the_numbers(done: Path) -> None:
    page = html.unescape((done / "report.html").read_text(encoding="utf-8"))
    table = (done / "table.md").read_text(encoding="utf-8")
    for cell, name in (("lora-r2-0", "LoRA"), ("sine-r2-0", "SineLoRA")):
        one = copies(done, cell)["kmeans-1"]
        score = sum(one["points"].values()) / 2
        cells = [name, "2", "k-means", "1", f"{one['nbytes'] / 1e3:.1f}", f"{score:.1f}", f"{one['error']:.3f}"]
        assert f"| {' | '.join(cells)} |" in table
        assert f"<td>{'</td><td>'.join(cells)}</td>" in page
    assert "SineLoRA against LoRA" in table
    assert "LoRA | 2 | SVD split | 2 and 1 |" in table
    assert page.count("<svg") == 2 + 1 + 1
    assert (done / "compression.png").stat().st_size > 10_000


def test_the_same_study_goes_on(adapters: Path, done: Path, tmp_path: Path) -> None:
    study = CompressionStudy(adapters=adapters, bits=(1, 8), schemes=("kmeans",), device="cpu", out=tmp_path)
    cell, adapter = next(iter(trained_cells(study).items()))
    run = CopiesRun(adapter, study, tmp_path / "runs" / str(cell))
    begun = copies(done, str(cell))
    kept = {"half-16": begun["half-16"], "kmeans-1": begun["kmeans-1"] | {"error": 123.0}}
    run.folder.mkdir(parents=True)
    write_json(run.folder / "copies.json", {"copies": kept, "seconds": 1.0})
    outcome = score_copies(run, cell)
    assert outcome.copies["kmeans-1"].error == 123.0, "it was not made again"
    assert outcome.seconds > 1
    for name in ("kmeans-8", "split-2"):
        assert asdict(outcome.copies[name]) == begun[name]


@pytest.mark.parametrize("kind", ["vision", "labels"])
def test_heads_go_along_and_are_not_counted(kind: str, tmp_path: Path) -> None:
    common: dict[str, Any] = {"methods": ("sine-dora",), "ranks": (2,), "seeds": 1, "epochs": 1, "batch_size": 8}
    common |= {"device": "cpu", "out": tmp_path / "adapters"}
    if kind == "vision":
        study = AdapterStudy(
            **common,
            modality="vision",
            model="vit_tiny_patch16_224",
            data=("digits",),
            limit=64,
            settings={"workers": 0},
        )
        trained(study, model_args={"depth": 1, "embed_dim": 16, "num_heads": 2})
    else:
        data = str(marked_sentences(tmp_path / "CoLA", 24))
        trained(AdapterStudy(**common, model=str(encoder_folder(tmp_path / "bert")), data=(data,)))
    config = CompressionStudy(adapters=tmp_path / "adapters", bits=(8,), schemes=("kmeans",), device="cpu")
    ((cell, adapter),) = trained_cells(config).items()
    outcome = score_copies(CopiesRun(adapter, config, tmp_path / "copies" / "one"), cell)
    result = json.loads((adapter.folder / "result.json").read_text())
    assert outcome.copies["half-16"].points == {
        {"vision": "digits", "labels": "CoLA"}[kind]: 100 * result["accuracy" if kind == "vision" else "matthews"]
    }
    assert outcome.copies["half-16"].nbytes < 2 * result["trained_parameters"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--bits", "0"], "bits=(0,): expected whole numbers from 1 to 8"),
        (["--bits", "2", "2"], "each once"),
        (["--schemes"], "schemes=(): expected at least one"),
        (["--jobs", "0"], "jobs=0"),
        (["--adapters", "nowhere"], "nowhere holds no finished study of adapters (FileNotFoundError"),
        (["--device", "cuda:99"], "cuda:99"),
    ],
)
def test_bad_input_writes_nothing(
    more: list[str], message: str, adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(adapters, tmp_path / "study", *more)) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_adapters_stay_as_they_are(adapters: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags(adapters, adapters)) == 2
    assert "expected another folder than that of the adapters" in capsys.readouterr().err


def outcome(method: Any, rank: int, seed: int, factor: float, gain: float = 0.0) -> CopiesOutcome:
    """Bytes that grow with rank and bits, times a factor; scores that grow with both, and are less when uniform."""
    config = CompressionStudy(bits=(2, 4))
    made = {}
    for copy in config.copies(method):
        score = 50 + 4 * rank + copy.bits + gain + seed - 3 * (copy.scheme == "uniform")
        made[str(copy)] = Copied(int(1000 * factor * rank * copy.bits), 1 / copy.bits, {"a": score})
    return CopiesOutcome(AdapterCell(method, rank, seed), 1.0, made)


def test_rates_and_words_follow_the_numbers() -> None:
    ranks = (1, 2, 4, 8)
    outcomes = [outcome("lora", rank, seed, 1.0) for rank in ranks for seed in (0, 1)]
    outcomes += [outcome("sine", rank, seed, 0.5) for rank in ranks for seed in (0, 1)]
    outcomes += [outcome("dora", rank, seed, 1.0, gain=1000) for rank in ranks for seed in (0, 1)]
    result = CompressionResult(CompressionStudy(bits=(2, 4)), tuple(outcomes), Path("x"), {})
    rates = {name: cells for name, *cells in result.rates()}
    assert result.rate_columns() == ("bytes at equal score", "2 bits", "4 bits", "all")
    assert rates["SineLoRA against LoRA"] == ["-50.0 %"] * 3
    assert rates["DoRA against LoRA"] == [""] * 3, "no score in common"
    assert all(float(cell.split()[0]) < -5 for cell in rates["LoRA, k-means against uniform"])
    assert rates["LoRA, SVD split against k-means"][0] == "+0.0 %"
    assert ("LoRA", "1", "k-means", "2", "2.0", "56.5 (56.0 to 57.0)", "0.500") in result.rows()
    text = lead(result)
    assert "2 seeds." in text
    assert "-14.0 for LoRA" in text
    assert "SineLoRA against LoRA, bytes at equal score: -50.0 % at 2 bits, -50.0 % of all points." in text
    assert "DoRA against LoRA, bytes at equal score: no range of scores in common." in text


@pytest.mark.parametrize(("r", "rows", "cols"), [(8, 60, 90), (5, 40, 30), (6, 4, 50)])
def test_a_split_by_direction(r: int, rows: int, cols: int) -> None:
    generator = torch.Generator().manual_seed(r)
    scales = 0.5 ** torch.arange(r)
    a, b = torch.randn(r, cols, generator=generator), torch.randn(rows, r, generator=generator) * scales
    whole = b @ a

    def error(product: torch.Tensor) -> float:
        return float((product - whole).norm() / whole.norm())

    fine = split_by_direction(a, b, bits=(8, 8))
    assert error(fine.b @ fine.a) < 0.02
    assert (fine.a.shape, fine.b.shape) == (a.shape, b.shape)
    split = split_by_direction(a, b)
    (one_a,), (one_b,) = (quantize([each.reshape(1, -1)], bits=2) for each in (a, b))
    assert error(split.b @ split.a) < error(one_b.values().view_as(b) @ one_a.values().view_as(a))
    k = min(r, rows)
    high = round(0.6 * k)
    codes = sum(-(-high * side * 2 // 8) + -(-(k - high) * side // 8) for side in (rows, cols))
    assert split.nbytes == codes + 2 * (high * 4 * 2 + (k - high) * 2 * 2)
