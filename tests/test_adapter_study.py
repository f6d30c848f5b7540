"""`wellposed study --ablation adapters`, on models that train in a second."""

import html
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from scipy.stats import ttest_ind
from torch import nn

from small_language import causal_folder, encoder_folder, first_letters, gguf_file, marked_sentences, write_jsonl
from wellposed.adapters import SineLoraConfig
from wellposed.cli import main
from wellposed.errors import InvalidArgumentError
from wellposed.studies import adapter_running
from wellposed.studies.adapter_config import AdapterCell, AdapterStudy, control_factor, task_name
from wellposed.studies.adapter_result import AdapterResult, Trained
from wellposed.studies.adapter_running import AdapterOutcome, run_adapter, run_adapters, tried_out
from wellposed.studies.adapter_words import lead
from wellposed.studies.chance import is_sure, pooled

QUICK = ["--epochs", "1", "--batch-size", "4", "--lr", "3e-3", "--settings", "max_length", "32", "generate", "0"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    causal_folder(folder / "llama")
    causal_folder(folder / "mute", tokenizer=False)
    encoder_folder(folder / "bert")
    first_letters(folder / "letters", 24)
    first_letters(folder / "more", 16)
    for name in ("CoLA", "RTE"):
        marked_sentences(folder / name, 24)
    write_jsonl(folder / "open" / "train.jsonl", [{"prompt": "a", "completion": "b"}] * 8)
    write_jsonl(folder / "open" / "test.jsonl", [{"prompt": "a", "completion": "b"}])
    return folder


def flags(home: Path, out: Path, *more: str) -> list[str]:
    data = ["--model", str(home / "llama"), "--data", str(home / "letters"), str(home / "more")]
    runs = ["--methods", "lora", "sine", "lora-control", "--ranks", "2", "--seeds", "1", "--device", "cpu"]
    return ["study", "--ablation", "adapters", *data, *runs, *QUICK, "--out", str(out), *more]


@pytest.fixture(scope="module")
def done(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("adapters") / "study"
    assert main(flags(home, out)) == 0
    return out


def results(out: Path) -> dict[str, dict[str, Any]]:
    return {path.name: json.loads((path / "result.json").read_text()) for path in (out / "runs").iterdir()}


def test_every_method_is_trained_as_it_says(done: Path) -> None:
    found = results(done)
    assert set(found) == {"lora-r2-0", "sine-r2-0", "lora-control-r2-0"}
    configs = {name: result["config"] for name, result in found.items()}
    assert {name: config["method"] for name, config in configs.items()} == {
        "lora-r2-0": "lora",
        "sine-r2-0": "sine",
        "lora-control-r2-0": "lora",
    }
    assert configs["lora-control-r2-0"]["lora_alpha"] == pytest.approx(4 * control_factor(2, "auto", None))
    assert configs["sine-r2-0"]["lora_alpha"] == configs["lora-r2-0"]["lora_alpha"] == 4
    for config in configs.values():
        assert (config["max_length"], config["generate"], len(config["data"])) == (32, 0, 2)


def test_the_page_and_the_table_hold_the_numbers(done: Path) -> None:
    page = html.unescape((done / "report.html").read_text(encoding="utf-8"))
    table = (done / "table.md").read_text(encoding="utf-8")
    for result in results(done).values():
        scores = [100 * result[f"{name}/accuracy"] for name in ("letters", "more")]
        cells = [f"{value:.1f}" for value in (*scores, sum(scores) / 2)]
        cells += [f"{result['loss']:.3f}", f"{result['mean_stable_rank']:.1f}"]
        assert f"| 2 | {result['trained_parameters']:,} | {' | '.join(cells)} |" in table
        assert f"<td>{'</td><td>'.join(cells)}</td>" in page
    assert "| LoRA, alpha x omega/g | 2 |" in table
    assert "With one seed, how much of a difference is chance cannot be said." in page
    assert page.count("<svg") == 2 + 2 + 1
    assert (done / "adapters.png").stat().st_size > 10_000


def test_the_same_command_goes_on_and_another_is_refused(
    home: Path, done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "copy"
    shutil.copytree(done, out)
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/result.json")}
    again = out / "runs" / "lora-r2-0" / "result.json"
    expected = json.loads(again.read_text())
    again.unlink()
    assert main(flags(home, out, "--methods", "lora", "sine")) == 0
    printed = capsys.readouterr()
    assert "1 of 2 runs are done already" in printed.err
    assert "SineLoRA" in printed.out
    assert "alpha x" not in printed.out
    assert {path for path, time in before.items() if path.stat().st_mtime_ns != time} == {again}
    assert json.loads(again.read_text())["letters/loss"] == expected["letters/loss"]
    assert main(flags(home, out, "--lr", "1e-3")) == 2
    assert "lr=0.003, now it is 0.001" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [2, 8])
def test_the_control_is_the_sine_adapter_to_first_order(rank: int) -> None:
    study = AdapterStudy(model="m", data=("d",), ranks=(rank,))
    alphas = {method: study.run(AdapterCell(method, rank, 0)).lora_alpha for method in ("sine", "lora-control")}
    common: dict[str, Any] = {"r": rank, "target_modules": ["0", "1"]}
    kinds = {
        "sine": SineLoraConfig(**common, lora_alpha=2 * rank),
        "lora-control": peft.LoraConfig(**common, lora_alpha=alphas["lora-control"]),
    }
    assert alphas["sine"] is None  # 2 r
    updates = {}
    for name, config in kinds.items():
        torch.manual_seed(0)
        model = peft.get_peft_model(nn.Sequential(nn.Linear(24, 96), nn.Linear(96, 16)), config)
        layers = [each for each in model.modules() if isinstance(each, peft.tuners.lora.LoraLayer)]
        for layer in layers:
            nn.init.normal_(layer.lora_B["default"].weight, std=1e-6)
        updates[name] = [layer.get_delta_weight("default").detach() for layer in layers]
    for sine, control in zip(*updates.values(), strict=True):
        assert control.abs().max() > 1e-6
        torch.testing.assert_close(sine, control, rtol=1e-4, atol=1e-9)


def test_the_control_needs_one_scale_for_all_layers() -> None:
    assert control_factor(4, 50.0, 2.0) == 25.0
    for omega, gain in ((50.0, None), ("auto", 2.0)):
        with pytest.raises(InvalidArgumentError, match="differ from layer to layer"):
            control_factor(4, omega, gain)  # type: ignore[arg-type]
    own = AdapterStudy(model="m", data=("d",), omega=50.0, gain=2.0)
    asked = [own.run(AdapterCell(method, 4, 0)) for method in ("sine", "lora", "lora-control")]  # type: ignore[arg-type]
    assert [(run.omega, run.gain, run.lora_alpha) for run in asked] == [
        (50.0, 2.0, None),
        ("auto", None, None),
        ("auto", None, 200.0),
    ]


def test_completions_are_learned_together_and_labels_apart(home: Path) -> None:
    common: dict[str, Any] = {"methods": ("full", "lora"), "ranks": (2, 4), "seeds": 1}
    texts = AdapterStudy(model=str(home / "llama"), data=(str(home / "letters"), str(home / "more")), **common)
    assert [str(cell) for cell in tried_out(texts).cells()] == ["full-0", "lora-r2-0", "lora-r4-0"]
    apart = tried_out(replace(texts, together=False))
    assert [str(cell) for cell in apart.cells()][3:] == ["more-full-0", "more-lora-r2-0", "more-lora-r4-0"]
    labels = tried_out(AdapterStudy(model=str(home / "bert"), data=(str(home / "CoLA"), str(home / "RTE")), **common))
    assert labels.together is False
    runs = [labels.run(cell) for cell in labels.cells()]
    assert {Path(data).name for run in runs for data in run.data} == {"CoLA", "RTE"}
    assert {len(run.data) for run in runs} == {1}
    assert [task_name(each) for each in ("a/b.tsv", "a/SST-2", "cifar10:x/y", "digits")] == [
        *("b", "SST-2", "cifar10", "digits"),
    ]


def test_each_set_has_its_own_score(home: Path, tmp_path: Path) -> None:
    study = AdapterStudy(
        model=str(home / "bert"),
        data=(str(home / "CoLA"),),
        epochs=1,
        batch_size=8,
        out=tmp_path,
        device="cpu",
        ranks=(2,),
    )
    outcome = run_adapter(study.run(AdapterCell("sine", 2, 0, "CoLA")), AdapterCell("sine", 2, 0, "CoLA"))
    told = json.loads((tmp_path / "runs" / "CoLA-sine-r2-0" / "result.json").read_text())
    assert outcome.scores == {"CoLA": {name: told[name] for name in ("loss", "accuracy", "matthews", "f1")}}
    assert outcome.points == {"CoLA": 100 * told["matthews"]}
    assert (outcome.parameters, outcome.stable_rank) == (told["trained_parameters"], told["mean_stable_rank"])


def test_a_gguf_file_is_unpacked_once(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(home / "llama").eval()
    packed = gguf_file(tmp_path / "llama.gguf", base)
    study = AdapterStudy(
        model=str(packed), data=(str(home / "letters"),), together=True, methods=("lora",), out=tmp_path
    )
    monkeypatch.setattr(adapter_running, "run_side_by_side", lambda runs, *_, **__: runs)
    for _ in range(2):
        assert {run.model for run in run_adapters(study)} == {str(tmp_path / "model")}  # type: ignore[attr-defined]
        packed.unlink(missing_ok=True)
    ids = torch.arange(3, 20)[None]
    unpacked = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    torch.testing.assert_close(unpacked(input_ids=ids).logits, base(input_ids=ids).logits)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "model")("ab")["input_ids"]


def test_images_go_the_same_way(tmp_path: Path) -> None:
    study = AdapterStudy(
        modality="vision",
        model="vit_tiny_patch16_224",
        data=("digits",),
        epochs=1,
        limit=64,
        batch_size=16,
        settings={"workers": 0},
        out=tmp_path,
        device="cpu",
        ranks=(2,),
    )
    study.check()
    study = tried_out(study)
    cell = next(cell for cell in study.cells() if cell.method == "sine")
    run = replace(study.run(cell), model_args={"depth": 1, "embed_dim": 16, "num_heads": 2})  # type: ignore[call-arg]
    outcome = run_adapter(run, cell)
    assert set(outcome.scores) == {"digits"}
    assert 0 <= outcome.points["digits"] <= 100
    assert outcome.stable_rank is not None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--ranks", "0"], "ranks=(0,): expected whole numbers from 1"),
        (["--methods", "lora", "lora"], "each once"),
        (["--seeds", "0"], "seeds=0"),
        (["--omega", "9"], "omega / g would differ from layer to layer"),
        (["--rates", "dora", "1e-3"], "rates has dora 0.001: expected a number for one of lora, sine, lora-control"),
        (["--settings", "r", "3"], "settings has 'r': expected some of answers, betas"),
        (["--settings", "max_length", "many"], "max_length='many': expected int"),
        (["--settings", "answers", "letters"], "answers='letters': expected one of names, texts"),
        (["--data", "nowhere"], "nowhere: expected a .json"),
        (["--data"], "data=(): expected at least one"),
        (["--modality", "vision", "--together", "True", "--settings"], "expected sets of images apart"),
        (["--together", "False", "--test", "x.jsonl"], "expected it with --together True"),
        (["--lr", "inf"], "lr=inf"),
    ],
)
def test_bad_input_writes_nothing(
    more: list[str], message: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(home, tmp_path / "study", *more)) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_answers_must_be_judged_somehow(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags(home, tmp_path / "study", "--data", str(home / "open"))) == 2
    assert "open has no choices to tell apart" in capsys.readouterr().err
    assert main(flags(home, tmp_path / "study", "--data", str(home / "letters" / "train.jsonl"))) == 2
    assert "has nothing to test on" in capsys.readouterr().err
    for part in ("train", "test"):
        unlisted = {"prompt": "Which? Answer format: answer1/answer2", "completion": "answer1"}
        data = write_jsonl(tmp_path / "unlisted" / f"{part}.jsonl", [unlisted]).parent
    assert main(flags(home, tmp_path / "study", "--data", str(data), "--settings", "answers", "texts")) == 2
    assert "train.jsonl, line 1 lists no option with a text" in capsys.readouterr().err


