"""Files nobody should trust: damaged, foreign and hostile ones give a clear error and execute nothing."""

import json
import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import wellposed as wp
from wellposed.errors import ModelFileError
from zoo import vit

WEIGHTS = "wellposed.safetensors"


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


def test_damaged_and_foreign_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFileError, match="does not exist"):
        wp.load(tmp_path / "nowhere")
    wp.save(vit(), tmp_path)
    whole = (tmp_path / WEIGHTS).read_bytes()
    contents = {
        "truncated": whole[: len(whole) // 2],
        "almost whole": whole[:-1],
        "empty": b"",
        "text": b"not a model at all",
        "pickle": pickle.dumps(Bomb()),
        "huge header": (2**60).to_bytes(8, "little") + whole[8:],
    }
    for name, content in contents.items():
        (tmp_path / WEIGHTS).write_bytes(content)
        with pytest.raises(ModelFileError, match="not a whole safetensors file"):
            wp.load(tmp_path)
        assert not Path("exploded").exists(), name
    safetensors.torch.save_file({"x": torch.ones(1)}, tmp_path / WEIGHTS)
    with pytest.raises(ModelFileError, match="no wellposed header"):
        wp.load(tmp_path)


TIMM = {"library": "timm", "architecture": "vit_tiny_patch16_224", "args": {"depth": 1}}
GPT2 = {"library": "transformers", "class": "GPT2LMHeadModel", "config": {"model_type": "gpt2", "n_layer": 1}}


def _hf(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"format": 1, "model": {"library": "transformers", "class": name, "config": config}, "recipe": []}


def _timm(name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"format": 1, "model": {"library": "timm", "architecture": name, "args": args}, "recipe": []}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("{not json", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ([], "format None"),
        ({"format": 99, "model": TIMM, "recipe": []}, "format 99"),
        ({"format": 1, "model": TIMM}, "recipe"),
        ({"format": 1, "recipe": []}, "library None"),
        ({"format": 1, "model": {"library": "os"}, "recipe": []}, "library 'os'"),
        ({"format": 1, "model": {"library": "timm", "architecture": 3}, "recipe": []}, "architecture"),
        ({"format": 1, "model": TIMM | {"architecture": "hf-hub:evil/model"}, "recipe": []}, "hf-hub:evil"),
        ({"format": 1, "model": TIMM | {"architecture": "local-dir:evil"}, "recipe": []}, "local-dir:evil"),
        ({"format": 1, "model": TIMM | {"args": {"pretrained": True}}, "recipe": []}, "no arguments of a model alone"),
        (
            {"format": 1, "model": TIMM | {"args": {"checkpoint_path": "evil.pt"}}, "recipe": []},
            "no arguments of a model alone",
        ),
        (
            {"format": 1, "model": TIMM | {"args": {"pretrained_cfg": {"file": "x"}}}, "recipe": []},
            "no arguments of a model alone",
        ),
        ({"format": 1, "model": TIMM | {"args": {"surprise": 1}}, "recipe": []}, "cannot make"),
        ({"format": 1, "model": TIMM, "recipe": [{"change": "eval", "code": "1"}]}, "no known kind"),
        ({"format": 1, "model": TIMM, "recipe": []}, "do not fit"),
        (_timm("vit_tiny_patch16_224", {"embed_dim": 3 * 2**24, "depth": 1}), "far more than it holds"),
        (_timm("vit_tiny_patch16_224", {"embed_dim": 3 * 2**18, "depth": 1}), "do not fit"),
        ({"format": 1, "model": GPT2 | {"class": "pipeline"}, "recipe": []}, "no model class 'pipeline'"),
        ({"format": 1, "model": GPT2 | {"class": "__builtins__"}, "recipe": []}, "no model class"),
        ({"format": 1, "model": GPT2 | {"config": {"n_layer": "many"}}, "recipe": []}, "cannot make"),
        ({"format": 1, "model": GPT2 | {"config": {"_attn_implementation": "evil/kernel"}}, "recipe": []}, "run code"),
        ({"format": 1, "model": GPT2 | {"config": {"x": {"auto_map": {"A": "evil"}}}}, "recipe": []}, "run code"),
        (_hf("GPT2LMHeadModel", {"x": [{"auto_map": {"A": "evil"}}]}), "run code"),
        ({"format": 1, "model": GPT2 | {"config": {"n_layer": 10**7}}, "recipe": []}, "far more than it holds"),
        ({"format": 1, "model": TIMM | {"args": {"depth": 10**7}}, "recipe": []}, "far more than it holds"),
        ({"format": 1, "model": TIMM | {"args": {"num_heads": 0}}, "recipe": []}, "cannot make"),
        ({"format": 1, "model": TIMM | {"args": {"norm_layer": "evil"}}, "recipe": []}, "cannot make"),
        ({"format": 1, "model": TIMM | {"args": {"mlp_ratio": math.inf}}, "recipe": []}, "cannot make"),
        (_timm("vit_tiny_patch16_224.evil", {}), "cannot make"),
        ('{"format": ' + "9" * 5000 + "}", "not JSON"),
        ({"format": 1, "model": TIMM | {"args": {"depth": 10**9}}, "recipe": []}, "far more than it holds"),
        ({"format": 1, "model": {"library": ["timm"]}, "recipe": []}, "library"),
        (_timm("resnet50", {"layers": [10**6, 1, 1, 1]}), "far more than it holds"),
        (_timm("resnet18", {"features_only": True, "out_indices": 10**6}), "no arguments of a model alone"),
        (_hf("ViTForImageClassification", {"num_labels": 10**8}), "far more than it holds"),
        (_hf("TimmBackbone", {"backbone": "hf-hub:evil/model"}), "TimmBackbone|run code"),
        (_hf("DetrModel", {"backbone_config": {"backbone": "hf-hub:evil/model"}}), "DetrModel|run code"),
        (_hf("TimmWrapperModel", {"architecture": "local-dir:evil"}), "no model class 'TimmWrapperModel'"),
        (_hf("TimmWrapperModel", {"model_args": {"checkpoint_path": "evil.pt"}}), "no model class"),
        ({"format": 1, "model": GPT2, "recipe": []}, "do not fit"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_hostile_headers(header: Any, message: str, tmp_path: Path) -> None:
    text = header if isinstance(header, str) else json.dumps(header)
    tensors = {f"x{i}": torch.ones(1) for i in range(12)}
    safetensors.torch.save_file(tensors, tmp_path / WEIGHTS, metadata={"wellposed": text})
    with pytest.raises(ModelFileError, match=message):
        wp.load(tmp_path)
