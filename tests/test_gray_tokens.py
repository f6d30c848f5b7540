"""Graying the input of models, family by family, against doing it to the images or tokens by hand."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wellposed as wp
from wellposed.errors import (
    InvalidArgumentError,
    ModelFileError,
    RecipeMismatchError,
    UnknownFamilyError,
    UnsuitableModelError,
)
from wellposed.recipes import replay
from zoo import classes, convmixer, deit, gpt2, hf_vit, images, library_classes, vit

SMALL_SWIN = {
    "img_size": 32,
    "window_size": 4,
    "embed_dim": 16,
    "depths": (1, 1),
    "num_heads": (2, 2),
    "num_classes": 5,
}
SMALL_CAIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 4, "num_classes": 5}
SMALL_CAIT["init_values"] = 1  # the LayerScale of the class attention would hide what the patches hold
SMALL_PVT = {"depths": (1, 1), "embed_dims": (16, 32), "num_heads": (1, 2), "sr_ratios": (2, 1), "mlp_ratios": (2, 2)}


def swin() -> nn.Module:
    return timm.create_model("swin_tiny_patch4_window7_224", **SMALL_SWIN)


def cait() -> nn.Module:
    return timm.create_model("cait_xxs24_224", **SMALL_CAIT)


def pvt() -> nn.Module:
    return timm.create_model("pvt_v2_b0", num_classes=5, **SMALL_PVT)


def dynamic_vit() -> nn.Module:
    return vit(dynamic_img_size=True)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    embedding: str = "patch_embed"
    patch: int = 8
    places: tuple[str, ...] = ("patches", "tokens")


CASES = {
    "vit": Case(vit),
    "dynamic_vit": Case(dynamic_vit),
    "deit": Case(deit),
    "swin": Case(swin, patch=4),
    "cait": Case(cait),
    "pvt": Case(pvt, places=("tokens",)),
    "hf_vit": Case(hf_vit, embedding="vit.embeddings.patch_embeddings"),
}
every_place = pytest.mark.parametrize(
    ("case", "at"),
    [pytest.param(case, at, id=f"{name}-{at}") for name, case in CASES.items() for at in case.places],
)
kinds = pytest.mark.parametrize("kind", ["svd", "dct"])


def output(model: nn.Module, x: Tensor | None = None) -> Tensor:
    result = model(images()["x"] if x is None else x)
    return result if isinstance(result, Tensor) else result.logits


def grayed_images(kind: str, eps: float, patch: int) -> Tensor:
    """The images with their patches grayed, by torch's own unfold and fold."""
    x = images()["x"]
    patches_BNP = F.unfold(x, patch, stride=patch).mT
    return F.fold(wp.gray(patches_BNP, kind, eps).mT, x.shape[-2:], patch, stride=patch)


@every_place
@kinds
def test_is_graying_by_hand(case: Case, at: str, kind: str) -> None:
    model = case.make().eval()
    embedding, before = model.get_submodule(case.embedding), output(model)
    if at == "patches":
        expected = output(model, grayed_images(kind, 0.6, case.patch))
    else:

        def by_hand(_: Any, __: Any, embedded: Tensor) -> Tensor:
            maps = embedded if embedded.ndim == 3 else embedded.flatten(1, 2)  # all of these have channels last
            return wp.gray(maps, kind, 0.6).reshape(embedded.shape)

        handle = embedding.register_forward_hook(by_hand)
        expected = output(model)
        handle.remove()
    types, keys = classes(model), list(model.state_dict())
    assert wp.gray_tokens(model, kind, eps=0.6, at=at) is model
    torch.testing.assert_close(output(model), expected)
    assert not torch.allclose(expected, before, atol=1e-4)
    assert list(model.state_dict()) == keys
    assert library_classes(model) == types
    assert [t.__name__ for t in classes(model)] == [t.__name__ for t in types]
    assert wp.ungray_tokens(model) is model
    assert classes(model) == types
    assert torch.equal(output(model), before)


@every_place
def test_eps_1_changes_no_bit(case: Case, at: str) -> None:
    model = case.make().eval()
    before = output(model)
    wp.gray_tokens(model, "svd", eps=1, at=at)
    assert torch.equal(output(model), before)
    assert wp.recipe(model)[0]["eps"] == 1