def test_a_model_that_cannot_be_leaves_the_folder_free(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(home, tmp_path / "study", "--model", str(home / "mute"))) == 2
    assert "has no tokenizer" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "study").iterdir()] == [".lock"]


def made(method: str, rank: int, *points: float, stable: float = 1.0) -> Trained:
    values = list(points)
    ranks = [stable] * len(values)
    return Trained(method, rank, {"a": values} if values else {}, values, values, 10 * rank, ranks, [], lost=0)


def test_the_words_follow_the_numbers() -> None:
    config = AdapterStudy(model="path/to/smol", data=("a",), ranks=(4,))

    def words(*models: Trained, seeds: int = 2) -> str:
        return lead(replace(config, seeds=seeds), models)

    lora, sine = made("lora", 4, 50.0, 51.0), made("sine", 4, 60.0, 61.0, stable=9.0)
    scale = words(lora, sine, made("lora-control", 4, 60.5, 61.5))
    assert scale.startswith("smol, 2 seeds;")
    assert "LoRA, alpha x omega/g does best with 61.0; last is LoRA with 50.5; seeds alone could put SineLoRA" in scale
    assert "SineLoRA against LoRA: +10.0 points, more than seeds make." in scale
    assert "+10.5 points, and from there to SineLoRA -0.5: the scale alone explains the difference" in scale
    assert "9.0 against 1.0 at rank 4" in scale
    assert "does not explain" in words(lora, sine, made("lora-control", 4, 50.0, 51.0))
    assert "the scale alone does better than the sine" in words(lora, sine, made("lora-control", 4, 80.0, 81.0))
    level = words(lora, made("sine", 4, 50.2, 51.2), made("lora-control", 4, 20.0, 21.0))
    assert "+0.2 points, which seeds alone could make" in level
    assert "no sure gain to explain, but at the same scale the sine does better" in level
    alone = words(made("lora", 4, 50.0), made("sine", 4, 60.0), seeds=1)
    assert "SineLoRA against LoRA: +10.0 points." in alone
    assert "seeds alone" not in alone
    assert "SineLoRA at rank 4 diverged with every seed" in words(lora, made("sine", 4))


