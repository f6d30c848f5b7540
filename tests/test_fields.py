"""The pieces of fields: layers, activations, files, scores, meshes, sliders."""

import math
import os
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch import Tensor, nn

import wellposed as wp
from wellposed.errors import DataError, InvalidArgumentError, ModelFileError
from wellposed.fields import CoordinateNetwork, field_linear
from wellposed.fields.activations import FourierFeatures
from wellposed.fields.files import FieldSpec, save_field
from wellposed.fields.layers import KINDS, parameter_count
from wellposed.fields.meshes import Shape, grid_axis, open_mesh
from wellposed.fields.occupancy import sampled_points
from wellposed.fields.quality import psnr, ssim
from wellposed.fields.shading import shaded_view
from wellposed.fields.surfaces import extract_mesh
from wellposed.lowrank import LowRankLinear, SineLinear
from wellposed.reporting.slider import slider_panel

trimesh = pytest.importorskip("trimesh")
REAL = Path(os.environ.get("WELLPOSED_DATA", Path(__file__).parents[2] / "shared" / "data"))


def test_layers_of_every_kind() -> None:
    kinds = [field_linear(16, 8, 2, kind) for kind in KINDS]
    assert [type(layer) for layer in kinds] == [nn.Linear, LowRankLinear, SineLinear]
    assert [parameter_count(layer) for layer in kinds] == [16 * 8 + 8, 2 * 24 + 8, 2 * 24 + 8]
    with pytest.raises(InvalidArgumentError, match="rank=None"):
        field_linear(16, 8, None, "sine")
    with pytest.raises(InvalidArgumentError, match="kind='sin'"):
        field_linear(16, 8, 2, "sin")  # type: ignore[arg-type]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_siren_layers_keep_the_spread_of_their_arguments(kind: str) -> None:
    network = CoordinateNetwork(2, 3, width=256, depth=3, kind=kind, rank=20, activation="siren")  # type: ignore[arg-type]
    hidden = [layer for layer in network.layers if isinstance(layer, nn.Linear | LowRankLinear)][1:-1]
    for layer in hidden:
        assert float(layer.weight.std()) == pytest.approx(math.sqrt(2 / 256) / 30, rel=0.1)
        layer.bias.zero_()  # SIREN leaves biases as they are
    arguments = [2 * torch.rand(4096, 2) - 1]
    for layer in network.layers[:-1]:
        arguments.append(layer(arguments[-1]))
    for before in arguments[3::2]:  # what the sines after the first take, times 30; arXiv 2006.09661: N(0, 1)
        assert 0.6 < float((30 * before).std()) < 1.4


def test_fourier_features_survive_float16() -> None:
    features = FourierFeatures(2, 64, scale=10.0)
    assert torch.equal(features.frequencies.half().float(), features.frequencies)
    x = torch.rand(5, 2)
    angles = 2 * math.pi * x.double() @ features.frequencies.double().T
    assert torch.allclose(features(x).double(), torch.cat([angles.sin(), angles.cos()], 1), atol=2e-5)


