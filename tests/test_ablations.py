"""Ablations as studies: which skips a ViT and a ConvMixer need."""

import html
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn

import wellposed as wp
from browser import check_in_a_browser, needs_chromium
from small_runs import small_config
from wellposed.cli import main
from wellposed.errors import InvalidArgumentError
from wellposed.runs import read_journal
from wellposed.studies import StudyConfig
from wellposed.studies.ablations import ABLATIONS
from wellposed.studies.comparison import StudyResult
from wellposed.studies.config import Cell
from wellposed.studies.graying import _patch_condition, graying_of_input
from wellposed.studies.running import Outcome, _batch_statistics
from wellposed.studies.words import lead
from zoo import convmixer, vit

USUAL = ["study", "--ablation", "skips", "--epochs", "1", "--device", "cpu"]
VIT = [*USUAL, "--model-args", "embed_dim", "16", "depth", "2", "num_heads", "2", "--optimizers", "adamw"]
CONVMIXER = [*USUAL, "--model", "convmixer_tiny", "--model-args", "dim", "16", "depth", "2", "kernel_size", "3"]
KEPT = {"all": (True, True), "no-attention": (False, True), "no-mlp": (True, False), "none": (False, False)}


@pytest.fixture(scope="module")
def of_vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ablation") / "vit"
    assert main([*VIT, "--lr-adamw", "2e-3", "--rates", "none-adamw", "5e-4", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def of_convmixer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ablation") / "convmixer"
    assert main([*CONVMIXER, "--patch-size", "1", "--out", str(out)]) == 0
    return out


def kept(run: Path) -> set[tuple[bool | None, bool | None]]:
    return {(block.attention, block.mlp) for block in wp.skips(wp.load(run))}


def test_a_vit_is_trained_with_every_choice_of_skips(of_vit: Path) -> None:
    runs = of_vit / "runs"
    assert {path.name for path in runs.iterdir()} == {f"{kind}-adamw-0" for kind in KEPT}
    for kind, skips in KEPT.items():
        assert kept(runs / f"{kind}-adamw-0") == {skips}
        config = json.loads((runs / f"{kind}-adamw-0" / "result.json").read_text())["config"]
        assert config["lr"] == (5e-4 if kind == "none" else 2e-3)
        assert config["init"] == "default"


def test_a_convmixer_is_trained_with_and_without_its_one_skip(of_convmixer: Path) -> None:
    runs = of_convmixer / "runs"
    assert {path.name for path in runs.iterdir()} == {"all-adamw-0", "none-adamw-0", "all-soap-0", "none-soap-0"}
    for optimizer in ("adamw", "soap"):
        assert kept(runs / f"all-{optimizer}-0") == {(True, None)}
        assert kept(runs / f"none-{optimizer}-0") == {(False, None)}
    model: Any = wp.load(runs / "all-adamw-0")
    assert model.stem[0].kernel_size == (1, 1)
    assert len(model.blocks) == 2


@pytest.mark.parametrize(("name", "panels"), [("of_vit", 2 + 5 + 2 + 4 + 3 * 9), ("of_convmixer", 4 + 4 + 4 + 4)])
def test_the_page_holds_the_numbers(name: str, panels: int, request: pytest.FixtureRequest) -> None:
    out: Path = request.getfixturevalue(name)
    text = html.unescape((out / "report.html").read_text(encoding="utf-8"))
    for path in (out / "runs").iterdir():
        assert f"<td>{100 * json.loads((path / 'result.json').read_text())['accuracy']:.1f}</td>" in text
    assert text.count("<svg") == panels
    assert "Which skips does it need?" in text
    assert "2505.01996" in text
    assert ("attention of a token to itself" in text) == (name == "of_vit")
    settings = text[text.index("How to get these numbers again") :]
    assert "ablation skips" in settings
    assert "lr_adamw" in settings
    assert "lr_skip_adamw" not in settings
    assert (out / "accuracy.png").stat().st_size > 10_000


def test_the_same_command_goes_on_and_more_may_be_asked_of_it(
    of_convmixer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "copy"
    shutil.copytree(of_convmixer, out)
    flags = [*CONVMIXER, "--patch-size", "1", "--out", str(out)]
    results = {path: path.read_text() for path in out.glob("runs/*/result.json")}
    gone = out / "runs" / "none-adamw-0"
    shutil.rmtree(gone)
    assert main([*flags, "--kinds", "none", "--optimizers", "adamw"]) == 0
    printed = capsys.readouterr().out
    assert "without skips" in printed
    assert "with skips" not in printed
    assert "SOAP" not in printed
    for path, before in results.items():
        assert (path.read_text() == before) == (path.parent != gone)
        assert json.loads(path.read_text())["accuracy"] == json.loads(before)["accuracy"]
    assert main([*flags, "--lr-soap", "1e-3"]) == 2
    assert "lr_soap=0.003, now it is 0.001" in capsys.readouterr().err
    assert main(["study", *flags[3:], "--model", "vit_tiny_patch16_224", "--model-args", "depth", "2"]) == 2
    assert "ablation=skips, now it is conditioning" in capsys.readouterr().err


def test_a_study_from_before_there_were_ablations_goes_on(of_vit: Path, tmp_path: Path) -> None:
    from wellposed.studies.comparison import _claim

    config = StudyConfig(out=tmp_path)
    _claim(config)
    stored = json.loads((tmp_path / "study.json").read_text())
    older = {name: value for name, value in stored.items() if name not in {"ablation", "kinds", "optimizers"}}
    (tmp_path / "study.json").write_text(json.dumps(older))
    _claim(config)
    assert "lr_adamw" not in stored


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*CONVMIXER, "--kinds", "all", "no-mlp"], "kinds has 'no-mlp'"),
        ([*CONVMIXER, "--kinds", "no-attention"], "expected some of all, none"),
        ([*CONVMIXER[:1], *CONVMIXER[3:]], "expected a timm ViT"),
        ([*VIT, "--kinds", "skipless"], "kinds='skipless': expected some of all, no-mlp, no-attention, none"),
        ([*VIT, "--kinds", "all", "all"], "each once"),
        ([*VIT, "--lr-skip-adamw", "0.1"], "lr_skip_adamw=0.1: --ablation skips makes no use of it"),
        (["study", "--lr-adamw", "0.1"], "lr_adamw=0.1: --ablation conditioning makes no use of it"),
        ([*VIT, "--rates", "none-muon", "1"], "expected a number for one of all-adamw, all-soap, no-mlp-adamw"),
        ([*VIT, "--rates", "none-adamw", "high"], "rates has none-adamw high"),
        ([*VIT, "--rates", "none-adamw", "inf"], "lr=inf"),
        ([*CONVMIXER, "--patch-size", "3"], "divide into"),
        ([*USUAL, "--model", "convmixer_tiny", "--model-args", "embed_dim", "16"], "no argument 'embed_dim'"),
    ],
)
def test_bad_input_writes_nothing(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "--out", str(tmp_path / "study")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_unknown_ablations_are_refused() -> None:
    with pytest.raises(SystemExit):
        main(["study", "--ablation", "nothing"])
    with pytest.raises(InvalidArgumentError, match="ablation='nothing': expected one of conditioning, skips"):
        wp.study(StudyConfig(ablation="nothing"))  # type: ignore[arg-type]
    assert get_args(get_type_hints(StudyConfig)["ablation"]) == tuple(ABLATIONS)


def test_the_words_follow_the_numbers() -> None:
    def words(**accuracies: float) -> str:
        reached = {kind.replace("_", "-"): value for kind, value in accuracies.items()}
        outcomes = [Outcome(Cell(kind, "soap", 0), value or None, 1.0) for kind, value in reached.items()]
        config = StudyConfig(ablation="skips", kinds=tuple(reached))
        return lead(StudyResult(config, tuple(outcomes), Path("report.html"), {}))

    bad_attention = words(all=0.9, no_attention=0.7, no_mlp=0.89, none=0.6)
    assert "trained four ways" in bad_attention
    assert "it reaches 90.0 %; without any it reaches 60.0 %" in bad_attention
    assert "by -20.0 points, cutting the MLP's alone by -1.0: attention needs its skips more" in bad_attention
    assert "the MLP needs its skips more" in words(all=0.9, no_attention=0.9, no_mlp=0.5, none=0.6)
    assert "+1.0: about the same" in words(all=0.9, no_attention=0.9, no_mlp=0.91, none=0.6)
    assert words(all=0.9, none=0.898).endswith("it reaches 90.0 %, without them it reaches 89.8 %: -0.2 points.")
    assert "without them it diverges" in words(all=0.9, none=0.0)
    assert words(all=0.9, no_mlp=0.5).endswith(
        "with skips: diverged and 90.0; without the MLP's skips: diverged and 50.0."
    )


def test_which_skips_a_run_cuts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(tmp_path / "run", skips=False, cut="attention", epochs=1)
    result = wp.train(config, quiet=True)
    assert {(block.attention, block.mlp) for block in wp.skips(result.model)} == {(False, True)}
    assert replace(config, out=None).folder.name == "digits-vit_tiny_patch16_224-no-attention-skip-default-adamw-0"
    assert main(["train", "--resume", "--out", str(config.folder), "--cut", "mlp"]) == 2
    assert "cut=mlp: the run in" in capsys.readouterr().err
    stored = config.folder / "config.json"
    stored.write_text(stored.read_text().replace('"cut": "attention"', '"cut": "both"'))
    assert main(["train", "--resume", "--out", str(config.folder)]) == 2
    assert "belongs to a run with cut=attention, not both" in capsys.readouterr().err
    with pytest.raises(InvalidArgumentError, match=re.escape("cut='mlp' with the skips kept: expected it with")):
        wp.train(small_config(tmp_path / "other", cut="mlp"))


def test_runs_see_batchnorm_as_training_does(of_convmixer: Path) -> None:
    model = convmixer().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(4, 3, 32, 32)
    with _batch_statistics(model):
        out = model(x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())
    torch.testing.assert_close(out, model.train()(x))
    assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    first = read_journal(of_convmixer / "runs" / "none-adamw-0", "observe")[0]["blocks"]
    assert all(block["image_difference"] > 1e-3 and block["gradient_norm"] > 1e-3 for block in first)


@needs_chromium
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_in_a_browser(width: int, of_vit: Path, tmp_path: Path) -> None:
    page = (of_vit / "report.html").read_text(encoding="utf-8")
    check_in_a_browser(page, width, page.count("<svg"), tmp_path)


@pytest.fixture(scope="module")
def of_graying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ablation") / "graying"
    chosen = ["--kinds", "plain", "svd-0.7", "dct-0.95", "--optimizers", "soap"]
    assert main(["study", "--ablation", "graying", *VIT[3:-2], *chosen, "--out", str(out)]) == 0
    return out


def test_the_input_is_grayed_as_each_kind_says(of_graying: Path) -> None:
    recipes = {path.name: wp.recipe(wp.load(path)) for path in (of_graying / "runs").iterdir()}
    assert recipes["plain-soap-0"] == []
    expected = {"change": "gray_tokens", "tol": 1e-3, "at": "patches", "kind": "svd", "eps": 0.7}
    assert recipes["svd-0.7-soap-0"] == [expected]
    assert recipes["dct-0.95-soap-0"][0]["kind"] == "dct"


def test_the_page_shows_what_graying_does(of_graying: Path) -> None:
    text = html.unescape((of_graying / "report.html").read_text(encoding="utf-8"))
    assert "What graying does to the input" in text
    assert "SVD: Jacobian of the first attention" in text
    assert "of the grayed ones" in text


def test_graying_makes_the_input_better_conditioned() -> None:
    torch.manual_seed(0)
    model = vit(img_size=16, patch_size=4, embed_dim=64, in_chans=1).eval()
    images = torch.rand(3, 1, 16, 16).cumsum(-1).cumsum(-2) / 100
    section = graying_of_input(model, images)
    assert len(section.panels) == 3
    assert wp.recipe(model) == []
    before = _patch_condition(model, images)
    after = _patch_condition(wp.gray_tokens(model, "svd", eps=0.7), images)
    assert before == pytest.approx(
        float(torch.linalg.cond(torch.nn.functional.unfold(images, 4, stride=4).mT.double()).median()), rel=1e-3
    )
    assert before > 1e4
    assert after == pytest.approx(before * 1e-3**0.3, rel=0.03)  # the smallest lie below the floor


def test_refused_graying(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidArgumentError, match="without graying"):
        small_config(tmp_path, gray_eps=0.5).check()
    with pytest.raises(InvalidArgumentError, match="gray_eps"):
        small_config(tmp_path, gray="dct", gray_eps=1.5).check()
    assert small_config(None, gray="svd").folder.name.endswith("-svd-patches-adamw-0")
