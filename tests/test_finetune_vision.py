"""`wellposed finetune vision`, from a model on disk to a folder with an adapter."""

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import timm
import torch
import transformers
from peft.tuners.lora import LoraLayer
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.metrics import accuracy_score, balanced_accuracy_score
from torch import nn

import wellposed as wp
from wellposed.cli import main
from wellposed.data import make_shapes, open_data
from wellposed.errors import InvalidArgumentError, ModelFileError, RunError, UnsuitableModelError
from wellposed.runs import read_journal
from wellposed.training.finetuning.heads import give_head, linear_layers
from wellposed.training.finetuning.images import class_accuracy
from wellposed.training.finetuning.task import FinetuneTask
from wellposed.training.finetuning.vision import finetune_vision
from wellposed.training.finetuning.vision_config import VisionConfig
from wellposed.training.finetuning.vision_models import open_vision_model

METHODS = ["full", "lora", "rslora", "dora", "sine", "sine-dora"]
TIMM = "vit_tiny_patch16_224"
SMALL: dict[str, Any] = {"embed_dim": 16, "depth": 2, "num_heads": 2, "patch_size": 2}


def small_timm(**more: Any) -> Any:
    torch.manual_seed(1)
    return timm.create_model(TIMM, **(SMALL | {"img_size": 8, "num_classes": 7} | more)).eval()


def small_transformers(**more: Any) -> Any:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(**sizes, **({"image_size": 8, "patch_size": 2, "num_labels": 7} | more))
    return transformers.ViTForImageClassification(config).eval()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    model = small_timm()
    save_file(model.state_dict(), folder / "vit.safetensors")
    timm.models.save_for_hf(model, folder / "timm", model_args=SMALL | {"img_size": 8}, safe_serialization=True)
    small_transformers().save_pretrained(folder / "transformers")
    wp.save(wp.cut_skips(small_timm(in_chans=1)), folder / "skipless")
    return folder


def settings(home: Path, out: Path, **changes: Any) -> VisionConfig:
    usual = VisionConfig(
        model=TIMM,
        model_args=SMALL,
        checkpoint=home / "vit.safetensors",
        data="digits",
        out=out,
        device="cpu",
        epochs=2,
        batch_size=64,
        lr=1e-2,
        r=4,
        limit=1024,
    )
    return replace(usual, **changes)


FOLDER: dict[str, Any] = {"model_args": {}, "checkpoint": None}


def digits(model: Any, count: int = 32, channels: int = 3) -> torch.Tensor:
    return open_data("digits", "test").images[:count].expand(-1, channels, -1, -1) / 127.5 - 1


@pytest.mark.parametrize("method", METHODS)
def test_every_method_on_a_timm_model_trains_saves_and_loads(method: str, home: Path, tmp_path: Path) -> None:
    result = finetune_vision(settings(home, tmp_path / "run", method=method), quiet=True)
    losses = [event["loss"] for event in read_journal(tmp_path / "run", "test")]
    assert losses[-1] < losses[0] < 2.4  # log 10 = 2.30 is that of chance
    told = json.loads((tmp_path / "run" / "result.json").read_text())
    assert told["accuracy"] == result.scores["accuracy"]
    assert (told["trained_parameters"] == told["all_parameters"]) == (method == "full")
    card = (result.saved / "README.md").read_text()
    assert f"| class_accuracy | {result.scores['class_accuracy']:.4f} |" in card
    assert f"| method | {method} |" in card
    images = digits(result.model)
    expected = result.model(images)
    if method == "full":
        loaded: Any = wp.load(result.saved)
    else:
        torch.manual_seed(5)  # another head, which the saved one replaces
        base = small_timm(num_classes=10)
        base.load_state_dict({n: v for n, v in small_timm().state_dict().items() if "head" not in n}, strict=False)
        loaded = peft.PeftModel.from_pretrained(base, result.saved)
        kept = load_file(result.saved / "adapter_model.safetensors")
        assert {name for name in kept if "lora_" not in name} == {
            "base_model.model.head.weight",
            "base_model.model.head.bias",
        }
        adapted = [name for name, layer in result.model.named_modules() if isinstance(layer, LoraLayer)]
        assert len(adapted) == 2 * 4
        numbers = read_journal(tmp_path / "run", "observe")
        assert len(numbers) == 3
        assert numbers[0]["blocks.0.attn.qkv/stable_rank"] == 0  # before training
        assert numbers[-1]["blocks.0.attn.qkv/stable_rank"] >= 1
        assert ("blocks.0.attn.qkv/argument_std" in numbers[-1]) == method.startswith("sine")
    torch.testing.assert_close(loaded.eval()(images), expected)


