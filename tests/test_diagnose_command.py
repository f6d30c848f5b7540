"""`wellposed diagnose`: models and inputs as people have them on disk, and the page it writes."""

import html
import json
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import wellposed as wp
from browser import check_in_a_browser, needs_chromium
from wellposed.cli import main
from wellposed.diagnosis.sources import open_inputs, open_model
from wellposed.errors import DataError, InvalidArgumentError, ModelFileError
from zoo import VOCABULARY, bert, hf_vit, llama, vit


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return wp.save(wp.condition_(wp.cut_skips(vit())), tmp_path_factory.mktemp("model") / "saved")


@pytest.fixture(scope="module")
def page(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "new" / "report.html"
    assert main(["diagnose", str(saved), "--html", str(path), "--device", "cpu"]) == 0
    return path


def test_a_model_of_ours_to_text_page_json_and_picture(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("html", "json")} | {"plot": tmp_path / "out.png"}
    flags = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert main(["diagnose", str(saved), *flags, "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "VisionTransformer: 2 blocks, 16 inputs of 17 tokens, 32 wide" in printed
    assert all(f"written: {path}" in printed for path in files.values())
    report = json.loads(files["json"].read_text())
    assert report["blocks"][0]["cut"] == ["attention", "mlp"]
    assert report["blocks"][0]["weights"]["value_output"] == pytest.approx(1, abs=1e-3)
    assert files["plot"].read_bytes()[1:4] == b"PNG"


def test_the_page_tells_what_was_found(page: Path) -> None:
    text = html.unescape(page.read_text(encoding="utf-8"))
    assert text.count("<svg") == 5
    assert "Healthy: W_V W_O has a condition number below" in text
    assert "2505.01996, Prop. 4.1" in text
    assert "wellposed" in text[text.index("How to get these numbers again") :]


@needs_chromium
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_in_a_browser(width: int, page: Path, tmp_path: Path) -> None:
    check_in_a_browser(page.read_text(encoding="utf-8"), width, 5, tmp_path)


def test_a_timm_model_with_its_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=7)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save({"state_dict": model.state_dict()}, tmp_path / "model.pth")
    for name in ("model.safetensors", "model.pth"):
        opened = open_model("vit_tiny_patch16_224", tmp_path / name)
        assert all(torch.equal(a, b) for a, b in zip(opened.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("make", [hf_vit, bert, llama])
def test_a_huggingface_folder(make: type, tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    model = open_model(str(tmp_path))
    inputs = torch.randint(0, VOCABULARY, (2, 9)) if make is not hf_vit else open_inputs(model, str(tmp_path))
    assert len(wp.diagnose(model, inputs).blocks) == 2


def test_a_folder_that_lacks_weights(tmp_path: Path) -> None:
    model = llama()
    state = {key: value for key, value in model.state_dict().items() if "layers.1" not in key}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ModelFileError, match=r"lacks \d+ weights of the model's blocks, such as layers.1"):
        open_model(str(tmp_path))


def test_a_text_through_the_models_own_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    llama().save_pretrained(tmp_path)
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["?", "to", "be", "or", "not"])}, unk_token="?")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path)
    capsys.readouterr()
    assert main(["diagnose", str(tmp_path), "--text", "to be or not to be", "--device", "cpu"]) == 0
    assert "LlamaModel: 2 blocks, 1 inputs of 6 tokens, 32 wide" in capsys.readouterr().out
    (tmp_path / "long.txt").write_text("to be or not " * 100)
    assert main(["diagnose", str(tmp_path), "--text", str(tmp_path / "long.txt"), "--device", "cpu"]) == 0
    assert "3 inputs of 128 tokens" in capsys.readouterr().out
    with pytest.raises(DataError, match="cannot be read as text"):
        open_inputs(llama(), str(tmp_path), text=str(tmp_path))


