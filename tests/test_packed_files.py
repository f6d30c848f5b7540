"""Packed files nobody should trust, and folders without an adapter: a clear error at once, no large allocation."""

import base64
import json
import time
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import wellposed as wp
from fuzz_packed import check, example, fuzz
from small_adapters import llama
from small_packed import saved
from wellposed.compression import files, read_packed
from wellposed.compression.files import PACKED
from wellposed.errors import ModelFileError

pytestmark = pytest.mark.filterwarnings("ignore:Could not find a config file in")


def test_mutants(tmp_path: Path) -> None:
    outcomes = fuzz(1500, seed=1, folder=tmp_path)
    assert outcomes["refused"] > 1000
    assert outcomes["read"] > 0


def test_every_single_flipped_bit_is_found(tmp_path: Path) -> None:
    right = example(tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    refused = 0
    for at in range(0, len(whole), 3):
        (tmp_path / "mutant").write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        refused += check(tmp_path / "mutant", right) == "refused"
    assert refused == len(range(0, len(whole), 3))


def header_of(path: Path) -> dict[str, Any]:
    with files.safe_open(path, framework="pt") as file:
        return json.loads(zlib.decompress(base64.b64decode(file.metadata()[files._METADATA].split(" ")[2])))


def rewrite(path: Path, header: Any, version: str = files.FORMAT_VERSION, **blobs: torch.Tensor) -> None:
    """The same file with another header and a checksum that is right."""
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    kept = {name: tensor.clone() for name, tensor in load_file(path).items()} | blobs
    text = base64.b64encode(zlib.compress(data)).decode()
    save_file(kept, path, metadata={files._METADATA: f"{version} {files._checksum(text, kept)} {text}"})


def first_factor(header: dict[str, Any], at: int, value: Any) -> dict[str, Any]:
    header["factors"][0][at] = value
    return header


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: first_factor(h, 1, [2**40, 2**40]), "need more codes"),
        (lambda h: first_factor(h, 1, [10**9, 10**9]), "need more codes"),
        (lambda h: first_factor(h, 1, [10**30]), "has shape"),
        (lambda h: first_factor(h, 1, [0, 7]), "has shape"),
        (lambda h: first_factor(h, 1, [1] * 9), "has shape"),
        (lambda h: first_factor(h, 1, [1]), "shapes need"),
        (lambda h: first_factor(h, 2, "float99"), "is of float99"),
        (lambda h: first_factor(h, 2, "int64"), "is of int64"),
        (lambda h: first_factor(h, 3, 64), "bits, codebooks"),
        (lambda h: first_factor(h, 3, 8), "need more codebooks|shapes need"),
        (lambda h: first_factor(h, 4, 2**40), "bits, codebooks"),
        (lambda h: first_factor(h, 5, True), "columns"),
        (lambda h: first_factor(h, 6, 10**6), "bits, codebooks"),
        (lambda h: first_factor(h, 6, 127), "no finite numbers"),
        (lambda h: h | {"factors": h["factors"][1:]}, "shapes need"),
        (lambda h: h | {"others": [["x", [2**40], "int64"]]}, "need more others"),
        (lambda h: h | {"others": h["others"] * 2}, "need more others"),
        (lambda h: h | {"factors": "many"}, "lacks one of"),
        (lambda h: [], "lacks one of"),
        (lambda h: b"{not json", "cannot be read"),
        (lambda h: b"[" * 2**20, "cannot be read"),
        (lambda h: b" " * 2**28, "longer than"),
        (lambda h: b"9" * 10**5, "cannot be read"),
    ],
)
def test_lying_headers(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    example(path)
    rewrite(path, change(header_of(path)), codebooks=1000 * load_file(path)["codebooks"])
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(ModelFileError, match=f"damaged: .*({message})"):
        read_packed(path)
    assert time.perf_counter() - start < 1
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()


def test_foreign_short_and_newer_files(tmp_path: Path) -> None:
    path = tmp_path / PACKED
    example(path)
    whole, header = path.read_bytes(), header_of(path)
    for length in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelFileError, match="not a whole safetensors file"):
            read_packed(tmp_path)
    path.write_bytes((2**60).to_bytes(8, "little") + whole[8:])
    with pytest.raises(ModelFileError, match="not a whole safetensors file"):
        read_packed(tmp_path)
    path.write_bytes(whole)
    rewrite(path, header, version="2")
    with pytest.raises(ModelFileError, match=r"version '2' .* upgrade"):
        read_packed(tmp_path)
    path.write_bytes(whole)
    rewrite(path, header, more=torch.zeros(1))
    with pytest.raises(ModelFileError, match="it holds"):
        read_packed(tmp_path)
    path.write_bytes(whole)
    rewrite(path, header, codebooks=torch.zeros(4, 4).half())
    with pytest.raises(ModelFileError, match="its codebooks are"):
        read_packed(tmp_path)
    save_file({"x": torch.ones(1)}, path)
    with pytest.raises(ModelFileError, match="no packed adapter"):
        read_packed(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOKR"}, "type 'LOKR': expected one of LORA"),
        ({"peft_type": ["LORA"]}, "expected one of LORA"),
        ({"r": 10**9}, "does not fit"),
        ({"r": "many"}, "does not fit"),
        ({"rank_pattern": {"q_proj": 10**9}}, "does not fit"),
        ({"target_modules": ["gate_proj"]}, "no place|no values"),
        ({"target_modules": ["nothing"]}, "does not fit"),
        ({"target_modules": "all-linear"}, "no values"),
        ({"target_parameters": ["q_proj.weight"]}, "single parameters"),
        ({"task_type": "EVERYTHING"}, "does not fit"),
    ],
    ids=str,
)
def test_lying_configurations(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    wp.compress(saved(tmp_path / "plain", "lora"), bits=3, out=tmp_path / "packed")
    path = tmp_path / "packed" / PACKED
    header = header_of(path)
    rewrite(path, header | {"config": header["config"] | change})
    with pytest.raises(ModelFileError, match=message):
        wp.load_adapter(llama(), tmp_path / "packed")


def test_folders_that_are_no_adapters(tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(ModelFileError, match=message):
            wp.compress(tmp_path / "plain", bits=3, out=tmp_path / "packed")
        assert not (tmp_path / "packed").exists()

    refused("no adapter_config.json")
    saved(tmp_path / "plain", "sine")
    config, weights = tmp_path / "plain" / "adapter_config.json", tmp_path / "plain" / "adapter_model.safetensors"
    text, data = config.read_text(), weights.read_bytes()
    tensors = {name: tensor.clone() for name, tensor in load_file(weights).items()}  # not views of the file
    config.write_text("{")
    refused("cannot be read")
    for change, message in [
        ({"peft_type": "LOKR"}, "type 'LOKR'"),
        ({"peft_type": "LORA", "init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"target_parameters": ["a.b"]}, "single parameters"),
    ]:
        config.write_text(json.dumps(json.loads(text) | change))
        refused(message)
    config.write_text("[]")
    refused("expected one of LORA")
    config.write_text(text)
    weights.write_bytes(data[: len(data) // 2])
    refused("cannot be read")
    weights.unlink()
    refused("neither adapter_model.safetensors nor adapter_model.bin")
    (tmp_path / "plain" / "adapter_model.bin").write_bytes(b"\x80\x04garbage")
    refused("cannot be read")
    torch.save([1, 2], tmp_path / "plain" / "adapter_model.bin")
    refused("something else than tensors")
    name = next(key for key in tensors if "lora_A" in key)
    save_file(tensors | {name: torch.full_like(tensors[name], torch.nan)}, weights)
    refused("holds NaN or Inf")
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, weights)
    refused("without its partner")
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, weights)
    refused("have no product")
    save_file({"x": torch.ones(2)}, weights)
    refused("no factors")
