"""Mutated packed adapters: each must be refused with a ModelFileError, or be read as what it was before.

    python tests/fuzz_packed.py --count 100000

Two kinds of mutants. Damage: bytes flipped, cut out, put in, doubled or zeroed, anywhere in the file. Lies: the header
says something else, or the blobs are of another length, and the checksum is right. Of a lie it is only asked that it
is refused or read as tensors of the shapes that it names, from no more memory than the file has reason for.
"""

import argparse
import base64
import json
import random
import tempfile
import time
import zlib
from copy import deepcopy
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from wellposed.compression import files
from wellposed.compression.packed import PackedAdapter, packed_tensor, rows_of
from wellposed.compression.quantizers import quantize
from wellposed.errors import ModelFileError

SLOWEST = 1.0
ODD: list[Any] = [
    *(-1, 0, 1, 2, 3, 7, 8, 9, 16, 255, 2**31, 2**40, 2**63, 10**30, 0.5, 1e308, None, True, False, "", "float32"),
    *("float99", "\x00", [], [0], [-1], [2**40, 2**40], [1] * 9, [[1]], {}, {"a": 1}, float("nan")),
]


def example(path: Path) -> dict[str, Tensor]:
    """Write a small packed adapter with a factor of every kind, and return its tensors."""
    generator = torch.Generator().manual_seed(0)
    factors, others = {}, {"base_model.model.head.weight": torch.randn(3, 5, generator=generator)}
    for bits in (1, 3, 8):
        for letter, shape in (("A", (2, 7)), ("B", (9, 2))):
            tensor = torch.randn(shape, generator=generator)
            (found,) = quantize([rows_of(tensor, letter == "B", per_row=bits == 3)], bits)
            factors[f"base_model.model.layer{bits}.lora_{letter}.weight"] = packed_tensor(tensor, found, letter == "B")
    adapter = PackedAdapter({"peft_type": "LORA", "r": 2, "target_modules": ["layer1"]}, "kmeans", factors, others)
    files.write_packed(adapter, path)
    return adapter.tensors()


def damaged(whole: bytes, chance: random.Random) -> bytes:
    """The file with one to four accidents."""
    data = bytearray(whole)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        at = chance.randrange(max(1, len(data)))
        length = chance.choice([1, 1, 2, 8, 64, 512])
        kind = chance.choice(["bit", "byte", "cut", "end", "insert", "zero", "copy", "length"])
        if kind == "bit" and data:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == "byte" and data:
            data[at] = chance.randrange(256)
        elif kind == "cut":
            del data[at : at + length]
        elif kind == "end":
            del data[at:]
        elif kind == "insert":
            data[at:at] = chance.randbytes(length)
        elif kind == "zero":
            data[at : at + length] = bytes(len(data[at : at + length]))
        elif kind == "copy":
            start = chance.randrange(max(1, len(data)))
            data[at : at + length] = data[start : start + length]
        else:
            data[:8] = chance.choice([0, 1, len(whole), 2**31, 2**62, 2**64 - 1]).to_bytes(8, "little")
    return bytes(data)


def lie(whole: Path, path: Path, chance: random.Random) -> None:
    """Write a file whose checksum is right, and whose header or blobs are not."""
    blobs = load_file(whole)
    with files.safe_open(whole, framework="pt") as file:
        header = json.loads(zlib.decompress(base64.b64decode(file.metadata()[files._METADATA].split(" ")[2])))
    for _ in range(chance.choice([1, 1, 2])):
        _change(header, chance)
    if chance.random() < 0.2:
        name = chance.choice(list(blobs))
        length = chance.choice([0, 1, len(blobs[name]) - 1, len(blobs[name]) + 1])
        blobs[name] = torch.nn.functional.pad(blobs[name], (0, length - len(blobs[name])))
    if chance.random() < 0.1:
        blobs["codebooks"] = torch.full_like(blobs["codebooks"], chance.choice([torch.inf, torch.nan, 65504.0]))
    text = base64.b64encode(zlib.compress(json.dumps(header).encode())).decode()
    text = text if chance.random() < 0.95 else text[: chance.randrange(len(text))]
    version = files.FORMAT_VERSION if chance.random() < 0.98 else chance.choice(["2", "", "1.0", "-1"])
    save_file(blobs, path, metadata={files._METADATA: f"{version} {files._checksum(text, blobs)} {text}"})


def _change(node: Any, chance: random.Random) -> None:
    """Put something odd at some place in nested lists and dicts, or take something away, or repeat it."""
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    if not keys:
        return
    key = chance.choice(keys)
    if isinstance(node[key], dict | list) and node[key] and chance.random() < 0.85:
        _change(node[key], chance)
    elif chance.random() < 0.1:
        del node[key]
    elif isinstance(node, list) and chance.random() < 0.1:
        node.append(deepcopy(node[key]))
    else:
        node[key] = deepcopy(chance.choice(ODD))


def check(path: Path, right: dict[str, Tensor] | None) -> str:
    """Read the file: "refused" or "read", and AssertionError for anything else. `right` is what it has to hold."""
    start = time.perf_counter()
    try:
        adapter = files.read_packed(path)
        tensors = adapter.tensors()
    except ModelFileError:
        outcome = "refused"
    else:
        for name, factor in adapter.factors.items():
            assert tensors[name].shape == factor.shape
            assert tensors[name].isfinite().all()
            assert prod(factor.shape) <= 8 * path.stat().st_size
        if right is not None:
            assert tensors.keys() == right.keys()
            assert all(torch.equal(tensors[name], tensor) for name, tensor in right.items())
        outcome = "read"
    assert time.perf_counter() - start < SLOWEST
    return outcome


def fuzz(count: int, seed: int, folder: Path) -> dict[str, int]:
    """How many of `count` mutants were refused and read; the mutant of a failure is left in `folder`."""
    chance, outcomes = random.Random(seed), {"refused": 0, "read": 0}
    whole, mutant = folder / "whole.safetensors", folder / "mutant.safetensors"
    right = example(whole)
    data = whole.read_bytes()
    assert check(whole, right) == "read"
    for i in range(count):
        if i % 3 == 2:
            lie(whole, mutant, chance)
            outcomes[check(mutant, None)] += 1
        else:
            mutant.write_bytes(damaged(data, chance))
            outcomes[check(mutant, right)] += 1
    return outcomes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.perf_counter()
    found = fuzz(arguments.count, arguments.seed, Path(tempfile.mkdtemp()))
    print(f"{arguments.count} mutants in {time.perf_counter() - began:.0f} s: {found}")