def test_pictures_and_sets(tmp_path: Path) -> None:
    model = vit()
    for number, size in enumerate(((40, 60), (33, 32))):
        Image.new("RGB", size, (0, 128, 255)).save(tmp_path / f"{number}.png")
    images = open_inputs(model, "", images=[tmp_path])
    assert isinstance(images, torch.Tensor)
    assert images.shape == (2, 3, 32, 32)
    assert images[0, :, 5, 5].tolist() == pytest.approx([-1, 128 / 127.5 - 1, 1], abs=1e-5)  # as timm says of this one
    deit = open_inputs(timm.create_model("deit_tiny_patch16_224"), "", images=[tmp_path])
    assert isinstance(deit, torch.Tensor)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    expected = [(value / 255 - m) / s for value, m, s in zip((0, 128, 255), mean, std, strict=True)]
    assert deit[0, :, 5, 5].tolist() == pytest.approx(expected, rel=1e-4)
    digits = open_inputs(vit(in_chans=1, img_size=8, patch_size=2), "", data="digits")
    assert isinstance(digits, torch.Tensor)
    assert digits.shape == (16, 1, 8, 8)
    assert abs(float(digits.mean())) < 0.1
    grey = open_inputs(vit(in_chans=1), "")
    assert isinstance(grey, torch.Tensor)
    assert grey.shape == (16, 1, 32, 32)


def test_initializations_can_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["img_size", "32", "patch_size", "8", "embed_dim", "32", "depth", "2", "num_heads", "4"]
    command = ["diagnose", "vit_tiny_patch16_224", "--model-args", *small, "--no-skips", "--device", "cpu"]
    assert main(command) == 0
    assert "Unhealthy: tokens have become nearly the same" in capsys.readouterr().out
    assert main([*command, "--init", "conditioned", "--jacobians"]) == 0
    printed = capsys.readouterr().out
    assert "Healthy: W_V W_O" in printed
    assert "Prop. 2" in printed


def test_a_model_that_wellposed_registers(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            ["diagnose", "convmixer_tiny", "--model-args", "dim", "8", "depth", "2", "--count", "2", "--device", "cpu"]
        )
        == 0
    )
    assert "ConvMixer: 2 blocks" in capsys.readouterr().out


def test_refusals(tmp_path: Path, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidArgumentError, match="such as vit_tiny_patch16_224"):
        open_model("vit_tinny_patch16_224")
    with pytest.raises(ModelFileError, match="does not exist"):
        open_model(str(tmp_path / "model.gguf"))
    with pytest.raises(ModelFileError, match="cannot be read as a model"):
        open_model(str(tmp_path))
    with pytest.raises(InvalidArgumentError, match="has its own weights"):
        open_model(str(saved), tmp_path / "model.pth")
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelFileError, match="cannot be read as weights"):
        open_model("vit_tiny_patch16_224", tmp_path / "broken.safetensors")
    save_file({"head.weight": torch.zeros(3, 192)}, tmp_path / "part.safetensors")
    with pytest.raises(InvalidArgumentError, match="cannot be made with"):
        open_model("vit_tiny_patch16_224", model_args={"depht": 3})
    with pytest.raises(ModelFileError, match="do not fit"):
        open_model("vit_tiny_patch16_224", tmp_path / "part.safetensors")
    with pytest.raises(DataError, match="no such file"):
        open_inputs(vit(), "", images=[tmp_path / "absent.png"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no picture in this folder"):
        open_inputs(vit(), "", images=[tmp_path / "empty"])
    with pytest.raises(DataError, match="cannot be read as a picture"):
        open_inputs(vit(), "", images=[tmp_path / "broken.safetensors"])
    with pytest.raises(InvalidArgumentError, match="one of them"):
        open_inputs(vit(), "", data="digits", text="a")
    with pytest.raises(InvalidArgumentError, match="takes no images"):
        open_inputs(llama(), "a llama")
    assert main(["diagnose", str(saved), "--html", str(tmp_path), "--device", "cpu"]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[type, tuple[str]]:
            return (open, (str(tmp_path / "ran"), "w"))  # type: ignore[return-value]

    torch.save({"state_dict": {"head.weight": Bomb()}}, tmp_path / "bomb.pth")
    with pytest.raises(ModelFileError, match="cannot be read as weights"):
        open_model("vit_tiny_patch16_224", tmp_path / "bomb.pth")
    assert not (tmp_path / "ran").exists()