@pytest.mark.parametrize("method", ["full", "lora", "sine-dora"])
def test_a_transformers_folder(method: str, home: Path, tmp_path: Path) -> None:
    asked = settings(home, tmp_path / "run", method=method, **FOLDER, model=str(home / "transformers"))
    result = finetune_vision(asked, quiet=True)
    losses = [event["loss"] for event in read_journal(tmp_path / "run", "test")]
    assert losses[-1] < losses[0]
    kind = transformers.AutoModelForImageClassification
    if method == "full":
        loaded = kind.from_pretrained(result.saved)
        assert loaded.config.id2label == {number: str(number) for number in range(10)}
    else:
        base = kind.from_pretrained(home / "transformers", num_labels=10, ignore_mismatched_sizes=True)
        loaded = peft.PeftModel.from_pretrained(base, result.saved)
        assert len([layer for layer in loaded.modules() if isinstance(layer, LoraLayer)]) == 2 * 6
    images = digits(result.model)
    torch.testing.assert_close(
        loaded.eval()(pixel_values=images).logits, result.model(pixel_values=images).logits, atol=1e-5, rtol=1e-4
    )


def test_a_skipless_model_stays_skipless(home: Path, tmp_path: Path) -> None:
    """It is loaded with its recipe and its one channel, trained, and saved with its recipe."""
    asked = settings(home, tmp_path / "run", method="full", **FOLDER, model=str(home / "skipless"))
    result = finetune_vision(asked, quiet=True)
    assert [entry["change"] for entry in wp.recipe(wp.load(result.saved))] == ["cut_skips"]
    asked = replace(asked, method="sine", out=tmp_path / "adapter")
    assert "sine" in (finetune_vision(asked, quiet=True).saved / "README.md").read_text()
    with pytest.raises(ModelFileError, match="its recipe: give the folder or the file itself as --model"):
        open_vision_model(settings(home, tmp_path, checkpoint=home / "skipless" / "wellposed.safetensors"))


def test_sources_give_the_same_model(home: Path, tmp_path: Path) -> None:
    """A name with a checkpoint, timm's folder, and the file in it; the head aside, all weights are the file's."""
    images = torch.randn(2, 3, 8, 8)
    expected = small_timm().forward_features(images)
    named = settings(home, tmp_path)
    torch.save({"model": small_timm().state_dict()}, tmp_path / "vit.pth")
    for changes in (
        {},
        {"checkpoint": tmp_path / "vit.pth"},
        {**FOLDER, "model": str(home / "timm")},
        {**FOLDER, "model": str(home / "timm" / "model.safetensors")},
    ):
        opened = open_vision_model(replace(named, **changes))
        torch.testing.assert_close(opened.model.eval().forward_features(images), expected)
        assert (opened.image_size, opened.channels, opened.is_new) == (8, 3, False)
        mean, std = opened.statistics or (None, None)
        assert mean is not None
        assert std is not None
        assert (mean.flatten().tolist(), std.flatten().tolist()) == ([0.5] * 3, [0.5] * 3)


def test_the_image_size_follows_the_data(home: Path, tmp_path: Path) -> None:
    """Position embeddings are resized as timm does; where there would be few patches, images are enlarged instead."""
    at_32 = open_vision_model(settings(home, tmp_path, data="shapes"))
    state = timm.models.vision_transformer.checkpoint_filter_fn(small_timm().state_dict(), small_timm(img_size=32))
    assert at_32.image_size == 32
    torch.testing.assert_close(at_32.model.pos_embed.data, state["pos_embed"])
    asked = settings(home, tmp_path / "few", model_args=SMALL | {"patch_size": 4, "img_size": 16}, checkpoint=None)
    few = open_vision_model(asked)
    assert (few.image_size, few.is_new) == (16, True)  # 8 pixels would be 4 patches
    assert open_vision_model(replace(asked, image_size=8)).image_size == 8
    result = finetune_vision(replace(asked, epochs=1, method="lora"), quiet=True)
    images = digits(result.model)
    assert result.model(nn.functional.interpolate(images, (16, 16))).shape == (32, 10)
    shutil.copytree(home / "transformers", tmp_path / "vit")
    own = {"image_mean": [0.2] * 3, "image_std": [0.3] * 3, "size": {"height": 8, "width": 8}}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(own))
    folder = settings(home, tmp_path / "larger", **FOLDER, model=str(tmp_path / "vit"), image_size=12)
    larger = finetune_vision(replace(folder, epochs=1), quiet=True)
    assert "Call it with interpolate_pos_encoding=True" in (larger.saved / "README.md").read_text()
    kept = json.loads((larger.saved / "preprocessor_config.json").read_text())
    assert kept == own | {"size": {"height": 12, "width": 12}}
    told = json.loads((tmp_path / "larger" / "result.json").read_text())
    assert (told["mean"], told["std"]) == ([0.2] * 3, [0.3] * 3)


