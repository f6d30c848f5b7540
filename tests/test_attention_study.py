"""`wellposed study --ablation attention` and `wellposed train --attention`."""

import html
import json
from pathlib import Path

import pytest
import torch

import wellposed as wp
from small_runs import assert_same_run, small_config
from wellposed.cli import main
from wellposed.diagnosis import probe
from wellposed.errors import InvalidArgumentError
from wellposed.runs import read_journal
from wellposed.studies import StudyConfig
from wellposed.studies.ablations import ABLATIONS
from wellposed.studies.comparison import StudyResult
from wellposed.studies.config import Cell
from wellposed.studies.running import Outcome
from wellposed.studies.words import lead
from zoo import IMAGE, vit

STUDY = [*("study", "--ablation", "attention", "--epochs", "1", "--device", "cpu", "--optimizers", "adamw")]
SMALL = [*STUDY, "--model-args", "embed_dim", "16", "depth", "2", "num_heads", "2"]
EXPECTED = {
    "softmax": None,
    "degree-3": {"kind": "polynomial", "degree": 3, "scale": None, "learnable": False},
    "unscaled": {"kind": "polynomial", "degree": 3, "scale": 1.0, "learnable": False},
    "conditioned": {"kind": "polynomial", "degree": 3, "scale": None, "learnable": False},
}


