"""`wellposed finetune language`, from a folder with a model to a folder with an adapter."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import nn

from small_language import WORDS, causal_folder, encoder_folder, first_letters, gguf_file, marked_sentences, write_jsonl
from wellposed.adapters import SineLoraConfig
from wellposed.cli import main
from wellposed.errors import (
    InvalidArgumentError,
    ModelFileError,
    RunError,
    UnsuitableModelError,
    WellposedError,
)
from wellposed.runs import read_journal
from wellposed.spectrum import stable_rank
from wellposed.training.finetuning.config import LanguageConfig
from wellposed.training.finetuning.language import finetune_language
from wellposed.training.finetuning.language_task import LanguageTask
from wellposed.training.finetuning.methods import adapter_config, compile_blocks
from wellposed.training.finetuning.models import open_language_model

METHODS = ["full", "lora", "rslora", "dora", "sine", "sine-dora"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language")
    causal_folder(folder / "llama")
    encoder_folder(folder / "bert")
    first_letters(folder / "letters")
    marked_sentences(folder / "cola")
    return folder


def settings(home: Path, out: Path, **changes: Any) -> LanguageConfig:
    usual = LanguageConfig(
        model=str(home / "llama"),
        data=(str(home / "letters"),),
        out=out,
        device="cpu",
        epochs=2,
        batch_size=4,
        lr=3e-3,
        r=2,
        lora_alpha=4.0,
        max_length=32,
        generate=4,
        new_tokens=3,
    )
    return replace(usual, **changes)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_saves_and_loads(method: str, home: Path, tmp_path: Path) -> None:
    result = finetune_language(settings(home, tmp_path / "run", method=method), quiet=True)
    losses = [event["loss"] for event in read_journal(tmp_path / "run", "test")]
    assert losses[-1] < losses[0] < 5.6  # log 259 = 5.56 is that of chance
    base = transformers.AutoModelForCausalLM.from_pretrained(home / "llama")
    ids = torch.arange(3, 20)[None]
    expected = result.model(input_ids=ids).logits
    if method == "full":
        loaded = transformers.AutoModelForCausalLM.from_pretrained(result.saved)
    else:
        loaded = peft.PeftModel.from_pretrained(base, result.saved)
        kept = load_file(result.saved / "adapter_model.safetensors")
        assert kept
        assert all("lora_" in name for name in kept)
    torch.testing.assert_close(loaded.eval()(input_ids=ids).logits, expected)
    assert transformers.AutoTokenizer.from_pretrained(result.saved)("ab")["input_ids"]
    told = json.loads((tmp_path / "run" / "result.json").read_text())
    assert told["accuracy"] == result.scores["accuracy"]
    assert told["config"]["method"] == method
    assert 0 <= told["written_accuracy"] <= 1
    assert (told["trained_parameters"] == told["all_parameters"]) == (method == "full")
    card = (result.saved / "README.md").read_text()
    assert f"| accuracy | {result.scores['accuracy']:.4f} |" in card
    assert f"| method | {method} |" in card
    assert ("| omega | auto |" in card) == method.startswith("sine")
    assert ("| lora_alpha | 4.0 |" in card) == (method != "full")
    if method in {"lora", "sine"}:
        assert told["mean_stable_rank"] == pytest.approx(_mean_stable_rank(result.model), rel=1e-3)
        assert ("mean_argument_std" in told) == (method == "sine")


def _mean_stable_rank(model: Any) -> float:
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    ranks = [float(stable_rank(layer.get_delta_weight("default").detach())) for layer in layers]
    return sum(ranks) / len(ranks)


def test_the_methods_are_what_peft_calls_them(home: Path, tmp_path: Path) -> None:
    made = {name: adapter_config(settings(home, tmp_path, method=name), {}) for name in METHODS[1:]}
    assert {name: (config.use_rslora, config.use_dora) for name, config in made.items()} == {
        "lora": (False, False),
        "rslora": (True, False),
        "dora": (False, True),
        "sine": (False, False),
        "sine-dora": (False, True),
    }
    assert [isinstance(config, SineLoraConfig) for config in made.values()] == [False] * 3 + [True] * 2
    asked = settings(home, tmp_path, method="sine", omega=50.0, gain=3.0, target_modules=("q_proj",), lora_alpha=7.0)
    own = adapter_config(asked, {"task_type": "SEQ_CLS"})
    assert (own.omega, own.gain, own.lora_alpha, own.target_modules) == (50.0, 3.0, 7.0, {"q_proj"})
    assert own.task_type == "SEQ_CLS"


def test_a_small_model_learns_the_answers(home: Path, tmp_path: Path) -> None:
    asked = settings(home, tmp_path / "run", method="full", epochs=12, lr=1e-2, generate=8, test_every=5)
    result = finetune_language(asked, quiet=True)
    tested = [event["epoch"] for event in read_journal(tmp_path / "run", "test") if "accuracy" in event]
    assert tested == [5, 10, 12]
    assert result.scores["accuracy"] == 1.0
    assert result.scores["written_accuracy"] == 1.0


def test_packing_and_small_pieces_do_not_change_the_gradient(home: Path, tmp_path: Path) -> None:
    """All 64 questions in one step: packed, one to a row, and a few rows at a time, the loss and its norm are one."""
    common = {"epochs": 1, "test": (str(home / "letters" / "test.jsonl"),), "generate": 0, "log_every": 1}
    found = []
    for name, changes in {
        "alone": {"pack": False, "batch_size": 64},
        "packed": {"batch_size": 11},
        "pieces": {"batch_size": 11, "micro_batch": 5},
    }.items():
        finetune_language(settings(home, tmp_path / name, method="lora", **common, **changes), quiet=True)
        (event,) = read_journal(tmp_path / name, "train")
        found.append((event["loss"], event["grad_norm"]))
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[2] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("method", ["lora", "sine-dora"])
def test_compiled_blocks_learn_the_same(
    method: Any, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = []

    def compile_(block: nn.Module) -> None:
        kinds.append(type(block).__name__)
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)

    monkeypatch.setattr(nn.Module, "compile", compile_)
    torch.compiler.reset()
    asked = settings(home, tmp_path / "plain", method=method, epochs=2, log_every=1)
    plain = finetune_language(asked, quiet=True)
    compiled = finetune_language(replace(asked, out=tmp_path / "compiled", compile=True), quiet=True)
    assert kinds == ["LlamaDecoderLayer"] * 2
    assert compiled.scores["loss"] == pytest.approx(plain.scores["loss"], rel=1e-3)
    losses = [[event["loss"] for event in read_journal(tmp_path / name, "train")] for name in ("plain", "compiled")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_only_blocks_that_repeat_are_compiled() -> None:
    with pytest.raises(UnsuitableModelError, match="no repeated blocks"):
        compile_blocks(nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2)))


@pytest.mark.parametrize(("method", "model"), [("full", "bert"), ("sine-dora", "bert"), ("sine", "llama")])
def test_classifiers_learn_and_load(method: str, model: str, home: Path, tmp_path: Path) -> None:
    changes = {
        "model": str(home / model),
        "data": (str(home / "cola"),),
        "epochs": 16,
        "batch_size": 8,
        "lr": 3e-3,
    }
    result = finetune_language(settings(home, tmp_path / "run", method=method, **changes), quiet=True)
    assert set(result.scores) == {"loss", "accuracy", "matthews", "f1"}
    assert result.scores["matthews"] > 0.8
    kind = transformers.AutoModelForSequenceClassification
    if method == "full":
        loaded = kind.from_pretrained(result.saved)
        assert loaded.config.id2label == {0: "0", 1: "1"}
    else:
        torch.manual_seed(5)  # another head, which the saved one replaces
        loaded = peft.PeftModel.from_pretrained(kind.from_pretrained(home / model, pad_token_id=0), result.saved)
    given = {"input_ids": torch.arange(3, 20)[None], "attention_mask": torch.ones(1, 17, dtype=torch.long)}
    torch.testing.assert_close(loaded.eval()(**given).logits, result.model(**given).logits)


def test_what_the_file_has_no_weights_for_is_saved_with_the_adapter(home: Path, tmp_path: Path) -> None:
    """A masked language model has no pooler: a new one is random, and another where the adapter is loaded."""
    config = transformers.AutoConfig.from_pretrained(home / "bert")
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "masked")
    changes = {"model": str(tmp_path / "masked"), "tokenizer": home / "bert", "data": (str(home / "cola"),)}
    result = finetune_language(settings(home, tmp_path / "run", method="lora", epochs=1, **changes), quiet=True)
    torch.manual_seed(5)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "masked")
    loaded = peft.PeftModel.from_pretrained(base, result.saved)
    given = {"input_ids": torch.arange(3, 20)[None], "attention_mask": torch.ones(1, 17, dtype=torch.long)}
    torch.testing.assert_close(loaded.eval()(**given).logits, result.model(**given).logits)


def test_the_loss_is_that_of_a_token_also_where_nothing_is_asked(home: Path, tmp_path: Path) -> None:
    """Nothing comes before the first token of a text without a prompt, which is not counted then."""
    data = write_jsonl(tmp_path / "bare" / "train.jsonl", [{"prompt": "", "completion": "abc"}] * 4)
    write_jsonl(data.with_name("test.jsonl"), [{"prompt": "", "completion": "abc"}])
    asked = settings(home, tmp_path / "run", data=(str(data.parent),), epochs=1, lr=0.0, generate=0, batch_size=1)
    result = finetune_language(asked, quiet=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(home / "llama")
    ids = torch.tensor([[*result.tokenizer("abc")["input_ids"], result.tokenizer.eos_token_id]])
    assert result.scores["loss"] == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-5)


def test_a_run_that_was_interrupted_ends_as_if_it_were_not(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = settings(home, tmp_path / "whole", method="sine-dora", lora_dropout=0.1)
    whole = finetune_language(asked, quiet=True)
    step = LanguageTask.train_step

    def interrupted(self: Any, images: Any, targets: Any, number: int) -> Any:
        if number == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, images, targets, number)

    with monkeypatch.context() as patch:
        patch.setattr(LanguageTask, "train_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            finetune_language(replace(asked, out=tmp_path / "cut"), quiet=True)
    assert not (tmp_path / "cut" / "result.json").exists()
    with pytest.raises(InvalidArgumentError, match=r"r=4: the run in .* was started with 2"):
        finetune_language(LanguageConfig(out=tmp_path / "cut", resume=True, r=4), quiet=True)
    assert main(["finetune", "language", "--resume", "--out", str(tmp_path / "cut")]) == 0
    first, second = (
        load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (whole.out, tmp_path / "cut")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    numbers = [
        [(event["event"], event["step"], event["loss"]) for event in read_journal(folder) if "loss" in event]
        for folder in (whole.out, tmp_path / "cut")
    ]
    assert numbers[0] == numbers[1]
    assert json.loads((tmp_path / "cut" / "result.json").read_text())["accuracy"] == whole.scores["accuracy"]


def test_two_processes_compute_what_one_does(home: Path, tmp_path: Path) -> None:
    asked = settings(home, tmp_path / "one", method="lora", log_every=1, epochs=3)
    one = finetune_language(asked, quiet=True)
    (tmp_path / "two.json").write_text(json.dumps(replace(asked, out=tmp_path / "two").to_dict()))
    launch = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    more = ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m", "wellposed"]
    command = [sys.executable, "-m", *launch, *more, "finetune", "language", "--config", str(tmp_path / "two.json")]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "2 x cpu" in done.stderr
    losses = [[event["loss"] for event in read_journal(tmp_path / name, "train")] for name in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    told = json.loads((tmp_path / "two" / "result.json").read_text())
    assert {name: told[name] for name in one.scores} == pytest.approx(one.scores, rel=1e-4)


def test_answers_by_text_are_what_a_file_of_texts_gives(home: Path, tmp_path: Path) -> None:
    listed, plain = [], []
    for right, (first, second) in [(n % 2, ("dry", "wet") if n % 3 else ("wet", "dry")) for n in range(12)]:
        asked, texts = f"{right}{first}?", [first, second]
        own = {"prompt": f"{asked} Answer1: {first} Answer2: {second}\nAnswer format: answer1/answer2"}
        own["answer"] = f"answer{right + 1}"
        listed.append(own | {"completion": f"it is answer{right + 1}"})
        plain.append({"prompt": asked, "completion": f"it is {texts[right]}", "answer": texts[right], "choices": texts})
    results = {}
    for name, records in {"listed": listed, "plain": plain}.items():
        for part in ("train", "test"):
            write_jsonl(tmp_path / name / f"{part}.jsonl", records)
        words = ["--model", str(home / "llama"), "--data", str(tmp_path / name), "--out", str(tmp_path / f"run-{name}")]
        small = ["--epochs", "2", "--batch-size", "3", "--lr", "1e-2", "--device", "cpu", "--max-length", "64"]
        answers = ["--answers", "texts"] if name == "listed" else []
        assert main(["finetune", "language", *words, *small, "--new-tokens", "12", *answers]) == 0
        results[name] = json.loads((tmp_path / f"run-{name}" / "result.json").read_text())
    for score in ("accuracy", "written_accuracy"):
        assert results["listed"][score] == results["plain"][score]
    learned = [[e["loss"] for e in read_journal(tmp_path / f"run-{name}", "train")] for name in results]
    assert learned[0] == learned[1]
    assert results["listed"]["loss"] > results["plain"]["loss"]  # of what the options differ in alone
    card = (tmp_path / "run-listed" / "adapter" / "README.md").read_text()
    assert "| answers | texts |" in card


def test_several_sets_have_scores_of_their_own(home: Path, tmp_path: Path) -> None:
    first_letters(home / "more", 16)
    asked = settings(home, tmp_path / "run", data=(str(home / "letters"), str(home / "more")), keep_every=1, epochs=1)
    scores = finetune_language(asked, quiet=True).scores
    assert scores["accuracy"] == (scores["letters/accuracy"] + scores["more/accuracy"]) / 2
    kept = sorted((tmp_path / "run" / "kept").iterdir())
    assert [(folder / "adapter" / "adapter_model.safetensors").is_file() for folder in kept] == [True, True]


def test_the_command_tells_what_it_cuts(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = {"prompt": "q" * 300, "completion": "a"}
    data = write_jsonl(tmp_path / "long.jsonl", [long, *[{"prompt": "q", "completion": "a"}] * 7])
    words = [
        "finetune",
        "language",
        "--model",
        str(home / "llama"),
        "--data",
        str(data),
        "--out",
        str(tmp_path / "run"),
    ]
    small = ["--epochs", "1", "--batch-size", "1", "--device", "cpu", "--max-length", "4096", "--method", "lora"]
    assert main([*words, *small]) == 0
    told = capsys.readouterr().err
    assert "1 of 8 are longer than 256 tokens and were cut to that" in told  # the model's context
    assert "tested on nothing" in told
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["sequences_cut"], result["max_length"]) == (1, 256)
    assert "1 of 8 sequences were longer than 256 tokens" in (tmp_path / "run" / "adapter" / "README.md").read_text()
    assert main([*words, *small]) == 2
    assert "holds something already" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["lora", "dora", "sine"])
def test_bf16_keeps_what_is_trained_in_float32(method: Any, home: Path, tmp_path: Path) -> None:
    asked = settings(home, tmp_path / "run", precision="bf16", method=method, epochs=1, generate=0)
    model = finetune_language(asked, quiet=True).model
    assert model(input_ids=torch.arange(3, 20)[None]).logits.isfinite().all()  # without autocast
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"model": "nowhere"}, ModelFileError, "nowhere does not exist"),
        ({"model": ""}, InvalidArgumentError, "expected a folder with a model"),
        ({"data": ()}, InvalidArgumentError, "expected files or folders"),
        ({"target_modules": ("nothing",)}, InvalidArgumentError, "nothing"),
        ({"target_modules": ("nothing",), "method": "lora"}, InvalidArgumentError, "nothing"),
        (
            {"target_modules": ("norm",), "method": "lora"},
            UnsuitableModelError,
            "cannot adapt norm of LlamaForCausalLM",
        ),
        ({"target_modules": ("norm",), "method": "sine"}, WellposedError, "norm is a"),
        ({"method": "lora", "omega": 3.0}, InvalidArgumentError, "--method sine or sine-dora, not lora"),
        ({"method": "magic"}, InvalidArgumentError, "expected one of full, lora"),
        ({"omega": -1.0}, InvalidArgumentError, "omega=-1.0: expected a number above 0"),
        ({"batch_size": 1000}, InvalidArgumentError, "batch_size=1000: .* 64 examples make 11 rows"),
        ({"resume": True}, RunError, "no run in"),
        ({"micro_batch": 0}, InvalidArgumentError, "micro_batch=0: expected at least 1"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(
    changes: dict[str, Any], kind: type[Exception], message: str, home: Path, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        finetune_language(settings(home, tmp_path / "run", **changes), quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_model_that_mixes_packed_sequences_is_refused(home: Path, tmp_path: Path) -> None:
    """BLOOM has no positions: it knows the distance of two tokens in a row, and nothing of where a sequence begins."""
    config = transformers.BloomConfig(vocab_size=WORDS, hidden_size=32, n_layer=1, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path / "bloom")
    asked = settings(home, tmp_path / "run", model=str(tmp_path / "bloom"), tokenizer=home / "llama", method="sine")
    with pytest.raises(UnsuitableModelError, match="use --no-pack"):
        finetune_language(asked, quiet=True)
    losses = []
    for name, size in {"one": 64, "more": 5}.items():
        how = {"pack": False, "batch_size": 64, "micro_batch": size, "epochs": 1, "log_every": 1}
        finetune_language(replace(asked, out=tmp_path / name, **how), quiet=True)
        losses.append(read_journal(tmp_path / name, "train")[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_models_that_are_not_whole(home: Path, tmp_path: Path) -> None:
    bare = causal_folder(tmp_path / "bare", tokenizer=False)
    with pytest.raises(ModelFileError, match=r"bare has no tokenizer.*--tokenizer"):
        finetune_language(settings(home, tmp_path / "run", model=str(bare)), quiet=True)
    asked = settings(home, tmp_path / "run", model=str(bare), tokenizer=home / "llama", epochs=1, generate=0)
    assert finetune_language(asked, quiet=True).saved.is_dir()
    shutil.copytree(home / "llama", tmp_path / "half")
    kept = {name: value for name, value in load_file(bare / "model.safetensors").items() if "layers.1" not in name}
    save_file(kept, tmp_path / "half" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"half lacks 9 weights of the model, such as model.layers.1"):
        finetune_language(settings(home, tmp_path / "other", model=str(tmp_path / "half")), quiet=True)
    (bare / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ModelFileError, match="cannot be read as a model"):
        finetune_language(replace(asked, out=tmp_path / "other"), quiet=True)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"model.gguf cannot be read"):
        finetune_language(settings(home, tmp_path / "other", model=str(tmp_path / "model.gguf")), quiet=True)
    with pytest.raises(ModelFileError, match="is a file: expected a folder"):
        finetune_language(settings(home, tmp_path / "other", model=str(bare / "config.json")), quiet=True)


@pytest.mark.parametrize("method", ["full", "sine"])
def test_a_gguf_file_is_a_model_with_its_tokenizer(method: str, home: Path, tmp_path: Path) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(home / "llama").eval()
    path = gguf_file(tmp_path / "small.gguf", base)
    opened = open_language_model(settings(home, tmp_path, model=str(path)), (), torch.float32)
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(opened.model.eval()(input_ids=ids).logits, base(input_ids=ids).logits)
    result = finetune_language(settings(home, tmp_path / "run", model=str(path), method=method), quiet=True)
    assert (result.saved / "README.md").is_file()


@pytest.mark.gpu
@pytest.mark.parametrize(("method", "compiled"), [("lora", False), ("dora", False), ("sine", False), ("sine", True)])
def test_on_a_gpu_in_bf16(method: Any, compiled: bool, home: Path, tmp_path: Path) -> None:
    how = {"device": "cuda", "precision": "bf16", "compile": compiled}
    asked = settings(home, tmp_path / "run", **how, method=method, epochs=4)
    whole = finetune_language(asked, quiet=True)
    told = json.loads((tmp_path / "run" / "result.json").read_text())
    assert told["mean_stable_rank"] == pytest.approx(_mean_stable_rank(whole.model), rel=1e-2)
    again = finetune_language(replace(asked, out=tmp_path / "again"), quiet=True)
    assert whole.scores == again.scores
    losses = [event["loss"] for event in read_journal(tmp_path / "run", "test")]
    assert losses[-1] < losses[0]