def test_runs_that_diverge_are_counted() -> None:
    config = AdapterStudy(model="m", data=("a",), ranks=(4,), methods=("lora", "sine"))
    scores = {"a": {"accuracy": 0.5, "loss": 1.0}}
    outcomes = [AdapterOutcome(AdapterCell("lora", 4, seed), 1.0, scores, 8, 1.5) for seed in (0, 1)]
    outcomes[1] = AdapterOutcome(AdapterCell("lora", 4, 1), 0.0, complaint="not finite")
    outcomes.append(AdapterOutcome(AdapterCell("sine", 4, 0), 0.0, complaint="not finite"))
    rows = AdapterResult(config, tuple(outcomes), Path("x"), {}).rows()
    assert rows[0] == ("LoRA (1 diverged)", "4", "8", "50.0", "1.000", "1.5", "", "1")
    assert rows[1] == ("SineLoRA", "4", "", "diverged", "", "", "", "")


def test_chance_is_that_of_the_t_test() -> None:
    generator = torch.Generator().manual_seed(0)
    told = set()
    for _ in range(40):
        one, other = (torch.randn(size, generator=generator).tolist() for size in (3, 4))
        one = [value + 1.5 for value in one]
        expected = bool(ttest_ind(one, other).pvalue < 0.05)
        assert is_sure(one, other, pooled([one, other])) == expected
        told.add(expected)
    assert told == {True, False}
    assert not is_sure([1.0], [9.0], pooled([[1.0], [9.0]]))