@pytest.fixture(scope="module")
def of_attention(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ablation") / "attention"
    assert main([*SMALL, "--kinds", *EXPECTED, "--more-seeds", "degree-3", "2", "--out", str(out)]) == 0
    return out


def changes(run: Path) -> dict[str, dict[str, object]]:
    return {str(entry.pop("change")): entry for entry in wp.recipe(wp.load(run))}


def test_every_kind_has_its_attention(of_attention: Path) -> None:
    runs = of_attention / "runs"
    assert {path.name for path in runs.iterdir()} == {*(f"{kind}-adamw-0" for kind in EXPECTED), "degree-3-adamw-1"}
    for kind, expected in EXPECTED.items():
        found = changes(runs / f"{kind}-adamw-0")
        assert found.get("use_attention") == expected
        assert ("cut_skips" in found) == (kind == "conditioned")
        assert ("condition_" in found) == (kind == "conditioned")


def test_all_start_from_the_same_weights(of_attention: Path) -> None:
    first = {
        kind: read_journal(of_attention / "runs" / f"{kind}-adamw-0", "observe")[0]["blocks"][0]["attention_norm"]
        for kind in EXPECTED
    }
    # Of the same logits: sqrt(17) stands between the third power and the unscaled one.
    assert first["unscaled"] == pytest.approx(first["degree-3"] * 17**0.5, rel=1e-4)


def test_norms_stand_beside_the_losses(of_attention: Path) -> None:
    text = html.unescape((of_attention / "report.html").read_text(encoding="utf-8"))
    assert text.index("Learning") < text.index("The norm of attention over training") < text.index("Every block before")
    assert f"here {17**0.5:.1f}" in text
    assert text.count("<svg") == 2 + 3 + 5 + 2 + 4
    assert "2410.18613" in text
    for path in (of_attention / "runs").iterdir():
        events = read_journal(path, "observe")
        assert len(events) == 2
        for block in (block for event in events for block in event["blocks"]):
            assert 0 < block["attention_norm"] < 1e6
    softmax = read_journal(of_attention / "runs" / "softmax-adamw-0", "observe")
    assert all(1 - 1e-5 < block["attention_norm"] <= 17**0.5 for event in softmax for block in event["blocks"])


def test_more_seeds_of_one_kind(of_attention: Path) -> None:
    outcomes = json.loads((of_attention / "outcomes.json").read_text())
    both = [100 * each["accuracy"] for each in outcomes if each["cell"]["kind"] == "degree-3"]
    assert len(both) == 2
    text = html.unescape((of_attention / "report.html").read_text(encoding="utf-8"))
    assert f"<td>{sum(both) / 2:.1f} ({min(both):.1f} to {max(both):.1f})</td>" in text
    assert "Every picture below shows the runs with seed 0" in text


def test_the_norm_is_frobenius() -> None:
    model = wp.use_attention(vit(depth=1).eval(), wp.Polynomial(2))
    images = torch.randn(IMAGE)
    (state,) = probe(model, images, torch.tensor([0, 1]))
    block = model.blocks[0].requires_grad_(False)
    x = block.norm1(model.norm_pre(model._pos_embed(model.patch_embed(images)))).detach()
    q, k, _ = block.attn.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    weights = (q @ k.mT / 8**0.5) ** 2 / x.shape[1] ** 0.5
    assert state.attention_norm == pytest.approx(float(weights.square().sum((-2, -1)).sqrt().mean()), rel=1e-5)


def test_the_words_follow_the_numbers() -> None:
    def words(**accuracies: float) -> str:
        reached = {kind.replace("_", "-"): value for kind, value in accuracies.items()}
        outcomes = [Outcome(Cell(kind, "soap", 0), value or None, 1.0) for kind, value in reached.items()]
        config = StudyConfig(ablation="attention", kinds=tuple(reached))
        return lead(StudyResult(config, tuple(outcomes), Path("report.html"), {}))

    assert "it reaches 79.0 %: no difference that one could" in words(softmax=0.8, degree_3=0.79)
    assert words(softmax=0.8, degree_3=0.85).endswith("it reaches 85.0 %: more.")
    assert words(softmax=0.8, degree_3=0.5, unscaled=0).endswith("less. Without that scale it diverges.")
    assert words(softmax=0.8, relu=0.7).endswith("softmax: diverged and 80.0; ReLU / N: diverged and 70.0.")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--more-seeds", "degree-9", "3"], "more_seeds has degree-9 3"),
        (["--more-seeds", "softmax", "many"], "more_seeds has softmax many"),
        (["--more-seeds", "softmax", "1", "--seeds", "2"], "at least 2"),
        (["--model", "convmixer_tiny", "--model-args", "depth", "2"], "expected a timm ViT"),
    ],
)
def test_bad_input_writes_nothing(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*STUDY, *flags, "--out", str(tmp_path / "study")]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_training_with_a_learned_scale_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(tmp_path / "run", attention="degree-3", attention_scale="learned", epochs=1)
    model = wp.train(config, quiet=True).model
    scales = [param for name, param in model.named_parameters() if name.endswith("log_scale_bias")]
    assert len(scales) == 2
    assert all(scale.abs().max() > 0 for scale in scales)
    assert wp.recipe(wp.load(config.folder))[0]["learnable"] is True
    assert main(["train", "--resume", "--out", str(config.folder), "--attention", "degree-2"]) == 2
    assert "attention=degree-2: the run in" in capsys.readouterr().err
    assert main(["train", "--resume", "--out", str(config.folder)]) == 0


def test_names_of_folders() -> None:
    assert small_config(None, attention="relu").folder.name.endswith("-default-relu-adamw-0")
    learned = small_config(None, attention="degree-2", attention_scale="learned")
    assert learned.folder.name.endswith("-default-degree-2-scale-learned-adamw-0")


def test_a_scale_needs_a_power(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="attention_scale='none' with attention='softmax'"):
        small_config(tmp_path, attention_scale="none").check()


def test_every_kind_is_another_run() -> None:
    runs = [StudyConfig(ablation="attention").run(Cell(kind.key, "soap", 0)) for kind in ABLATIONS["attention"].kinds]
    assert len(runs) == 9
    assert len({(run.attention, run.attention_scale, run.skips, run.init) for run in runs}) == 9


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("attention", ["degree-1", "degree-3"])
def test_training_repeats_itself_on_a_gpu(attention: str, compile: bool, tmp_path: Path) -> None:
    model = {"depth": 2, "embed_dim": 64, "num_heads": 2}
    for name in ("one", "other"):
        out = tmp_path / name
        settings = {"attention": attention, "compile": compile, "device": "cuda", "model_args": model}
        assert wp.train(small_config(out, **settings), quiet=True).loss < 2.4
    assert_same_run(tmp_path / "one", tmp_path / "other")