def test_maps_with_channels_first() -> None:
    embedding: Any = timm.layers.PatchEmbed(32, 8, 3, 6, output_fmt="NCHW")
    holder = nn.Module()
    holder.patch_embed = embedding
    x = images()["x"]
    plain_BDHW = embedding(x)
    wp.gray_tokens(holder, "svd", at="tokens")
    expected = wp.gray(plain_BDHW.flatten(2).mT, "svd").mT.reshape(plain_BDHW.shape)
    torch.testing.assert_close(embedding(x), expected)


def test_pixels_beyond_the_last_patch() -> None:
    model: Any = vit(img_size=35).eval()
    x = torch.randn(2, 3, 35, 35)
    inside = F.unfold(x[..., :32, :32], 8, stride=8).mT
    expected = F.fold(wp.gray(inside, "dct", 0.5).mT, (32, 32), 8, stride=8)
    expected = model(F.pad(expected, (0, 3, 0, 3)))
    torch.testing.assert_close(wp.gray_tokens(model, "dct", eps=0.5)(x), expected)


def test_pyramid_has_only_its_first_embedding_grayed() -> None:
    model: Any = wp.gray_tokens(pvt(), "dct", at="tokens")
    assert type(model.patch_embed) is not library_classes(model.patch_embed)[0]
    assert type(model.stages[1].downsample) is library_classes(model.patch_embed)[0]


def test_two_models_in_one() -> None:
    pair = nn.ModuleDict({"student": vit(), "teacher": vit()})
    wp.gray_tokens(pair, "dct")
    assert len(wp.recipe(pair)) == 1
    for model in pair.values():
        assert wp.recipe(model) == wp.recipe(pair)


# --- under torch's own machinery


@every_place
@kinds
def test_training_under_autocast(case: Case, at: str, kind: str) -> None:
    model = case.make()
    parameters = len(list(model.parameters()))
    wp.gray_tokens(model, kind, at=at).train()
    assert len(list(model.parameters())) == parameters
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = output(model).float().square().mean()
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize(
    ("name", "at", "kind"), [("vit", "tokens", "svd"), ("swin", "patches", "dct"), ("hf_vit", "patches", "svd")]
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch 2.11, of itself
def test_compile(name: str, at: str, kind: str) -> None:
    model = CASES[name].make().eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    before = output(compiled)
    wp.gray_tokens(compiled, kind, eps=0.6, at=at)
    torch.testing.assert_close(output(compiled), output(model))
    assert not torch.allclose(output(compiled), before, atol=1e-4)
    output(compiled).sum().backward()


@every_place
def test_deepcopy_and_pickle(case: Case, at: str) -> None:
    model = wp.gray_tokens(case.make().eval(), "svd", at=at)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert classes(other) == classes(model)
        assert wp.recipe(other) == wp.recipe(model)
        assert torch.equal(output(other), output(model))


def test_ddp(process_group: None) -> None:
    parallel = nn.parallel.DistributedDataParallel(wp.gray_tokens(vit(), "svd", at="tokens"))
    for _ in range(2):
        parallel.zero_grad()
        output(parallel).square().mean().backward()
    assert wp.recipe(parallel)
    wp.ungray_tokens(parallel)
    assert wp.recipe(parallel) == []


# --- with the other changes, and in files


def test_composes_with_the_other_changes(tmp_path: Path) -> None:
    model = wp.gray_tokens(wp.condition_(wp.cut_skips(vit().eval())), "svd", eps=0.8, tol=2e-3, at="tokens")
    gray = {"change": "gray_tokens", "kind": "svd", "eps": 0.8, "tol": 0.002, "at": "tokens"}
    assert [entry["change"] for entry in wp.recipe(model)] == ["cut_skips", "gray_tokens", "condition_"]
    assert gray in wp.recipe(model)
    loaded = wp.load(wp.save(model, tmp_path))
    assert wp.recipe(loaded) == wp.recipe(model)
    assert torch.equal(output(loaded), output(model))
    assert all(not skip.attention for skip in wp.skips(model))
    wp.restore_skips(model)
    assert gray in wp.recipe(model)
    wp.cut_skips(wp.ungray_tokens(model))
    assert [entry["change"] for entry in wp.recipe(model)] == ["cut_skips", "condition_"]


@pytest.mark.parametrize("name", ["swin", "cait", "pvt", "hf_vit"])
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = wp.gray_tokens(case.make().eval(), "dct", at=case.places[-1])
    arguments = {"swin": SMALL_SWIN, "cait": SMALL_CAIT, "pvt": {**SMALL_PVT, "num_classes": 5}}.get(name)
    loaded = wp.load(wp.save(model, tmp_path, model_args=arguments))
    assert wp.recipe(loaded) == wp.recipe(model)
    assert torch.equal(output(loaded), output(model))


def test_weights_do_not_load_into_a_model_grayed_otherwise(tmp_path: Path) -> None:
    wp.save(wp.gray_tokens(vit(), "dct"), tmp_path)
    for other in (vit(), wp.gray_tokens(vit(), "dct", eps=0.9), wp.gray_tokens(vit(), "dct", at="tokens")):
        with pytest.raises(RecipeMismatchError, match="'gray_tokens'"):
            wp.load(tmp_path, other)
    wp.load(tmp_path, wp.gray_tokens(vit(), "dct", eps=0.95))


@pytest.mark.parametrize(
    "arguments", [{"kind": "fft"}, {"kind": "dct", "eps": 2}, {"kind": "svd", "at": "pixels"}, {"surprise": 1}], ids=str
)
def test_entries_that_do_not_fit_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match="recipe entry"):
        replay(vit(), [{"change": "gray_tokens", **arguments}])


