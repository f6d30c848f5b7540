"""Principal components of patch features as pictures, the sheet and the page that show them."""

import base64
import io
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import timm
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.decomposition import PCA
from torch import Tensor

import wellposed as wp
from browser import check_in_a_browser, needs_chromium
from small_runs import small_config
from wellposed.data.pictures import read_picture
from wellposed.errors import DataError, InvalidArgumentError, WellposedError
from wellposed.evaluation.pictures.chosen_images import squared
from wellposed.evaluation.pictures.command import PcaConfig
from wellposed.evaluation.pictures.pca import pca_maps, pca_scores
from wellposed.evaluation.pictures.showing import spread_layers
from wellposed.reporting.contact_sheet import (
    BETWEEN,
    CELL,
    GAP,
    MARGIN,
    Group,
    Pixels,
    contact_sheet,
    enlarged,
    picture_panel,
)
from wellposed.training import train
from zoo import SMALL_VIT

PETS = Path(os.environ.get("WELLPOSED_DATA", Path(__file__).parents[2] / "shared" / "data")) / "oxford-iiit-pet/images"
GRID = (4, 6)


def features(images: int = 3, width: int = 16, grid: tuple[int, int] = GRID, seed: int = 0) -> Tensor:
    """Features (B, N, D) whose variances fall from direction to direction, around a mean far from 0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(images, grid[0] * grid[1], width, generator=generator)
    return x * 0.6 ** torch.arange(width) @ rotation(width, seed) + 5


def rotation(width: int, seed: int) -> Tensor:
    return torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(seed)))[0]


@pytest.mark.parametrize(("images", "width"), [(5, 16), (1, 64), (1, 24), (700, 8)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_components_are_those_of_scikit_learn(images: int, width: int, dtype: torch.dtype) -> None:
    x = features(images, width).to(dtype)
    scores = pca_scores([x], GRID)
    reference = PCA(3, svd_solver="full").fit(x.flatten(0, 1).double().numpy())
    theirs = torch.from_numpy(reference.transform(x.flatten(0, 1).double().numpy()))
    ours = scores.maps[0].reshape(-1, 3).double()
    for k in range(3):
        expected = theirs[:, k] / theirs[:, k].square().mean().sqrt()
        expected *= torch.sign(expected @ ours[:, k])
        torch.testing.assert_close(ours[:, k], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        scores.explained[0].double(), torch.from_numpy(reference.explained_variance_ratio_), atol=1e-6, rtol=1e-5
    )


def test_components_are_fitted_over_all_images_together() -> None:
    x = torch.cat([features(1), features(1, seed=1)])
    together = pca_maps([x], GRID)[0]
    torch.testing.assert_close(pca_maps([x.flip(0)], GRID)[0].flip(0), together)
    same = torch.cat([x, x[:1]])
    shown = pca_maps([same], GRID)[0]
    assert torch.equal(shown[0], shown[2])  # the same patches have the same colours wherever they are


def test_colours_run_from_quantile_to_quantile() -> None:
    shown = pca_maps([features(40)], GRID, quantile=0.05)[0].reshape(-1, 3)
    assert shown.min() == 0
    assert shown.max() == 1
    for k in range(3):
        assert (shown[:, k] == 0).float().mean().item() == pytest.approx(0.05, abs=0.003)
        assert (shown[:, k] == 1).float().mean().item() == pytest.approx(0.05, abs=0.003)
    x = features(40)
    x[0, 0] = 1e4  # one patch far away, as models without registers have them
    shown = pca_maps([x], GRID)[0].reshape(-1, 3)
    assert shown[1:].std(0).min() > 0.1


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.01, 100), wider=st.integers(0, 8))
def test_layers_that_are_turned_moved_and_scaled_look_the_same(seed: int, scale: float, wider: int) -> None:
    x = features(seed=seed).double()
    turned = torch.cat([x, x.new_zeros(*x.shape[:2], wider)], 2) @ rotation(16 + wider, seed + 1).double()
    shown = pca_maps([scale * turned - 7, x], GRID)
    torch.testing.assert_close(shown[0], shown[1], atol=1e-4, rtol=0)


def test_components_of_equal_variance_look_the_same_in_every_layer() -> None:
    """Where signs and order alone cannot bring the colours together, because any turn of them is as good a fit."""
    x = torch.linalg.qr(torch.randn(3 * 24, 4, dtype=torch.float64) + torch.tensor([10.0, 0, 0, 0]))[0][:, 1:]
    x = x - x.mean(0)
    x = (x @ torch.linalg.inv(torch.linalg.cholesky(x.T @ x)).T).view(3, 24, 3)  # all variances are equal
    layers = [x @ rotation(3, seed).double() for seed in range(4)]
    apart = [pca_maps([layer], GRID)[0] for layer in layers]
    assert max((one - other).abs().max().item() for one, other in itertools.pairwise(apart)) > 0.2
    shown = pca_maps(layers, GRID)
    for other in shown[1:]:
        torch.testing.assert_close(other, shown[0], atol=1e-4, rtol=0)


def test_turning_follows_components_that_change_their_order() -> None:
    z = torch.randn(2, 24, 3)
    layers = [z * torch.tensor([3.0, 2, 1]), z * torch.tensor([1.0, 2, 3]), z * torch.tensor([-2.0, 3, -1])]
    scores = pca_scores(layers, GRID).maps.reshape(3, -1, 3)
    for one, other in itertools.pairwise(scores):
        correlations = np.corrcoef(one.T, other.T)[:3, 3:]
        assert np.diag(correlations).min() > 0.9


def test_a_turn_keeps_the_three_dimensions() -> None:
    """What is turned spans what the layer's own components span."""
    layers = [features(seed=1), features(seed=2)]
    turned = pca_scores(layers, GRID).maps[0].reshape(-1, 3).double()
    own = pca_scores(layers[:1], GRID).maps[0].reshape(-1, 3).double()
    solution = torch.linalg.lstsq(own, turned).solution
    torch.testing.assert_close(own @ solution, turned, atol=1e-5, rtol=0)
    torch.testing.assert_close(solution.T @ solution, torch.eye(3, dtype=torch.float64), atol=1e-5, rtol=0)