@pytest.mark.parametrize("activation", ["gauss", "siren", "relu-fourier"])
def test_places_are_never_rounded_to_bfloat16(activation: Any) -> None:
    network = CoordinateNetwork(2, 3, width=16, activation=activation)
    seen: list[Tensor] = []
    network.layers[0].register_forward_hook(lambda module, inputs, found: seen.append(found))
    x = 0.9 + 1e-4 * torch.arange(20.0).view(10, 2)
    network(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert network(x).dtype == torch.bfloat16
    assert seen[1].dtype == torch.float32
    assert torch.equal(*seen)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_scores_are_those_of_scikit_image(device: str) -> None:
    truth = 0.7 + 0.03 * torch.randn(3, 40, 29)  # little contrast: where TF32 would be seen
    found = (truth + 0.01 * torch.randn_like(truth)).clamp(0, 1)
    x, y = found.double().numpy(), truth.double().numpy()
    theirs = structural_similarity(
        x, y, channel_axis=0, data_range=1.0, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
    )
    found, truth = found.to(device), truth.to(device)
    assert 0.5 < theirs < 0.99
    assert float(ssim(found, truth)) == pytest.approx(theirs, abs=2e-5)
    assert float(psnr(found, truth)) == pytest.approx(peak_signal_noise_ratio(y, x, data_range=1.0), abs=1e-4)
    assert float(psnr(truth, truth)) == 100


@pytest.mark.parametrize("half", [False, True])
def test_a_file_gives_the_network_again(half: bool, tmp_path: Path) -> None:
    spec = FieldSpec("coordinates", {"in_features": 2, "out_features": 3, "width": 16, "kind": "sine", "rank": 2}, {})
    network = spec.build()
    save_field(network, tmp_path / "field.safetensors", spec, half=half)
    again, read = wp.fields.load(tmp_path)
    assert read == spec
    expected = {name: tensor.half().float() if half else tensor for name, tensor in network.state_dict().items()}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
    assert not again.training
    numbers = sum(tensor.numel() for tensor in expected.values())
    header = (tmp_path / "field.safetensors").stat().st_size - (2 if half else 4) * numbers
    assert 0 < header < 1500


def test_files_that_are_no_fields(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        wp.fields.load(tmp_path)
    (tmp_path / "field.safetensors").write_bytes(b"not a file of ours")
    with pytest.raises(ModelFileError, match="cannot be read as a field"):
        wp.fields.load(tmp_path)
    save_field(nn.Linear(2, 2), tmp_path / "field.safetensors", FieldSpec("elsewhere", {}, {}))
    with pytest.raises(ModelFileError, match="elsewhere"):
        wp.fields.load(tmp_path)


def shape_of(mesh: "trimesh.Trimesh") -> Shape:
    vertices, faces = torch.from_numpy(np.array(mesh.vertices)), torch.from_numpy(np.array(mesh.faces))
    return Shape(vertices.double(), faces.long(), (0.0, 0.0, 0.0), 1.0)


def solid_angles(triangles: Tensor, points: Tensor) -> Tensor:
    """The winding number of each point by Van Oosterom and Strackee's formula: the sum of solid angles over 4 pi."""
    a, b, c = (triangles[None] - points[:, None, None]).unbind(2)
    la, lb, lc = (corner.norm(dim=-1) for corner in (a, b, c))
    above = (a * torch.linalg.cross(b, c)).sum(-1)
    below = la * lb * lc + (a * b).sum(-1) * lc + (b * c).sum(-1) * la + (c * a).sum(-1) * lb
    return torch.atan2(above, below).sum(1) / (2 * math.pi)


@pytest.mark.parametrize("name", ["torus", "overlapping", "hollow"])
def test_inside_is_where_the_winding_number_is_not_zero(name: str) -> None:
    ball = trimesh.creation.icosphere(subdivisions=2, radius=0.6)
    if name == "torus":
        mesh = trimesh.creation.torus(0.6, 0.25, major_sections=24, minor_sections=12)
    elif name == "overlapping":
        mesh = trimesh.util.concatenate([ball, ball.copy().apply_translation([0.3, 0.1, 0.0])])
    else:
        inner = ball.copy().apply_scale(0.5)
        inner.invert()
        mesh = trimesh.util.concatenate([ball, inner])
    shape = shape_of(mesh)
    points = 2 * torch.rand(3000, 3, dtype=torch.float64) - 1
    winding = solid_angles(shape.triangles, points).round()
    inside = shape.contains(points)
    assert torch.equal(inside, winding != 0)
    assert 100 < int(inside.sum()) < 2900
    if name == "overlapping":
        assert int(winding.abs().max()) == 2


def test_a_mesh_whose_triangles_disagree_is_counted_by_parity() -> None:
    mesh = trimesh.creation.torus(0.6, 0.25, major_sections=24, minor_sections=12)
    shape = shape_of(mesh)
    faces = shape.faces.clone()
    faces[::3] = faces[::3].flip(1)
    points = 2 * torch.rand(3000, 3) - 1
    mixed = Shape(shape.vertices, faces, shape.centre, shape.scale)
    assert torch.equal(mixed.contains(points), shape.contains(points))
    rows = slice(0, 20)
    assert torch.equal(mixed.fill(20, rows), shape.fill(20, rows))


def test_lines_through_edges_and_corners_are_counted_once() -> None:
    box = shape_of(trimesh.creation.box(extents=[1.0, 1.0, 1.0]))  # its diagonals and sides lie on the lattice
    lattice = torch.linspace(-1, 1, 17, dtype=torch.float64)
    points = torch.cartesian_prod(lattice, lattice, torch.tensor([-0.9, -0.3, 0.0, 0.3, 0.9], dtype=torch.float64))
    inside = box.contains(points)
    strictly, outside = points.abs().amax(1) < 0.5, points.abs().amax(1) > 0.5
    assert inside[strictly].all()
    assert not inside[outside].any()


def test_a_filled_grid_is_the_labels_of_its_points() -> None:
    shape = shape_of(trimesh.creation.torus(0.6, 0.25, major_sections=24, minor_sections=12))
    axis = grid_axis(24, torch.device("cpu"), torch.float64)
    points = torch.cartesian_prod(axis[5:19], axis, axis)
    assert torch.equal(shape.fill(24, slice(5, 19)).flatten(), shape.contains(points))


def test_points_near_the_surface_are_near_it() -> None:
    shape = shape_of(trimesh.creation.icosphere(subdivisions=4, radius=0.7))
    points = sampled_points(shape, 20000, spread=0.02)
    everywhere, near = points[:10000], points[10000:]
    assert float(everywhere.mean(0).abs().max()) < 0.03
    assert float(everywhere.std()) == pytest.approx(1 / math.sqrt(3), rel=0.02)
    distances = near.norm(dim=1) - 0.7
    assert float(distances.std()) == pytest.approx(0.02, rel=0.05)
    assert float(near.mean(0).abs().max()) < 0.03  # all around


def test_marching_cubes_gives_a_closed_ball(tmp_path: Path) -> None:
    like = shape_of(trimesh.creation.icosphere(subdivisions=1))

    def ball(rows: slice) -> Tensor:
        axis = grid_axis(48, torch.device("cpu"))
        return 0.6 - torch.cartesian_prod(axis[rows], axis, axis).norm(dim=1).view(-1, 48, 48)

    found = extract_mesh(ball, 48, like)
    assert found is not None
    mesh = trimesh.Trimesh(found.vertices.numpy(), found.faces.numpy(), process=False)
    assert mesh.is_watertight
    assert mesh.volume == pytest.approx(4 / 3 * math.pi * 0.6**3, rel=0.02)  # and above 0: it faces outwards
    assert float((found.vertices.norm(dim=1) - 0.6).abs().max()) < 0.01
    assert extract_mesh(lambda rows: ball(rows) - 2, 48, like) is None
    everywhere = extract_mesh(lambda rows: ball(rows) + 2, 48, like)
    assert everywhere is not None
    assert trimesh.Trimesh(everywhere.vertices.numpy(), everywhere.faces.numpy()).is_watertight


def test_a_ball_is_drawn_as_a_lit_disc() -> None:
    picture = shaded_view(shape_of(trimesh.creation.icosphere(subdivisions=4, radius=0.7)), 0.0, 0.0, size=64).float()
    step = 2.3 / 64
    middles = step * (torch.arange(64) + 0.5) - 1.15
    radius = torch.cartesian_prod(middles, middles).norm(dim=1).view(64, 64)
    assert (picture[radius > 0.75] == 255).all()
    assert (picture[radius < 0.65] < 255).any(-1).all()
    left_above, right_below = picture[24, 24].sum(), picture[42, 42].sum()
    assert left_above > 1.3 * right_below
    assert (shaded_view(None, 0.0, 0.0, size=8) == 255).all()


def open_box(path: Path) -> Path:
    box = trimesh.creation.box(extents=[1.0, 2.0, 3.0])
    box.update_faces(box.face_normals[:, 2] < 0.9)  # without its lid
    box.export(path)
    return path


def test_holes_are_counted_and_closed(tmp_path: Path) -> None:
    path = open_box(tmp_path / "box.obj")
    with pytest.raises(DataError, match=r"not watertight: 4 of its edges.*--repair"):
        open_mesh(path)
    shape = open_mesh(path, repair=True)
    mesh = trimesh.Trimesh(shape.vertices.numpy() * shape.scale, shape.faces.numpy(), process=False)
    assert mesh.is_watertight
    assert mesh.is_winding_consistent
    assert mesh.volume == pytest.approx(6.0)
    assert shape.contains(torch.tensor([[0.0, 0.0, 0.8], [0.0, 0.0, 0.95]])).tolist() == [True, False]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("v 0 0 0\nv 1 0 0\nv 0 1 0\n", "no triangles"),
        ("v 0 0 0\nv 1 0 0\nv 0 1 0\nf 1 2 3\nf 1 3 2\n", "is flat"),
        ("v 0 0 0\nv 1 0 nan\nv 0 1 0\nf 1 2 3\n", "not finite"),
        ("f 1 2 99\nv 0 0 0\n", "mesh|triangles|cannot be read"),
    ],
)
def test_meshes_that_are_no_solids(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "bad.obj").write_text(text)
    with pytest.raises(DataError, match=complaint):
        open_mesh(tmp_path / "bad.obj", repair=True)


