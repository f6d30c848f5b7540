"""What sine adapters have learned: the report, `diagnose` on an adapter, and the log of a training."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import wellposed as wp
from small_adapters import IDS, adapted, gpt2, llama
from wellposed.adapters import AdapterLog, AdapterReport, SineLoraConfig, adapter_numbers, adapter_report
from wellposed.adapters.subspace import dominant
from wellposed.errors import InvalidArgumentError
from wellposed.runs import read_journal

# PEFT 0.20 looks for the configuration of a base model that was not loaded from anywhere.
pytestmark = pytest.mark.filterwarnings("ignore:Could not find a config file in")


@pytest.mark.parametrize("use_dora", [False, True])
def test_report(use_dora: bool) -> None:
    model = adapted(llama(), target_modules=["q_proj", "down_proj"], use_dora=use_dora)
    report = adapter_report(model)
    assert [layer.name for layer in report.layers][:2] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.down_proj",
    ]
    for entry in report.layers:
        layer: Any = model.base_model.model.get_submodule(entry.name)
        a, b = layer.lora_A["default"].weight.detach().double(), layer.lora_B["default"].weight.detach().double()
        product = b @ a
        assert entry.argument_std == pytest.approx(float(entry.omega * product.std(correction=0)), rel=1e-6)
        assert 0.5 < entry.argument_std < 1.5, "about 1 where B is about 0.01"
        x = torch.eye(layer.in_features)
        update = (layer(x) - layer.base_layer(x)).detach().T
        values = torch.linalg.svdvals(update)
        torch.testing.assert_close(torch.tensor(entry.singular_values), values, rtol=1e-3, atol=1e-5)
        assert entry.stable_rank == pytest.approx(float(values.square().sum() / values[0] ** 2), rel=1e-3)
        spectrum = torch.linalg.svdvals(product)
        assert entry.product_stable_rank == pytest.approx(float(spectrum.square().sum() / spectrum[0] ** 2), rel=1e-4)
        assert entry.norm == pytest.approx(float(update.norm()), rel=1e-3)
        assert entry.relative_norm == pytest.approx(float(update.norm() / layer.base_layer.weight.norm()), rel=1e-3)
    assert json.loads(json.dumps(report.to_dict()))["layers"][0]["rank"] == 4
    assert "model.layers.1.mlp.down_proj" in str(report)
    numbers = adapter_numbers(model)
    assert len(numbers) == 2 * len(report.layers)
    for entry in report.layers:
        assert numbers[f"{entry.name}/argument_std"] == pytest.approx(entry.argument_std, rel=1e-5)
        assert numbers[f"{entry.name}/stable_rank"] == pytest.approx(entry.stable_rank, rel=1e-3)
    fresh = peft.get_peft_model(llama(), SineLoraConfig(r=4, target_modules=["q_proj"]))
    assert {(layer.argument_std, layer.stable_rank, layer.norm) for layer in adapter_report(fresh).layers} == {
        (0, 0, 0)
    }
    with pytest.raises(InvalidArgumentError, match="no sine adapter 'b'; it has default"):
        adapter_report(model, ["b"])
    with pytest.raises(InvalidArgumentError, match="no sine adapter; it has none"):
        adapter_report(llama())


def test_several_adapters_are_told_apart() -> None:
    model = adapted(llama(), target_modules=["q_proj"])
    model.add_adapter("other", SineLoraConfig(r=2, target_modules=["q_proj"]))
    names = {name.split("/")[0] for name in adapter_numbers(model)}
    assert names == {f"model.layers.{i}.self_attn.q_proj ({which})" for i in (0, 1) for which in ("default", "other")}
    assert {layer.adapter for layer in adapter_report(model, ["other"]).layers} == {"other"}
    assert set(adapter_numbers(model, ["other"])) == {
        f"model.layers.{i}.self_attn.q_proj/{what}" for i in (0, 1) for what in ("argument_std", "stable_rank")
    }


def test_diagnose_on_an_adapter(tmp_path: Path) -> None:
    model = adapted(llama(), target_modules=["q_proj", "down_proj"])
    report = wp.diagnose(model)
    assert isinstance(report, AdapterReport)
    assert report == adapter_report(model) == wp.diagnose(torch.compile(model, backend="eager"))
    assert json.loads(report.to_json()) == json.loads(json.dumps(report.to_dict()))
    report.plot(tmp_path / "adapter.png")
    assert (tmp_path / "adapter.png").read_bytes().startswith(b"\x89PNG")
    merged = adapted(llama(), target_modules=["q_proj", "down_proj"])
    merged.merge_adapter()
    for one, other in zip(wp.diagnose(merged).layers, report.layers, strict=True):
        assert one.stable_rank == pytest.approx(other.stable_rank, rel=1e-6), "W0 is not what was merged into it"
        assert one.relative_norm == pytest.approx(other.relative_norm, rel=1e-6)
    with pytest.raises(InvalidArgumentError, match="has no adapter to look at, and no inputs were given"):
        wp.diagnose(llama())
    with pytest.raises(InvalidArgumentError, match="no sine adapter; it has none"):
        wp.diagnose(peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"])))


@pytest.mark.parametrize(("make", "target"), [(llama, "q_proj"), (gpt2, "c_attn")])
def test_diagnose_of_an_adapted_model(make: Any, target: str) -> None:
    """Tokens are those of the adapted model; products of weights that are not yet one matrix are not made up."""
    model = adapted(make(), target_modules=[target], lora_alpha=400)
    report = wp.diagnose(model, {"input_ids": IDS})
    assert [block.weights for block in report.blocks] == [None, None]
    assert "its layers have adapters" in report.notes[0]
    merged = wp.diagnose(model.merge_and_unload(), {"input_ids": IDS})
    assert all(block.weights is not None for block in merged.blocks)
    base = wp.diagnose(make(), {"input_ids": IDS})
    for ours, expected, without in zip(report.blocks, merged.blocks, base.blocks, strict=True):
        cosine, plain = (each.tokens["attention"].cosine for each in (ours, without))
        assert cosine == pytest.approx(expected.tokens["attention"].cosine, abs=1e-4)
        assert abs(cosine - plain) > 1e-3


@pytest.mark.parametrize("use_dora", [False, True])
def test_numbers_of_sharded_adapters(use_dora: bool, process_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = adapted(llama(), target_modules=["q_proj"], use_dora=use_dora)
    expected = adapter_numbers(model)
    for block in model.base_model.model.model.layers:
        fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
    assert adapter_numbers(model) == pytest.approx(expected, rel=1e-5)
    assert len(adapter_report(model).layers) == 2


@pytest.mark.parametrize("shape", [(300, 200), (200, 300), (12, 40)])
@pytest.mark.parametrize("std", [0.1, 1.0, 4.0])
def test_dominant_singular_values(shape: tuple[int, int], std: float) -> None:
    product = torch.randn(shape[0], 4) @ torch.randn(4, shape[1])
    matrix = torch.sin(std / product.std() * product).double()
    state = torch.get_rng_state()
    u, values, vh = dominant(matrix, 6)
    assert torch.equal(torch.get_rng_state(), state)
    exact = torch.linalg.svdvals(matrix)
    torch.testing.assert_close(values, exact[:6], rtol=1e-2, atol=1e-9)
    assert float(values[0]) == pytest.approx(float(exact[0]), rel=1e-3)
    torch.testing.assert_close(u.T @ u, torch.eye(6, dtype=torch.float64))
    torch.testing.assert_close(vh @ vh.T, torch.eye(6, dtype=torch.float64))
    error = float((matrix - (u * values) @ vh).norm())
    assert error == pytest.approx(float(exact[6:].norm()), rel=1e-2, abs=1e-9)


def trainer(folder: Path, steps: int, *callbacks: Any) -> Any:
    torch.manual_seed(0)
    model = peft.get_peft_model(llama(), SineLoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.2))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        logging_steps=1,
        save_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    return transformers.Trainer(model, arguments, train_dataset=rows, callbacks=list(callbacks))


@pytest.mark.filterwarnings("ignore")
def test_training_is_logged_and_not_disturbed(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "plain", 4)
    plain.train()
    logged = trainer(tmp_path / "logged", 4, AdapterLog())
    logged.train()
    losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (plain, logged)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    folder = tmp_path / "logged" / "adapters"
    events = read_journal(folder, "adapters")
    assert [event["step"] for event in events] == [1, 2, 3, 4]
    name = "model.layers.0.self_attn.q_proj"
    stds = [event[f"{name}/argument_std"] for event in events]
    assert 0 < stds[0] < stds[-1]
    assert events[-1] == {"event": "adapters", "step": 4, **adapter_numbers(logged.model)}
    spectra = read_journal(folder, "spectra")
    assert [event["step"] for event in spectra] == [2, 4]
    assert spectra[-1][name] == pytest.approx(adapter_report(logged.model).layers[0].singular_values)
    assert any((folder / "tensorboard").iterdir())

    again = trainer(tmp_path / "logged", 6, AdapterLog())
    again.train(resume_from_checkpoint=str(tmp_path / "logged" / "checkpoint-2"))
    resumed = read_journal(folder, "adapters")
    assert [event["step"] for event in resumed] == [1, 2, 3, 4, 5, 6], "what came after the checkpoint is written anew"
    key = f"{name}/stable_rank"
    assert [event[key] for event in resumed[:4]] == pytest.approx([event[key] for event in events], rel=1e-4)
