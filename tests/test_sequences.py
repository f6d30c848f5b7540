"""Softmax against degree 3 on ListOps and on text: the sets, the models, and `wellposed sequences`."""

import json
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import wellposed as wp
from wellposed.cli import main
from wellposed.data.listops import make_listops
from wellposed.data.sequences import TokenLoader, listops_set, text_set
from wellposed.errors import DataError, InvalidArgumentError
from wellposed.runs import read_journal
from wellposed.studies.sequence_config import CONFIGS, SequenceStudy
from wellposed.studies.sequence_task import make_model, read
from wellposed.studies.sequences import SequenceOutcome, sequences
from wellposed.training.classification import cross_entropy

TINY: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "epochs": 1, "batch_size": 16, "device": "cpu"}
FLAGS = [word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", str(value))]
LISTOPS = ["sequences", "listops", *FLAGS, "--examples", "200", "--length", "24"]


@pytest.fixture(scope="module")
def of_listops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sequences") / "listops"
    assert main([*LISTOPS, "--out", str(out)]) == 0
    return out


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"{i} and {i} are {2 * i}. " for i in range(700)))
    return path


def test_text_in_pieces(book: Path) -> None:
    train, test = (text_set(book, 30, split) for split in ("train", "test"))
    text = book.read_bytes()
    assert bytes(train.images[0].flatten().tolist()) == text[:30]
    assert bytes(train.labels[0].tolist()) == text[1:31]
    assert bytes(test.images[0].flatten().tolist()) == text[270:300]
    assert bytes(train.images[9].flatten().tolist()) == text[300:330]
    assert len(train) + len(test) == (len(text) - 1) // 30


def test_the_text_at_hand(book: Path) -> None:
    usual = text_set(None, 100, "train")
    assert len(usual) > 10_000
    assert b"import" in bytes(usual.images[:500].flatten().tolist())
    assert len(text_set(book.parent, 30, "test")) == len(text_set(book, 30, "test"))


def test_text_that_cannot_be_read(tmp_path: Path, book: Path) -> None:
    with pytest.raises(DataError, match="expected a file, or a folder"):
        text_set(tmp_path / "nothing", 30, "train")
    with pytest.raises(DataError, match="at least 10 pieces of 5000"):
        text_set(book, 5000, "train")
    with pytest.raises(InvalidArgumentError, match="split='valid'"):
        text_set(book, 30, "valid")


def test_batches_are_the_tokens_as_they_are() -> None:
    made, drawn = listops_set(7, 40, seed=3), make_listops(7, min_length=10, max_length=40, seed=3)
    (tokens, labels), *rest = TokenLoader(made, 4, shuffle=False)
    assert tokens.shape == (4, 40)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens[:, : drawn.tokens.shape[1]], drawn.tokens[:4].long())
    assert torch.equal(torch.cat([labels, *(more for _, more in rest)]), drawn.labels)
    shuffled = torch.cat([batch for batch, _ in TokenLoader(made, 1, seed=1)])
    assert sorted(shuffled.tolist()) == sorted(made.images.flatten(1).tolist())


@pytest.mark.parametrize("attention", ["softmax", "degree-3"])
def test_what_the_models_see(attention: Any) -> None:
    """Padding changes nothing of an expression's value; what comes later changes nothing of a text's next byte."""
    for task in ("listops", "text"):
        run = SequenceStudy(task=task, **TINY).run(attention, 0)
        model = make_model(run).eval().requires_grad_(False)
        if attention != "softmax":
            wp.use_attention(model, wp.Polynomial(3))
        for param in model.parameters():
            param.mul_(3)
        tokens = torch.randint(1, 16, (2, 12))
        whole = read(model, tokens, task)
        if task == "listops":
            assert whole.shape == (2, 10)
            torch.testing.assert_close(read(model, F.pad(tokens, (0, 9)), task), whole)
            changed = tokens.clone()
            changed[:, -1] = 17 - changed[:, -1].clamp(min=2)
            assert not torch.allclose(read(model, changed, task), whole)
        else:
            assert whole.shape == (2, 256, 12)
            torch.testing.assert_close(read(model, tokens[:, :7], task), whole[..., :7])


def test_both_are_trained_alike(of_listops: Path) -> None:
    configs = [json.loads((of_listops / f"listops-{a}-0" / "config.json").read_text()) for a in ("softmax", "degree-3")]
    different = {name for name, value in configs[0]["config"].items() if configs[1]["config"][name] != value}
    assert different == {"attention", "out"}
    assert wp.recipe(wp.load(of_listops / "listops-softmax-0")) == []
    (change,) = wp.recipe(wp.load(of_listops / "listops-degree-3-0"))
    assert (change["change"], change["degree"]) == ("use_attention", 3)


