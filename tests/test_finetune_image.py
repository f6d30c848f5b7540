"""`wellposed finetune image`, from a pipeline on disk to a folder with an adapter and what it draws."""

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from diffusers import DDPMScheduler, StableDiffusionPipeline
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional as F
from torchvision.transforms.v2.functional import pil_to_tensor

import wellposed as wp
from small_pipeline import SIZE, save_photographs, small_pipeline
from wellposed.cli import main
from wellposed.errors import UnsuitableModelError
from wellposed.runs import read_journal
from wellposed.training.accelerators import make_accelerator
from wellposed.training.finetuning.diffusion import open_pipeline
from wellposed.training.finetuning.dreambooth import finetune_image
from wellposed.training.finetuning.dreambooth_data import LatentLoader, Latents, moments_of, noisy, read_pictures
from wellposed.training.finetuning.dreambooth_task import DreamboothTask
from wellposed.training.finetuning.image_config import ImageConfig
from wellposed.training.finetuning.task import FinetuneTask

PROMPT = "a sks dog"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("image")
    small_pipeline().save_pretrained(folder / "pipeline")
    save_photographs(folder / "subject")
    return folder


def settings(home: Path, out: Path, **changes: Any) -> ImageConfig:
    usual = ImageConfig(
        model=str(home / "pipeline"),
        data=str(home / "subject"),
        prompt=PROMPT,
        out=out,
        device="cpu",
        r=4,
        lr=1e-2,
        epochs=3,
        repeats=6,
        batch_size=3,
        seeds=(5,),
        sampling_steps=2,
    )
    return replace(usual, **changes)


def drawn(pipeline: Any, prompt: str = PROMPT, seed: int = 5) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(seed)
    return pipeline(prompt, num_inference_steps=2, generator=generator, output_type="pt").images[0]


def picture(path: Path) -> torch.Tensor:
    with Image.open(path) as file:
        return pil_to_tensor(file)


