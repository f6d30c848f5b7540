"""`wellposed study --ablation compression`, on adapters that train in a second, and LoRA split by its directions."""

import html
import json
import shutil
from dataclasses import asdict, replace
from math import log2
from pathlib import Path
from typing import Any

import pytest
import torch

from small_language import causal_folder, encoder_folder, first_letters, marked_sentences
from wellposed.cli import main
from wellposed.compression import compress, quantize, read_packed
from wellposed.compression.folders import read_plain
from wellposed.compression.split import split_all, split_by_direction
from wellposed.errors import InvalidArgumentError
from wellposed.runs import write_json
from wellposed.studies.adapter_config import AdapterCell, AdapterStudy
from wellposed.studies.adapter_running import run_adapter, tried_out
from wellposed.studies.compression_config import CompressionStudy, Copy
from wellposed.studies.compression_pictures import lead
from wellposed.studies.compression_rates import Point, Saving
from wellposed.studies.compression_result import CompressionResult
from wellposed.studies.compression_running import (
    Copied,
    CopiesOutcome,
    CopiesRun,
    _copied,
    score_copies,
    trained_cells,
)


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
    cell, adapter = next(iter(trained_cells(study)[0].items()))
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


@pytest.mark.parametrize("per", ["tensor", "row"])
@pytest.mark.parametrize("cell", ["lora-r2-0", "sine-r2-0"])
def test_a_copy_is_what_compress_writes(
    cell: str, per: Any, adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = adapters / "runs" / cell / "adapter"
    written = compress(folder, 3, out=tmp_path / "packed", per=per, device="cpu")
    packed = read_packed(tmp_path / "packed")
    monkeypatch.delattr("wellposed.compression.compressing.damage")  # stable ranks are not for the study
    study = CompressionStudy(adapters=adapters, per=per)
    tensors, nbytes, error = _copied(read_plain(folder), Copy("kmeans", 3), study, torch.device("cpu"))
    assert tensors.keys() == packed.tensors().keys()
    for name, tensor in packed.tensors().items():
        assert torch.equal(tensors[name], tensor)
        assert tensors[name].dtype == tensor.dtype
    assert nbytes == packed.nbytes
    assert error == pytest.approx(written.error, rel=1e-5)


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
    ((cell, adapter),) = trained_cells(config)[0].items()
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


def test_what_is_left_out_is_named(adapters: Path, done: Path, tmp_path: Path) -> None:
    """Seed 1 of LoRA diverged on one of its sets, and all weights are no adapter."""
    ran = json.loads((adapters / "outcomes.json").read_text())
    for cell, complaint in (
        (AdapterCell("lora", 2, 1, "letters"), "the loss is nan"),
        (AdapterCell("lora", 2, 1, "more"), ""),
        (AdapterCell("full", 0, 0), ""),
    ):
        ran.append(ran[0] | {"cell": asdict(cell), "complaint": complaint, "scores": {}})
    home = tmp_path / "adapters"
    home.mkdir()
    (home / "runs").symlink_to(adapters / "runs")
    write_json(home / "study.json", {"modality": "language"})
    write_json(home / "outcomes.json", ran)
    out = tmp_path / "study"
    shutil.copytree(done / "runs", out / "runs")
    write_json(out / "study.json", json.loads((done / "study.json").read_text()) | {"adapters": str(home)})
    assert main(flags(home, out)) == 0
    told = [
        "letters-lora-r2-1: the loss is nan",
        "more-lora-r2-1: with letters-lora-r2-1, another set of its seed",
        "full-0: all weights were trained, which is no adapter",
    ]
    for file in ("report.html", "table.md"):
        text = html.unescape((out / file).read_text(encoding="utf-8"))
        assert "1 seed. Left out, for reasons given below: letters-lora-r2-1, more-lora-r2-1, full-0." in text
        assert all(each in text for each in told)
    write_json(home / "outcomes.json", [each | {"complaint": "the loss is inf"} for each in ran])
    with pytest.raises(
        InvalidArgumentError, match=r"no adapter that was trained to its end \(lora-r2-0: the loss is inf"
    ):
        trained_cells(CompressionStudy(adapters=home))


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
    rates = {(name, bits): cells for name, bits, *cells in result.rates()}
    for bits in ("2", "4", "all"):
        assert rates["SineLoRA against LoRA", bits][:2] == ["-50.0 %", "-50.0 % over 2 seeds"]
        assert rates["DoRA against LoRA", bits][:2] == ["all scores higher", "all scores higher in 2 of 2 seeds"]
        assert float(rates["LoRA, k-means against uniform", bits][0].split()[0]) < -5
    assert rates["LoRA, SVD split against k-means", "2"][:2] == ["+0.0 %", "+0.0 % over 2 seeds"]
    assert ("LoRA", "1", "k-means", "2", "2.0", "56.5 (56.0 to 57.0)", "0.500") in result.rows()
    text = lead(result)
    assert "2 seeds." in text
    assert "-14.0 for LoRA" in text
    assert "SineLoRA against LoRA, bytes at equal score: -50.0 % at 2 bits (over 2 seeds), -50.0 % over" in text
    assert "DoRA against LoRA, bytes at equal score: all scores higher at 2 bits (in 2 of 2 seeds), all" in text
    assert "Likewise at 2 bits, means over seeds (seed by seed below): LoRA, k-means against uniform -" in text
    assert "LoRA, SVD split against k-means +0.0 %." in text


def point(rank: int, nbytes: float, *scores: float) -> Point:
    return Point("lora", rank, Copy("kmeans", 2), nbytes, 0.1, dict(enumerate(scores)))


def test_rates_seed_by_seed() -> None:
    """Seed 0 halves the bytes, seed 1 doubles them, and seed 2 lies below all of its reference."""
    reference = [point(rank, 1000 * rank, *[60 + 4 * log2(rank)] * 3) for rank in (1, 2, 4, 8)]
    curve = [
        point(rank, 1000 * rank, *(60 + 4 * (log2(rank) + by) for by in (1, -1)), 10 + rank) for rank in (1, 2, 4, 8)
    ]
    saving = Saving("x", 2, curve, reference)
    assert saving.over_seeds == "-50.0 to +100.0 % over 2 of 3 seeds, all scores lower in 1 of 3 seeds"
    assert saving.of_means == "all scores lower"
    assert saving.left_out == ""
    two = [replace(each, by_seed={seed: each.by_seed[seed] for seed in (0, 1)}) for each in curve]
    assert Saving("x", 2, two, reference).row()[2:] == ("+0.0 %", "-50.0 to +100.0 % over 2 seeds", "")
    one = [replace(each, by_seed={1: each.by_seed[1]}) for each in curve]
    assert Saving("x", 2, one, reference).row()[2:4] == ("+100.0 %", "one seed")
    worse = [*reference, point(16, 16000, 1, 1, 1)]
    assert Saving("x", 2, two, worse).left_out == "0 of 4 and 1 of 5", "it costs more and does less"


def test_seeds_are_not_overstated() -> None:
    ranks = (1, 2, 4)
    outcomes = [outcome(method, rank, 0, 1.0) for method in ("lora", "sine") for rank in ranks]
    config = CompressionStudy(bits=(2, 4))
    text = lead(CompressionResult(config, tuple(outcomes), Path("x"), {}))
    assert "1 seed." in text
    assert "There is one seed: another could change these rates by tens of percent." in text
    result = CompressionResult(config, (*outcomes, outcome("sine", 1, 1, 1.0)), Path("x"), {})
    assert "1 to 2 seeds a point." in lead(result)
    assert result.rows()[0][5] == "70.0, 1 of 2 seeds"
    assert ("SineLoRA", "1", "k-means", "2", "2.0", "56.5 (56.0 to 57.0)", "0.500") in result.rows()


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
    other = torch.randn(3, cols, generator=generator), torch.randn(rows, 3, generator=generator)
    for alone, beside in zip((split, split_by_direction(*other)), split_all([(a, b), other]), strict=True):
        assert torch.equal(alone.a, beside.a)
        assert torch.equal(alone.b, beside.b)
        assert alone.nbytes == beside.nbytes
