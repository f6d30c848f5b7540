"""The recipe a model carries, and what happens when weights and model do not share it."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import wellposed as wp
from wellposed.errors import ModelFileError, RecipeMismatchError
from wellposed.recipes import replay
from zoo import ZOO, Specimen, classes, vit

CUT = {"change": "cut_skips", "attention": True, "mlp": True}
every_family = pytest.mark.parametrize("specimen", ZOO.values(), ids=ZOO.keys())


def test_recipe_tells_what_was_done() -> None:
    model = vit()
    assert wp.recipe(model) == []
    wp.cut_skips(model)
    assert wp.recipe(model) == [CUT]
    wp.condition_(model, beta=0.7)
    conditioned = {"change": "condition_", "alpha": 2.0, "beta": 0.7, "c": 3.0, "scale_mlp": True}
    assert wp.recipe(model) == [CUT, conditioned]
    assert json.loads(json.dumps(wp.recipe(model))) == wp.recipe(model)
    assert wp.recipe(copy.deepcopy(model)) == wp.recipe(model)
    assert wp.recipe(torch.compile(model)) == wp.recipe(model)
    wp.restore_skips(model)
    assert wp.recipe(model) == [conditioned]


def test_recipe_follows_the_model_not_the_calls() -> None:
    model = wp.cut_skips(vit(), mlp=False)
    wp.restore_skips(model.blocks[0])
    wp.condition_(model.blocks[1])
    assert wp.recipe(model) == [
        {"change": "cut_skips", "attention": ["blocks.1"], "mlp": False},
        {"change": "condition_", "alpha": 2.0, "beta": 0.6, "c": 3.0, "scale_mlp": True, "at": "blocks.1"},
    ]
    wp.condition_(model)
    assert [entry.get("at") for entry in wp.recipe(model)] == [None, None]
    assert wp.recipe(nn.Linear(2, 2)) == []


def test_initialization_is_noted_on_the_model_inside_its_wrapper(tmp_path: Path) -> None:
    model = vit()
    wp.condition_(nn.DataParallel(torch.compile(model)), beta=0.9)
    assert wp.recipe(model) == [{"change": "condition_", "alpha": 2.0, "beta": 0.9, "c": 3.0, "scale_mlp": True}]
    assert wp.recipe(wp.load(wp.save(torch.compile(model), tmp_path))) == wp.recipe(model)


def test_loaded_weights_bring_their_own_provenance(tmp_path: Path) -> None:
    wp.save(wp.condition_(vit(), beta=np.float32(0.5)), tmp_path / "a")
    other = wp.condition_(vit(), beta=5)
    wp.load(tmp_path / "a", other)
    assert [entry["beta"] for entry in wp.recipe(other)] == [0.5]
    wp.save(vit(), tmp_path / "b")
    wp.load(tmp_path / "b", other)
    assert wp.recipe(other) == []


@every_family
def test_replay_makes_the_same_model(specimen: Specimen) -> None:
    model = wp.cut_skips(specimen.make(), mlp=False)
    fresh = specimen.make()
    replay(fresh, wp.recipe(model))
    assert classes(fresh) == classes(model)
    assert wp.recipe(fresh) == wp.recipe(model)


@pytest.mark.parametrize(
    "entry",
    [
        {"change": "os.system", "command": "true"},
        {"change": "cut_skips", "surprise": 1},
        {"change": "cut_skips", "attention": ["blocks.99"]},
        {"change": "cut_skips", "attention": 7},
        {"change": "condition_", "at": "nowhere", "alpha": 1},
        {"change": ["cut_skips"]},
        {},
        "cut_skips",
    ],
    ids=str,
)
def test_entries_that_do_not_fit_are_refused(entry: Any) -> None:
    model = vit()
    with pytest.raises(ModelFileError, match="recipe entry"):
        replay(model, [entry])
    assert wp.recipe(model) == []


def test_weights_do_not_load_into_a_model_of_another_recipe(tmp_path: Path) -> None:
    skipless = wp.condition_(wp.cut_skips(vit()))
    wp.save(skipless, tmp_path)
    ordinary = vit()
    before = copy.deepcopy(ordinary.state_dict())
    with pytest.raises(RecipeMismatchError) as caught:
        wp.load(tmp_path, ordinary)
    assert "'cut_skips'" in str(caught.value), "the weights' recipe is shown"
    assert "no change" in str(caught.value), "and the model's"
    assert all(torch.equal(tensor, before[name]) for name, tensor in ordinary.state_dict().items())
    half = wp.cut_skips(vit(), mlp=False)
    with pytest.raises(RecipeMismatchError, match="'mlp': False"):
        wp.load(tmp_path, half)
    wp.load(tmp_path, wp.cut_skips(half))  # how it was initialized does not matter, how it computes does
    assert all(torch.equal(a, b) for a, b in zip(half.parameters(), skipless.parameters(), strict=True))