@pytest.mark.parametrize("method", ["lora", "rslora", "dora", "sine", "sine-dora"])
def test_every_method_learns_and_changes_the_picture(method: str, home: Path, tmp_path: Path) -> None:
    result = finetune_image(settings(home, tmp_path / "run", method=method), quiet=True)
    losses = [event["loss"] for event in read_journal(result.out, "test")]
    assert losses[-1] < losses[0]  # of the same noise
    plain = StableDiffusionPipeline.from_pretrained(home / "pipeline")
    before = drawn(plain)
    adapted = wp.load_adapter(plain.unet, result.saved)
    assert isinstance(adapted, peft.PeftModel)
    after = drawn(plain)
    torch.testing.assert_close(after, drawn(result.pipeline))
    saved = [picture(result.out / "pictures" / f"{name}-prompt0-seed5.png") for name in ("no-adapter", "adapter")]
    for expected, stored in zip((before, after), saved, strict=True):
        assert (expected * 255 - stored).abs().max() < 0.6
    base, whole = result.versions
    assert base.difference == pytest.approx(float((saved[0] / 255 - saved[1] / 255).square().mean().sqrt()), rel=1e-4)
    assert base.difference > 1e-3
    assert (whole.difference, whole.size) == (0, (result.saved / "adapter_model.safetensors").stat().st_size)
    config = json.loads((result.saved / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == {"to_q", "to_k", "to_v", "to_out.0"}
    assert not any("text_encoder" in path.name for path in result.saved.iterdir())


def test_bits_text_encoder_class_and_features(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All at once, by the command: sizes, errors and pictures of quantized copies, and likeness by another's ViT."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    vit = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=8, patch_size=4)).eval()
    vit.save_pretrained(tmp_path / "vit")
    halves = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(halves))
    out = tmp_path / "run"
    words = ["--model", str(home / "pipeline"), "--data", str(home / "subject"), "--prompt", PROMPT, "--device", "cpu"]
    train = ["--method", "lora", "--lr", "1e-2", "--epochs", "2", "--repeats", "4", "--batch-size", "3", "--r", "4"]
    more = ["--class-prompt", "a dog", "--class-images", "3", "--text-encoder", "--features", str(tmp_path / "vit")]
    draw = ["--prompts", PROMPT, "sks", "--seeds", "1", "2", "--sampling-steps", "2", "--bits", "2", "4"]
    assert main(["finetune", "image", *words, *train, *more, *draw, "--out", str(out)]) == 0
    told = capsys.readouterr().err
    assert "3 pictures of 16 px and 3 of its class, 8 steps of 3" in told
    found = json.loads((out / "result.json").read_text())["versions"]
    assert [version["name"] for version in found] == ["no adapter", "adapter", "2-bit", "4-bit"]
    assert found[1]["size"] > found[3]["size"] > found[2]["size"] > 0
    assert found[2]["error"] > found[3]["error"] > 0
    assert found[2]["difference"] > found[3]["difference"] > 0

    subject = read_pictures(home / "subject", SIZE).images

    def features(images: torch.Tensor) -> torch.Tensor:
        fitted = F.interpolate(images / 255, (8, 8), mode="bicubic", antialias=True).clamp(0, 1)
        with torch.no_grad():
            return F.normalize(vit(fitted * 2 - 1).last_hidden_state[:, 0], dim=1)

    for version in found:
        name = version["name"].replace(" ", "-")
        files = [out / "pictures" / f"{name}-prompt{prompt}-seed{seed}.png" for prompt in (0, 1) for seed in (1, 2)]
        expected = (features(torch.stack([picture(file) for file in files])) @ features(subject).T).mean()
        assert version["similarity"] == pytest.approx(float(expected), abs=1e-4)
    with Image.open(out / "pictures.png") as sheet:
        assert sheet.width > 5 * 168
        assert sheet.height > 4 * 168

    plain = StableDiffusionPipeline.from_pretrained(home / "pipeline")
    wp.load_adapter(plain.unet, out / "adapter-2bit")
    wp.load_adapter(plain.text_encoder, out / "adapter-2bit" / "text_encoder")
    assert (drawn(plain, "sks", 2) * 255 - picture(out / "pictures" / "2-bit-prompt1-seed2.png")).abs().max() < 1.6
    card = (out / "adapter" / "README.md").read_text()
    assert "to be loaded likewise" in card
    assert f"| 2-bit | {found[2]['size']:,} |" in card
    assert main(["compress", str(out / "adapter"), "--bits", "3", "--out", str(tmp_path / "packed")]) == 0
    assert wp.load_adapter(open_pipeline(str(home / "pipeline")).unet, tmp_path / "packed") is not None


def test_a_run_that_was_interrupted_ends_as_if_it_were_not(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both encoders learning, dropout, pictures of the class and a step in two parts."""
    of_class = save_photographs(tmp_path / "class", 4)
    more = {"class_prompt": "a dog", "class_data": of_class, "text_encoder": True, "micro_batch": 2}
    asked = settings(home, tmp_path / "whole", method="sine-dora", lora_dropout=0.1, epochs=2, repeats=3, **more)
    whole = finetune_image(asked, quiet=True)
    assert len(list(of_class.iterdir())) == 4  # its owner has some: none is drawn
    step = FinetuneTask.train_step

    def interrupted(self: Any, images: Any, targets: Any, number: int) -> Any:
        if number == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, images, targets, number)

    cut = tmp_path / "cut"
    (tmp_path / "asked.json").write_text(json.dumps(replace(asked, out=cut).to_dict()))
    with monkeypatch.context() as patch:
        patch.setattr(FinetuneTask, "train_step", interrupted)
        assert main(["finetune", "image", "--config", str(tmp_path / "asked.json")]) == 130
    assert not (cut / "adapter").exists()
    assert main(["finetune", "image", "--resume", "--out", str(cut)]) == 0
    for place in ("adapter", "adapter/text_encoder"):
        first, second = (load_file(folder / place / "adapter_model.safetensors") for folder in (whole.out, cut))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
    for event in ("train", "test"):
        losses = [[each["loss"] for each in read_journal(folder, event)] for folder in (whole.out, cut)]
        assert losses[0] == losses[1]
    name = "pictures/adapter-prompt0-seed5.png"
    assert torch.equal(picture(whole.out / name), picture(cut / name))


def test_stopped_while_drawing_it_can_draw_later(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = settings(home, tmp_path / "run", epochs=1, repeats=1)

    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("wellposed.training.finetuning.dreambooth_task.drawn", stopped)
        with pytest.raises(KeyboardInterrupt):
            finetune_image(asked, quiet=True)
    assert (asked.folder / "adapter" / "adapter_model.safetensors").exists()
    assert not (asked.folder / "pictures.png").exists()
    again = finetune_image(ImageConfig(resume=True, out=asked.folder), quiet=True)
    assert len(again.versions) == 2
    assert (asked.folder / "pictures.png").exists()


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_targets_are_the_noise_or_the_velocity(prediction: str) -> None:
    """x_t = a x + s e with a^2 + s^2 = 1; v = a e - s x (arXiv 2202.00512)."""
    scheduler = DDPMScheduler(prediction_type=prediction, beta_start=1e-3, beta_end=0.02, num_train_timesteps=50)
    latents, noise = torch.randn(2, 3, 2, 4, 5, 5).unbind(0)
    steps = torch.tensor([[0, 49], [10, 20], [7, 7]])
    inputs, targets = noisy(scheduler, latents, noise, steps)
    alphas = (1 - torch.linspace(1e-3, 0.02, 50, dtype=torch.float64)).cumprod(0)[steps][..., None, None, None]
    a, s = alphas.sqrt().float(), (1 - alphas).sqrt().float()
    torch.testing.assert_close(inputs[..., :-1], (a * latents + s * noise).flatten(2))
    assert torch.equal(inputs[..., -1], steps.float())
    torch.testing.assert_close(targets, (noise if prediction == "epsilon" else a * noise - s * latents).flatten(2))


def test_latents_are_the_pipelines_and_two_processes_share_a_batch(home: Path) -> None:
    pipeline = open_pipeline(str(home / "pipeline"))
    images = read_pictures(home / "subject", SIZE).images
    assert images.shape == (3, 3, SIZE, SIZE)
    moments = moments_of(pipeline.vae, images, flip=True, batch_size=2)
    mirrored = pipeline.vae.encode(images[1:2].flip(-1) / 127.5 - 1).latent_dist
    expected = torch.cat([mirrored.mean, mirrored.std], 1)[0] * pipeline.vae.config.scaling_factor
    torch.testing.assert_close(moments[1, 1], expected)
    data = Latents("subject", moments, moments[:2], 4, DDPMScheduler())
    whole, *halves = (
        list(LatentLoader(data, 4, seed=3, rank=rank, ranks=ranks)) for rank, ranks in ((0, 1), (0, 2), (1, 2))
    )
    assert len(whole) == 3
    for batch, *parts in zip(whole, *halves, strict=True):
        for place in (0, 1):
            assert torch.equal(batch[place], torch.cat([part[place] for part in parts]))
    assert not torch.equal(whole[0][0], whole[1][0])


def test_the_loss_is_that_of_the_subject_and_of_its_class(home: Path, tmp_path: Path) -> None:
    """Against diffusers alone: an adapter changes nothing before its first step."""
    more = {"class_prompt": "a dog", "class_data": home / "subject", "prior_weight": 0.5, "micro_batch": 2}
    asked = settings(home, tmp_path / "run", **more).resolved()
    pictures = read_pictures(home / "subject", SIZE)
    accelerator = make_accelerator("cpu")
    task = DreamboothTask(asked, open_pipeline(asked.model), pictures, SIZE, accelerator)
    plain = StableDiffusionPipeline.from_pretrained(home / "pipeline")
    inputs, targets = next(iter(task.loader))
    expected = 0.0
    for place, (prompt, weight) in enumerate(((PROMPT, 1.0), ("a dog", 0.5))):
        states = plain.encode_prompt(prompt, "cpu", 3, False)[0]
        latents, steps = inputs[:, place, :-1].reshape(3, 4, SIZE // 2, SIZE // 2), inputs[:, place, -1]
        with torch.no_grad():
            guessed = plain.unet(latents, steps, states).sample.flatten(1)
        expected += weight * float(F.mse_loss(guessed, targets[:, place]))
    assert float(task.train_step(inputs, targets, 0)["loss"]) == pytest.approx(expected, rel=1e-4)


def test_a_velocity_pipeline_in_bf16_from_files_of_16_bits(home: Path, tmp_path: Path) -> None:
    small_pipeline("v_prediction").to(torch.float16).save_pretrained(tmp_path / "half", variant="fp16")
    asked = settings(home, tmp_path / "run", model=str(tmp_path / "half"), precision="bf16", epochs=2, image_size=24)
    result = finetune_image(asked, quiet=True)
    losses = [event["loss"] for event in read_journal(result.out, "test")]
    assert losses[-1] < losses[0]
    kinds = {parameter.dtype for parameter in result.pipeline.unet.parameters() if parameter.requires_grad}
    assert kinds == {torch.float32}
    assert result.pipeline.unet.conv_in.weight.dtype == torch.bfloat16
    assert picture(result.out / "pictures" / "adapter-prompt0-seed5.png").shape == (3, 24, 24)


def test_mistakes_are_one_line_and_status_2(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = {"--model": str(home / "pipeline"), "--data": str(home / "subject"), "--prompt": PROMPT, "--device": "cpu"}

    def message(**changes: str) -> str:
        flags = usual | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        words = [word for flag, value in flags.items() for word in (flag, *value.split("|"))]
        assert main(["finetune", "image", *words, "--out", str(tmp_path / "run")]) == 2
        assert not (tmp_path / "run").exists()
        *bars, told = capsys.readouterr().err.splitlines()
        assert all("Loading weights" in bar or not bar for bar in bars)  # of transformers
        assert told.startswith("wellposed: ")
        return told

    (tmp_path / "empty").mkdir()
    assert "is no folder: expected one with a pipeline" in message(model="nowhere")
    assert "is no pipeline: it has no model_index.json" in message(model=str(tmp_path / "empty"))
    assert "there is no picture in this folder" in message(data=str(tmp_path / "empty"))
    assert "there is no such file or folder" in message(data="nowhere")
    assert "expected words with 'sks' for the subject" in message(prompt="a dog")
    assert "expected words with 'zwx' for the subject" in message(token="zwx")
    assert "expected words without 'sks'" in message(class_prompt=PROMPT)
    assert "expected it with --class-prompt" in message(class_data=str(tmp_path / "empty"))
    assert "tokens with its begin and end: expected at most 16" in message(prompts="a very long sks indeed")
    assert "expected some of 1 to 8" in message(bits="2|9")
    assert "with its weights in --features-checkpoint" in message(features="vit_tiny_patch16_224")
    assert "expected a multiple of 2" in message(image_size="17")
    assert "batch_size=100: expected 1 to 75" in message(batch_size="100")
    assert "Close names: to_q" in message(target_modules="to_qq")
    index = tmp_path / "other" / "model_index.json"
    shutil.copytree(home / "pipeline", index.parent)
    told = json.loads(index.read_text())
    index.write_text(json.dumps(told | {"_class_name": "StableDiffusionXLPipeline"}))
    assert "holds a StableDiffusionXLPipeline: expected a StableDiffusionPipeline" in message(model=str(index.parent))
    index.write_text(json.dumps(told | {"scheduler": ["os", "system"]}))
    assert "names the scheduler 'system'" in message(model=str(index.parent))
    index.write_text("{")
    assert "cannot be read as that of a pipeline" in message(model=str(index.parent))
    index.write_text(json.dumps(told))
    (index.parent / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"torn")
    assert "unet cannot be read as a UNet2DConditionModel" in message(model=str(index.parent))
    with pytest.raises(SystemExit, match="2"):
        main(["finetune", "image", "--method", "full"])
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert "pip install 'wellposed[peft,diffusion]'" in message()


def test_a_unet_for_other_inputs_is_refused(tmp_path: Path) -> None:
    small_pipeline(in_channels=9).save_pretrained(tmp_path / "inpainting")
    with pytest.raises(UnsuitableModelError, match="takes 9 channels and gives 4"):
        open_pipeline(str(tmp_path / "inpainting"))


@pytest.mark.gpu
def test_on_a_gpu_in_bf16(home: Path, tmp_path: Path) -> None:
    asked = settings(home, tmp_path / "run", device="cuda", bits=(3,))
    whole = finetune_image(asked, quiet=True)
    again = finetune_image(replace(asked, out=tmp_path / "again"), quiet=True)
    assert whole.scores == again.scores
    losses = [event["loss"] for event in read_journal(tmp_path / "run", "test")]
    assert losses[-1] < losses[0]