def test_batch_statistics_are_not_moved_by_an_adapter(tmp_path: Path) -> None:
    """An adapter does not save them; whoever loads it has those of the base."""
    args = {"dim": 16, "depth": 2, "patch_size": 2, "kernel_size": 3}
    usual = {"data": "digits", "image_size": 8, "out": tmp_path / "run", "device": "cpu", "epochs": 1, "limit": 256}
    asked = VisionConfig(model="convmixer_tiny", model_args=args, **usual)
    with pytest.raises(UnsuitableModelError, match="no linear layers but its head"):
        finetune_vision(replace(asked, method="lora"), quiet=True)
    with pytest.raises(InvalidArgumentError, match=r"stem.0 is a torch.nn.modules.conv.Conv2d"):
        finetune_vision(replace(asked, method="sine", target_modules=("stem.0",)), quiet=True)
    result = finetune_vision(replace(asked, method="lora", target_modules=("stem.0", "blocks.1.1")), quiet=True)
    moved = {name: value for name, value in result.model.named_buffers() if name.endswith("running_mean")}
    assert len(moved) == 5
    assert all(not value.any() for value in moved.values())
    full = finetune_vision(replace(asked, method="full", out=tmp_path / "full"), quiet=True)
    saved: Any = wp.load(full.saved)
    images = digits(full.model)
    torch.testing.assert_close(saved(images), full.model(images))
    assert saved.stem[2].running_mean.any()