# --- refusals


def test_a_grayed_model_is_not_grayed_again() -> None:
    model = wp.gray_tokens(vit(), "dct")
    for at in ("patches", "tokens"):
        with pytest.raises(UnsuitableModelError, match=r"grayed already.*'dct'.*ungray_tokens"):
            wp.gray_tokens(model, "svd", at=at)
    assert wp.recipe(model)[0]["kind"] == "dct"
    assert wp.recipe(wp.ungray_tokens(wp.ungray_tokens(model))) == []


def test_overlapping_and_padded_patches() -> None:
    for model, reason in ((pvt(), "overlap"), (vit(dynamic_img_size=True, dynamic_img_pad=True), "pads")):
        with pytest.raises(UnsuitableModelError, match=rf"{reason}.*at='tokens'"):
            wp.gray_tokens(model, "dct")
        assert wp.recipe(model) == []


@pytest.mark.parametrize("make", [gpt2, convmixer, lambda: nn.Linear(2, 2)], ids=["gpt2", "convmixer", "linear"])
def test_unknown_models(make: Callable[[], nn.Module]) -> None:
    model = make()
    for change in (wp.gray_tokens, wp.ungray_tokens):
        with pytest.raises(UnknownFamilyError, match=rf"{type(model).__name__} has no known patch embedding.*Swin"):
            change(model)


def test_a_known_embedding_elsewhere() -> None:
    with torch.device("meta"):
        other = timm.create_model("beit_base_patch16_224", depth=1)
    with pytest.raises(UnknownFamilyError, match=r"timm.models.beit, which is not known"):
        wp.gray_tokens(other, "dct")


def test_arguments_out_of_range() -> None:
    for arguments, message in (
        ({"eps": 0}, "eps=0"),
        ({"tol": 1}, "tol=1"),
        ({"kind": "fft"}, "'svd' or 'dct'"),
        ({"at": "image"}, "'patches' or 'tokens'"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            wp.gray_tokens(vit(), **arguments)
    with pytest.raises(InvalidArgumentError, match="expected a torch"):
        wp.gray_tokens("vit")


def test_one_of_two_models(tmp_path: Path) -> None:
    pair = nn.ModuleDict({"student": vit(), "teacher": vit()})
    wp.gray_tokens(pair["student"], "dct")
    entries = wp.recipe(pair)
    assert [entry["only"] for entry in entries] == [["student.patch_embed"]]
    fresh = nn.ModuleDict({"student": vit(), "teacher": vit()})
    replay(fresh, entries)
    assert wp.recipe(fresh) == entries
    assert wp.recipe(fresh["teacher"]) == []
    wp.gray_tokens(pair["teacher"], "dct")
    assert "only" not in wp.recipe(pair)[0]
    with pytest.raises(InvalidArgumentError, match=r"student.patch_embed, teacher.patch_embed"):
        wp.gray_tokens(wp.ungray_tokens(pair), "dct", only=["nobody"])


@pytest.mark.parametrize("kind", ["svd", "dct"])
def test_images_that_are_broken_or_too_small(kind: str) -> None:
    model = wp.gray_tokens(vit(), kind)
    with pytest.raises(InvalidArgumentError, match="NaN or Inf"):
        model(torch.full((1, 3, 32, 32), torch.nan))
    with pytest.raises(AssertionError, match="height"):
        model(torch.zeros(1, 3, 4, 4))