def test_outcomes_are_those_of_the_runs(of_listops: Path) -> None:
    test = listops_set(20, 24, seed=1)
    for outcome in json.loads((of_listops / "outcomes.json").read_text()):
        folder = of_listops / f"listops-{outcome['attention']}-0"
        with torch.no_grad():
            logits = read(wp.load(folder).eval(), test.images.flatten(1).long(), "listops")
        assert outcome["loss"] == pytest.approx(float(F.cross_entropy(logits, test.labels)), rel=1e-4)
        assert outcome["accuracy"] == pytest.approx(float((logits.argmax(1) == test.labels).float().mean()))
        norms = [event["attention_norms"] for event in read_journal(folder, "observe")]
        assert [len(each) for each in norms] == [2, 2]
        assert outcome["norms"] == pytest.approx([sum(each) / 2 for each in norms])


def test_the_same_command_goes_on(of_listops: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in of_listops.glob("*/result.json")}
    assert main([*LISTOPS, "--out", str(of_listops)]) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert "degree-3" in capsys.readouterr().out
    assert main([*LISTOPS, "--out", str(of_listops), "--lr", "0.1"]) == 2
    assert "lr=0.1: the run in" in capsys.readouterr().err


def test_an_interrupted_run_goes_on_to_the_same_end(of_listops: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(of_listops, copy)
    run = copy / "listops-degree-3-0"
    (run / "result.json").unlink()
    newest = max((run / "checkpoints").iterdir())
    shutil.rmtree(newest)
    assert main([*LISTOPS, "--out", str(copy)]) == 0
    assert (copy / "outcomes.json").read_text() == (of_listops / "outcomes.json").read_text()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_of_every_place_is_repeatable_on_a_gpu(reduction: str) -> None:
    """NLLLoss in two dimensions, which torch would take, raises there under use_deterministic_algorithms."""
    logits, targets = torch.randn(2, 5, 7, requires_grad=True), torch.randint(0, 5, (2, 7))
    found = cross_entropy(logits, targets, reduction=reduction)
    torch.testing.assert_close(found, F.cross_entropy(logits, targets, reduction=reduction))
    assert found.grad_fn is not None
    assert found.grad_fn.name() == "NllLossBackward0"


def test_a_text_is_learned(book: Path, tmp_path: Path) -> None:
    config = SequenceStudy(task="text", text=book, length=32, lr=1e-2, out=tmp_path / "out", **(TINY | {"epochs": 3}))
    outcomes = sequences(config)
    assert [outcome.attention for outcome in outcomes] == ["softmax", "degree-3"]
    for outcome in outcomes:
        assert outcome.loss is not None
        assert outcome.loss < 0.6 * log(256)
        assert outcome.row("text")[3] == f"{outcome.loss / log(2):.3f} bits per byte"
    test = text_set(book, 32, "test")
    with torch.no_grad():
        logits = read(wp.load(config.run("degree-3", 0).folder).eval(), test.images.flatten(1).long(), "text")
    assert outcomes[1].loss == pytest.approx(float(F.cross_entropy(logits, test.labels)), rel=1e-4)


def test_a_run_that_diverges_is_an_outcome(tmp_path: Path) -> None:
    config = SequenceStudy(**TINY, examples=100, length=16, lr=1e30, attentions=("degree-3",), out=tmp_path / "out")
    (outcome,) = sequences(config)
    assert outcome == SequenceOutcome("degree-3", 0)
    assert outcome.row("listops")[2] == "diverged"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--heads", "3"], "expected a multiple of twice the heads"),
        (["--seeds", "0"], "seeds=0"),
        (["--length", "3"], "length=3: expected at least 4"),
        (["--attentions", "relu", "relu"], "each once"),
        (["--text", "book.txt"], "makes no use of it"),
        (["--batch-size", "1000"], "expected at most 200"),
        (["--epochs", "0"], "epochs=0"),
    ],
)
def test_bad_input_writes_nothing(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*LISTOPS, *flags, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_every_config_can_be(tmp_path: Path) -> None:
    for name, config in CONFIGS.items():
        config.check()
        assert (config.device == "cuda") == name.endswith("full")
        assert config.attentions == ("softmax", "degree-3")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["listops-full", "text-full"])
def test_full_size_on_a_gpu(name: str, tmp_path: Path, book: Path) -> None:
    text = book if name == "text-full" else None
    small = replace(CONFIGS[name], epochs=1, examples=64, batch_size=4, length=256, text=text, out=tmp_path / "out")
    assert all(outcome.loss is not None for outcome in sequences(small))