@pytest.mark.skipif(not (REAL / "meshes").is_dir(), reason="no meshes in WELLPOSED_DATA")
def test_real_meshes() -> None:
    with pytest.raises(DataError, match="223 of its edges"):
        open_mesh(REAL / "meshes" / "stanford-bunny.obj")
    shape = open_mesh(REAL / "meshes" / "rocker-arm.obj")
    points = sampled_points(shape, 200, spread=0.02)
    winding = solid_angles(shape.triangles, points)
    assert float((winding - winding.round()).abs().max()) < 1e-6
    assert torch.equal(shape.contains(points), winding.round() != 0)


def test_a_slider_holds_both_pictures(tmp_path: Path) -> None:
    for name, colour in (("left", "red"), ("right", "blue")):
        Image.new("RGB", (8, 6), colour).save(tmp_path / f"{name}.png")
    panel = slider_panel("k < 2", ("a & b", tmp_path / "left.png"), ("c", tmp_path / "right.png"))

    class Tags(HTMLParser):
        found: dict[str, list[dict[str, str | None]]] = {}  # noqa: RUF012

        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            self.found.setdefault(tag, []).append(dict(attributes))

    tags = Tags()
    tags.feed(panel)
    assert [image["alt"] for image in tags.found["img"]] == ["c", "a & b"]
    assert all((image["src"] or "").startswith("data:image/png;base64,") for image in tags.found["img"])
    assert tags.found["input"][0]["aria-label"] == "k < 2: a & b or c"
    assert "script" not in tags.found