def test_two_models_have_the_same_colours() -> None:
    one = pca_scores([features(seed=3), features()], GRID)
    again = pca_scores([features()], GRID, like=one)
    torch.testing.assert_close(again.maps[0], one.maps[1], atol=1e-5, rtol=0)
    other = pca_scores([features().double() @ -rotation(16, 9).double()], GRID, like=one)
    torch.testing.assert_close(other.colours()[0], one.colours()[1], atol=1e-4, rtol=0)


def test_two_models_of_different_grids() -> None:
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, 12), torch.linspace(-1, 1, 12), indexing="ij")
    smooth = torch.stack([rows, 0.7 * columns, 0.4 * rows * columns], -1)[None]
    coarse = smooth.reshape(1, 6, 2, 6, 2, 3).mean((2, 4))
    one = pca_scores([smooth.flatten(1, 2)], (12, 12))
    other = pca_scores([coarse.flatten(1, 2) * torch.tensor([-1.0, 1, -1])], (6, 6), like=one)
    averaged = one.maps[0].reshape(1, 6, 2, 6, 2, 3).mean((2, 4))
    for k in range(3):
        assert np.corrcoef(averaged[..., k].flatten(), other.maps[0][..., k].flatten())[0, 1] > 0.99


def test_layers_of_different_grids_are_shown_on_the_finest() -> None:
    """A model with stages: its last blocks see a quarter of the patches."""
    coarse = features(2, grid=(2, 3))
    fine = coarse.view(2, 2, 3, 16).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1, 2)
    shown = pca_maps([fine, coarse], [GRID, (2, 3)], quantile=0)
    assert shown.shape == (2, 2, *GRID, 3)
    torch.testing.assert_close(shown[0], shown[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_foreground_is_the_side_away_from_the_edge(sign: int) -> None:
    object_HW = torch.zeros(2, 6, 8, dtype=torch.bool)
    object_HW[0, 2:5, 2:6] = object_HW[1, 1:4, 3:7] = True
    x = 0.1 * torch.randn(2, 48, 12)
    x[..., 0] += sign * 3.0 * object_HW.flatten(1)
    scores = pca_scores([features(2, 12, (6, 8)), x], (6, 8), foreground=True)
    assert torch.equal(scores.foreground, object_HW)
    shown = scores.colours()
    assert not shown[:, ~object_HW].any()
    inside = scores.maps[:, object_HW].double()
    torch.testing.assert_close(inside.mean(1), torch.zeros(2, 3, dtype=torch.float64), atol=1e-5, rtol=0)
    torch.testing.assert_close(inside.square().mean(1), torch.ones(2, 3, dtype=torch.float64), atol=1e-4, rtol=0)


def test_features_without_variance_are_grey() -> None:
    for x in (torch.full((2, 24, 8), 0.1), torch.zeros(2, 24, 8), 1e6 * torch.ones(2, 24, 64)):
        assert (pca_maps([x], GRID) == 0.5).all()
        assert (pca_maps([x], GRID, foreground=True) == 0.5).all()
    shown = pca_maps([features(2, 8), torch.ones(2, 24, 8), features(2, 8)], GRID)
    assert (shown[1] == 0.5).all()
    torch.testing.assert_close(shown[0], shown[2])  # the colours go on behind it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_of_rounding_is_not_shown(dtype: torch.dtype) -> None:
    x = (torch.linspace(0, 1, 48)[:, None] * torch.randn(1, 512)).view(2, 24, 512).to(dtype)
    scores = pca_scores([x], GRID)
    assert scores.maps[0, ..., 0].any()
    assert not scores.maps[0, ..., 1:].any()


def test_nearly_all_patches_alike() -> None:
    x = torch.ones(10, 24, 8)
    x[3, 5] = 2
    shown = pca_maps([x], GRID)[0]
    assert shown[3, 0, 5].unique().numel() > 1
    assert (shown[0] == shown[0, 0, 0]).all()


@pytest.mark.parametrize(("shape", "grid"), [((1, 1, 5), (1, 1)), ((1, 2, 5), (1, 2)), ((2, 24, 1), GRID)])
def test_fewer_than_three_components(shape: tuple[int, ...], grid: tuple[int, int]) -> None:
    shown = pca_maps([torch.randn(shape)], grid)
    assert shown.shape == (1, shape[0], *grid, 3)
    assert (shown[..., 2] == 0.5).all()
    assert shown[..., 0].std(correction=0) > 0 or shape[1] == 1


@pytest.mark.parametrize(
    ("layers", "grid", "message"),
    [
        ([torch.randn(2, 25, 8)], GRID, "25 patches, which are no grid of 4 x 6"),
        ([torch.randn(2, 24, 8), torch.randn(3, 24, 8)], GRID, "layers.1. has 3 images and layers.0. has 2"),
        ([torch.randn(2, 24)], GRID, r"torch.float32 \(2, 24\): expected floating point \(B, N, D\)"),
        ([torch.randint(9, (2, 24, 8))], GRID, "int64"),
        ([torch.randn(0, 24, 8)], GRID, "none 0"),
        ([], GRID, "0 layers"),
        ([torch.randn(2, 24, 8)], [GRID, GRID], "1 layers with 2 grids"),
        ([torch.randn(2, 24, 8)], (-4, -6), "no grid of -4 x -6"),
    ],
)
def test_refusals(layers: list[Tensor], grid: tuple[int, int], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        pca_maps(layers, grid)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_by_name(bad: float) -> None:
    x = torch.randn(3, 24, 8)
    x[1, 2, 3] = bad
    with pytest.raises(InvalidArgumentError, match=r"layers\[1\] holds NaN or infinity in image 1"):
        pca_maps([torch.randn(3, 24, 8), x], GRID)


def test_other_refusals() -> None:
    with pytest.raises(InvalidArgumentError, match="like has 3 images, expected the same 2"):
        pca_maps([features(2)], GRID, like=pca_scores([features(3)], GRID))
    with pytest.raises(InvalidArgumentError, match=r"quantile=0\.5"):
        pca_maps([features(2)], GRID, quantile=0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    layers = [features(seed=seed).to(dtype) for seed in range(3)]
    ours = pca_maps([layer.cuda() for layer in layers], GRID, foreground=True)
    assert ours.is_cuda
    torch.testing.assert_close(ours.cpu(), pca_maps(layers, GRID, foreground=True), atol=1e-4, rtol=0)


def checker(side: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def test_a_sheet_shows_every_pixel_in_its_place() -> None:
    maps = [[checker(7, 10 * j + i) for i in range(2)] for j in range(3)]
    pictures = [[checker(CELL, j)] for j in range(3)]
    groups = [Group("image", [""], pictures), Group("a model", ["block 0", "block 1"], maps)]
    sheet = np.asarray(contact_sheet(groups, ["one.jpg", "two.jpg", "a name " * 30]))
    white = (sheet == 255).all(2)
    found = 0
    for j, row in enumerate(maps):
        for i, pixels in enumerate([*pictures[j], *row]):
            large = pixels if i == 0 else pixels.repeat(CELL // 7, 0).repeat(CELL // 7, 1)
            left = MARGIN + i * (CELL + GAP) + (BETWEEN - GAP if i else 0)
            tops = [y for y in range(len(sheet) - CELL) if (sheet[y : y + CELL, left : left + CELL] == large).all()]
            assert len(tops) == 1
            white[tops[0] : tops[0] + CELL, left : left + CELL] = True
            found += 1
    assert found == 9
    assert white.mean() < 1  # titles and names
    assert white[:, -MARGIN:].all()
    assert white[:, : MARGIN - 2].all()


def test_bicubic_is_smooth() -> None:
    steps = np.tile(np.array([0, 255], dtype=np.uint8).repeat(3).reshape(1, 2, 3), (2, 1, 1))
    assert len(np.unique(np.asarray(enlarged(steps, 56)))) == 2
    assert len(np.unique(np.asarray(enlarged(steps, 56, "bicubic")))) > 10


def test_panels_hold_the_picture_itself() -> None:
    pixels = checker(9)
    panel = picture_panel('a "b" <c>', pixels)
    root = ElementTree.fromstring(panel)
    assert root.attrib["aria-label"] == 'a "b" <c>'
    link = next(element.attrib["href"] for element in root.iter() if "href" in element.attrib)
    stored = Image.open(io.BytesIO(base64.b64decode(link.partition(",")[2])))
    assert (np.asarray(stored) == pixels).all()
    assert "pixelated" in panel
    assert "pixelated" not in picture_panel("smooth", pixels, "bicubic")
    assert len(picture_panel("photograph", checker(1000))) < 150_000


def test_squares_are_from_the_centre() -> None:
    image = torch.arange(3 * 4 * 10).view(3, 4, 10).to(torch.uint8)
    assert torch.equal(squared(image, 4), image[..., 3:7])
    assert torch.equal(squared(image.mT, 4), image[..., 3:7].mT)
    assert squared(image, 9).shape == (3, 9, 9)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Pictures of all kinds and sizes, two of which are broken."""
    folder = tmp_path / "pictures"
    (folder / "deeper").mkdir(parents=True)
    photograph = Image.fromarray(checker(60)).resize((50, 70), Image.Resampling.BICUBIC)
    photograph.save(folder / "a.jpg")
    photograph.convert("L").resize((31, 20)).save(folder / "b-grey.png")
    photograph.convert("RGBA").save(folder / "c-alpha.png")
    Image.fromarray(checker(40)[..., 0].astype(np.uint16) * 256).save(folder / "d-16bit.png")
    photograph.convert("P").save(folder / "deeper" / "e-palette.gif")
    (folder / "f-broken.jpg").write_bytes((folder / "a.jpg").read_bytes()[:200])
    (folder / "g-text.png").write_text("no picture")
    (folder / "notes.txt").write_text("not looked at")
    return folder


def config(out: Path, **settings: Any) -> PcaConfig:
    return PcaConfig(
        **({"model": "vit_tiny_patch16_224", "model_args": SMALL_VIT, "device": "cpu"} | settings), out=out
    )


def test_pictures_of_all_kinds(pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"f-broken\.jpg cannot be read"):
        config(out, images=(pictures,)).run()
    assert not out.exists()
    result = config(out, images=(pictures,), on_error="skip").run()
    assert result.images == ("a.jpg", "b-grey.png", "c-alpha.png", "d-16bit.png", "e-palette.gif")
    assert len(result.skipped) == 2
    told = str(result)
    assert "2 pictures were skipped" in told
    assert all(name in told for name in ("f-broken.jpg", "g-text.png", "pca.png", "pca.html", "block"))
    assert json.loads(json.dumps(result.to_dict()))["explained"]["vit_tiny_patch16_224"].keys() == {
        "block 0",
        "block 1",
    }
    with Image.open(result.png) as sheet:
        assert sheet.width == 2 * MARGIN + 3 * CELL + BETWEEN + GAP
    assert "f-broken.jpg" in result.html.read_text()


def test_the_sheet_shows_the_components_of_the_models_features(pictures: Path, tmp_path: Path) -> None:
    """Against scikit-learn on features of a model that is called directly."""
    wp.save(timm.create_model("vit_tiny_patch16_224", **SMALL_VIT), tmp_path / "model")
    model = wp.load(tmp_path / "model")
    result = config(
        tmp_path, model=str(tmp_path / "model"), model_args={}, images=(pictures / "a.jpg",), layers=(-1,)
    ).run()
    images = squared(read_picture(pictures / "a.jpg"), 32)[None] / 255
    patches = model.forward_features((images - 0.5) / 0.5)[0, 1:].detach()
    expected = PCA(3).fit_transform(patches.double().numpy())
    expected *= np.sign(expected[np.abs(expected).argmax(0), range(3)])
    low, high = expected.min(0), expected.max(0)
    sheet = np.asarray(Image.open(result.png).convert("RGB"))
    cell = sheet[MARGIN + 40 :, MARGIN + CELL + BETWEEN :][:CELL, :CELL]
    shown = cell[CELL // 8 :: CELL // 4, CELL // 8 :: CELL // 4].reshape(16, 3)
    assert np.abs(shown - 255 * (expected - low) / (high - low)).max() < 2


@needs_chromium
@pytest.mark.parametrize(("width", "upsampling"), [(390, "nearest"), (1200, "bicubic")])
def test_two_models_on_one_page(tmp_path: Path, width: int, upsampling: str) -> None:
    other = {"img_size": 64, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 2}
    settings = {"other": "vit_small_patch16_224", "other_args": other, "upsampling": upsampling, "foreground": True}
    result = config(tmp_path / "out", **settings, count=3).run()
    assert result.images == ("shapes 0", "shapes 1", "shapes 2")
    assert {name: list(own) for name, own in result.explained.items()} == {
        "A: vit_tiny_patch16_224": [0, 1],
        "B: vit_small_patch16_224": [0, 1, 2],
    }
    assert all(0 < fraction <= 1 for own in result.explained.values() for fraction in own.values())
    text = result.html.read_text()
    assert all(title in text for title in ("A block 1", "B block 2", "Black is background"))
    assert not re.search(r'(?:src|href)="(?!data:|#)', text)  # nothing is loaded from elsewhere
    check_in_a_browser(text, width, 3 * 6, tmp_path)


def test_the_same_model_twice_has_the_same_pictures(tmp_path: Path) -> None:
    settings = {"other": "vit_tiny_patch16_224", "other_args": SMALL_VIT, "count": 2, "layers": (-1,)}
    result = config(tmp_path, **settings).run()
    sheet = np.asarray(Image.open(result.png).convert("RGB"))
    one, other = (sheet[MARGIN + 40 :, MARGIN + i * (CELL + BETWEEN) :][:, :CELL].astype(int) for i in (1, 2))
    assert np.abs(one - other).max() <= 1
    assert one.std() > 20


def test_models_with_stages_and_of_transformers(tmp_path: Path) -> None:
    swin = {"img_size": 64, "patch_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4}
    small = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    hf = transformers.ViTConfig(**small, image_size=32, patch_size=8)
    transformers.ViTModel(hf).save_pretrained(tmp_path / "hf")
    settings = {"model_args": swin, "other": str(tmp_path / "hf"), "count": 2, "layers": (0, -1)}
    result = config(tmp_path, model="swin_tiny_patch4_window7_224", **settings).run()
    assert [list(own) for own in result.explained.values()] == [["block 0", "block 1"], ["block 0", "block 2"]]


def test_a_run_on_grey_images(tmp_path: Path) -> None:
    train(small_config(tmp_path / "run", epochs=1), quiet=True)
    result = config(tmp_path / "out", model=str(tmp_path / "run"), model_args={}, data="digits", count=4).run()
    assert len(result.images) == 4
    assert result.images[0] == "digits 0"


def test_no_weights_are_the_same_every_time(tmp_path: Path) -> None:
    results = [config(tmp_path / str(i), count=2, seed=seed).run() for i, seed in enumerate((0, 0, 1))]
    first, again, other = ((result.explained, result.png.read_bytes()) for result in results)
    assert first == again
    assert first[0] != other[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"images": (Path("nothing.jpg"),)}, "there is no such file or folder"),
        ({"images": (Path("a.jpg"),), "data": "digits"}, "expected one of them"),
        ({"count": 0}, "count=0: expected at least 1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"layers": (7,)}, r"layers=\(7,\): expected some of 0 to 1"),
        ({"image_size": 33}, "no multiple of the patch of 8 pixels"),
        ({"other_args": {"depth": 1}}, "expected them with --other"),
        ({"data": "nothing"}, "data='nothing'"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(WellposedError, match=message):
        config(tmp_path / "out", **settings).run()
    assert not (tmp_path / "out").exists()


def test_folders_and_files_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no picture in this folder"):
        config(tmp_path / "out", images=(tmp_path,)).run()
    (tmp_path / "file.png").write_text("no picture")
    with pytest.raises(DataError, match=r"none of the .* pictures chosen can be read: .*file\.png"):
        config(tmp_path / "out", images=(tmp_path,), on_error="skip").run()
    with pytest.raises(InvalidArgumentError, match="is a file; expected a folder"):
        config(tmp_path / "file.png").run()


def test_blocks_from_all_over_a_model() -> None:
    assert [spread_layers(depth, 4) for depth in (1, 3, 9, 24)] == [[0], [0, 1, 2], [2, 4, 6, 8], [5, 11, 17, 23]]


@pytest.mark.skipif(not PETS.is_dir(), reason="the Oxford-IIIT pets are not in WELLPOSED_DATA")
def test_real_pictures(tmp_path: Path) -> None:
    result = config(tmp_path, images=(PETS,), count=3, image_size=64, batch_size=2).run()
    assert len({name.rpartition("_")[0] for name in result.images}) == 3  # breeds, from all over the folder