@pytest.mark.parametrize("method", ["full", "sine-dora"])
def test_a_run_that_was_interrupted_ends_as_if_it_were_not(
    method: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With random crops, mixing and dropout, and with statistics of batches where all weights are trained."""
    asked = settings(home, tmp_path / "whole", method=method, lora_dropout=0.1, crop="pad", mixup=0.5, micro_batch=32)
    if method == "full":
        small = {"dim": 16, "depth": 1, "patch_size": 2, "kernel_size": 3}
        asked = replace(asked, model="convmixer_tiny", model_args=small, checkpoint=None, image_size=8)
    whole = finetune_vision(asked, quiet=True)
    step = FinetuneTask.train_step

    def interrupted(self: Any, images: Any, targets: Any, number: int) -> Any:
        if number == 21:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, images, targets, number)

    with monkeypatch.context() as patch:
        patch.setattr(FinetuneTask, "train_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            finetune_vision(replace(asked, out=tmp_path / "cut"), quiet=True)
    assert main(["finetune", "vision", "--resume", "--out", str(tmp_path / "cut")]) == 0
    name = "model/wellposed.safetensors" if method == "full" else "adapter/adapter_model.safetensors"
    first, second = (load_file(folder / name) for folder in (whole.out, tmp_path / "cut"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for event in ("train", "test"):
        losses = [[each["loss"] for each in read_journal(folder, event)] for folder in (whole.out, tmp_path / "cut")]
        assert losses[0] == losses[1]


def test_the_scores_are_those_of_scikit_learn(home: Path, tmp_path: Path) -> None:
    result = finetune_vision(settings(home, tmp_path / "run", method="full", limit=None, epochs=1), quiet=True)
    test = open_data("digits", "test")
    guesses = result.model(digits(result.model, len(test))).argmax(1)
    labels = [test[index][1] for index in range(len(test))]
    assert result.scores["accuracy"] == pytest.approx(accuracy_score(labels, guesses))
    assert result.scores["class_accuracy"] == pytest.approx(balanced_accuracy_score(labels, guesses))
    assert class_accuracy(torch.tensor([[3, 1], [0, 0]])) == 0.75  # a class that does not occur has no accuracy


def test_a_folder_of_images_is_read_by_the_command(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = make_shapes(40, 16)
    for number in range(40):
        image, label = shapes[number]
        place = tmp_path / "set" / ("train" if number < 30 else "val") / f"class{label % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(place / f"{number}.png")
    words = ["finetune", "vision", "--model", str(home / "timm"), "--data", f"folder:{tmp_path / 'set'}"]
    small = ["--epochs", "1", "--batch-size", "8", "--device", "cpu", "--workers", "0", "--method", "lora"]
    assert main([*words, *small, "--limit", "20", "--out", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().err
    assert "folder, 20 images of 8 px, 2 classes" in told
    assert "% as the mean of the classes" in told
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert {"accuracy", "class_accuracy", "matthews", "f1"} <= result.keys()
    assert main([*words, *small, "--out", str(tmp_path / "run")]) == 2
    assert "holds something already" in capsys.readouterr().err


def test_adapters_go_to_linear_layers_before_the_head() -> None:
    model = small_timm()
    assert linear_layers(model, give_head(model, ["a", "b"])) == ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"]
    with torch.device("meta"):
        net: Any = timm.create_model("convnext_tiny")
    heads = give_head(net, ["a", "b"])
    assert heads == ["head.fc"]
    assert net.head.fc.out_features == 2
    assert linear_layers(net, heads) == ["mlp.fc1", "mlp.fc2"]


def test_bf16_keeps_what_is_trained_in_float32(home: Path, tmp_path: Path) -> None:
    asked = settings(home, tmp_path / "run", precision="bf16", method="sine", epochs=1, limit=128)
    model = finetune_vision(asked, quiet=True).model
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for n, p in model.named_parameters() if not p.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"model": ""}, InvalidArgumentError, "expected a timm name, or a folder"),
        ({"data": ""}, InvalidArgumentError, "expected a set, as in"),
        ({"data": "letters"}, InvalidArgumentError, "data='letters': expected one of shapes, digits"),
        ({"model": "vit_tny_patch16_224"}, InvalidArgumentError, "did you mean vit_tiny_patch16_224"),
        ({"model": "./nowhere"}, ModelFileError, "nowhere does not exist"),
        ({"checkpoint": "nowhere.pth"}, ModelFileError, "nowhere.pth: there is no such file"),
        ({"model_args": {"depth": 3, **SMALL, "embed_dim": 24}}, ModelFileError, "do not fit vit_tiny_patch16_224"),
        ({"model_args": {"magic": 3}}, InvalidArgumentError, "cannot be made with .*magic"),
        ({"model_args": SMALL | {"depth": 3}}, ModelFileError, "do not fit .*blocks.2"),
        ({"target_modules": ("mpl.fc1",)}, InvalidArgumentError, "no layer of .* is called so. Close names: mlp.fc1"),
        ({"target_modules": ("qkv", "head")}, InvalidArgumentError, "'head', the head: it is new"),
        ({"target_modules": ("proj",)}, InvalidArgumentError, "proj is a torch.nn.modules.conv.Conv2d"),
        ({"target_modules": ("norm1",), "method": "lora"}, UnsuitableModelError, "cannot adapt norm1"),
        ({"method": "lora", "gain": 3.0}, InvalidArgumentError, "--method sine or sine-dora, not lora"),
        ({"method": "magic"}, InvalidArgumentError, "expected one of full, lora"),
        ({"image_size": 9}, InvalidArgumentError, "image_size=9: .* patches of 2 pixels"),
        ({"batch_size": 2000}, InvalidArgumentError, "batch_size=2000: expected 1 to 1024"),
        ({"label_smoothing": 1.0}, InvalidArgumentError, "label_smoothing=1.0"),
        ({"mixup": 2.0}, InvalidArgumentError, "mixup=2.0"),
        ({"resume": True}, RunError, "no run in"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(
    changes: dict[str, Any], kind: type[Exception], message: str, home: Path, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        finetune_vision(settings(home, tmp_path / "run", **changes), quiet=True)
    assert not (tmp_path / "run").exists()


def test_folders_that_are_not_whole(home: Path, tmp_path: Path) -> None:
    asked = settings(home, tmp_path / "run", **FOLDER)

    def message(path: Path) -> str:
        with pytest.raises((ModelFileError, UnsuitableModelError)) as raised:
            finetune_vision(replace(asked, model=str(path)), quiet=True)
        return str(raised.value)

    assert "--model NAME --checkpoint" in message(home / "vit.safetensors")
    (tmp_path / "empty").mkdir()
    assert "cannot be read as a vision model" in message(tmp_path / "empty")
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    assert "not a whole safetensors file" in message(tmp_path / "torn.safetensors")
    small_transformers().save_pretrained(tmp_path / "half")
    file = tmp_path / "half" / "model.safetensors"
    save_file(
        {name: value for name, value in load_file(file).items() if ".1." not in name}, file, metadata={"format": "pt"}
    )
    assert "lacks 16 weights of the model" in message(tmp_path / "half")
    wp.save(transformers.ViTModel(small_transformers().config), tmp_path / "bare")
    assert "has no head for classes" in message(tmp_path / "bare")
    with pytest.raises(InvalidArgumentError, match="leave out --checkpoint and --model-args"):
        open_vision_model(replace(asked, model=str(home / "timm"), checkpoint=home / "vit.safetensors"))


@pytest.mark.gpu
def test_on_a_gpu_in_bf16(home: Path, tmp_path: Path) -> None:
    asked = settings(home, tmp_path / "run", device="cuda", precision="bf16", method="sine", epochs=3)
    whole = finetune_vision(asked, quiet=True)
    again = finetune_vision(replace(asked, out=tmp_path / "again"), quiet=True)
    assert whole.scores == again.scores
    losses = [event["loss"] for event in read_journal(tmp_path / "run", "test")]
    assert losses[-1] < losses[0]
