"""Cutting and restoring skips, family by family, against a skipless forward written by hand."""

import copy
import io
import pickle
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.errors import InvalidArgumentError, UnsuitableModelError
from wellposed.families import Sites, blocks, library_class
from wellposed.families.surgery import _sited_class
from zoo import ZOO, Specimen, block_calls, classes, gpt2, images, library_classes, vit

every_family = pytest.mark.parametrize("specimen", ZOO.values(), ids=ZOO.keys())


@every_family
def test_cut_block_is_the_hand_written_one(specimen: Specimen) -> None:
    model = wp.cut_skips(specimen.make().eval())
    for block, arguments, options, output in block_calls(specimen, model):
        torch.testing.assert_close(output, specimen.skipless(block, *arguments, **options), rtol=0, atol=0)


@every_family
def test_sited_forward_with_default_sites_is_the_librarys(specimen: Specimen) -> None:
    """The forwards in `families` are copies of the libraries'; where a library changes its own, this notices."""
    model = specimen.make().train()
    torch.manual_seed(3)
    expected = specimen.output(model)
    for block in blocks(model):
        for path, forward in block.family.skips.values():
            module = block.module.get_submodule(path)
            module.__class__ = _sited_class(forward, library_class(module), Sites(cut=frozenset({"nothing"})))
    torch.manual_seed(3)  # dropout and drop-path draw the same numbers
    torch.testing.assert_close(specimen.output(model), expected, rtol=0, atol=0)


@every_family
def test_restore_gives_back_the_librarys_model(specimen: Specimen) -> None:
    model = specimen.make().eval()
    before, types, keys = specimen.output(model), classes(model), list(model.state_dict())
    parameters = list(model.parameters())
    assert wp.cut_skips(model) is model
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert not torch.allclose(specimen.output(model), before)
    assert [t.__name__ for t in classes(model)] == [t.__name__ for t in types]
    assert library_classes(model) == types
    assert wp.restore_skips(model) is model
    assert classes(model) == types
    torch.testing.assert_close(specimen.output(model), before, rtol=0, atol=0)


@every_family
@pytest.mark.parametrize("kind", ["attention", "mlp"])
def test_each_kind_alone(specimen: Specimen, kind: str) -> None:
    model = specimen.make()
    if kind not in specimen.skips:
        with pytest.raises(InvalidArgumentError, match="attention"):
            wp.cut_skips(model, attention=False)
        return
    wp.cut_skips(model, attention=kind == "attention", mlp=kind == "mlp")
    for listed in wp.skips(model):
        assert listed.family == specimen.family
        for k in ("attention", "mlp"):
            assert getattr(listed, k) is (None if k not in specimen.skips else k != kind)
    other = {"attention": "mlp", "mlp": "attention"}[kind]
    if other in specimen.skips:
        both = specimen.output(wp.cut_skips(model).eval())
        fresh = specimen.make()
        fresh.load_state_dict(model.state_dict())
        torch.testing.assert_close(both, specimen.output(wp.cut_skips(fresh).eval()), rtol=0, atol=0)


def test_one_skip_cut_matches_the_formula() -> None:
    model, x = vit().eval(), torch.randn(2, 17, 32)
    block: Any = model.blocks[0]
    wp.cut_skips(model, mlp=False)
    attended = block.attn(block.norm1(x))
    torch.testing.assert_close(block(x), attended + block.mlp(block.norm2(attended)))
    wp.restore_skips(model)
    wp.cut_skips(model, attention=False)
    attended = x + block.attn(block.norm1(x))
    torch.testing.assert_close(block(x), block.mlp(block.norm2(attended)))


def test_cutting_twice_changes_nothing_more() -> None:
    model = wp.cut_skips(vit().eval())
    once, types = model(**images()), classes(model)
    wp.cut_skips(model)
    assert classes(model) == types
    torch.testing.assert_close(model(**images()), once, rtol=0, atol=0)
    wp.restore_skips(wp.restore_skips(model))
    assert all(skip.attention and skip.mlp for skip in wp.skips(model))


def test_asking_for_nothing_changes_nothing() -> None:
    model = vit()
    assert wp.recipe(wp.cut_skips(model, attention=False, mlp=False)) == []


def test_names_choose_blocks() -> None:
    model = wp.cut_skips(vit(), attention=["blocks.1"], mlp=False)
    assert [skip.attention for skip in wp.skips(model)] == [True, False]
    wp.cut_skips(model.blocks[0])
    assert [str(skip) for skip in wp.skips(model)] == [
        "blocks.0: attention cut, mlp cut (timm VisionTransformer)",
        "blocks.1: attention cut, mlp skip (timm VisionTransformer)",
    ]


def test_drop_path_of_a_cut_branch_is_off() -> None:
    model = wp.cut_skips(vit(drop_path_rate=0.9)).train()
    outputs = [model(**images()) for _ in range(4)]
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    wp.restore_skips(model)
    outputs = [model(**images()) for _ in range(4)]
    assert not all(torch.equal(outputs[0], other) for other in outputs[1:])
    wp.cut_skips(model, mlp=False)
    branch: Any = model.blocks[1]
    assert branch.drop_path2.training
    outputs = [model(**images()) for _ in range(4)]
    assert not all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_layer_scale_stays_in_the_cut_branch() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, init_values=0.5).eval()
    block, x = wp.cut_skips(model).blocks[0], torch.randn(1, 5, 192)
    attended = 0.5 * block.attn(block.norm1(x))
    torch.testing.assert_close(block(x), 0.5 * block.mlp(block.norm2(attended)))


# --- under torch's own machinery


@every_family
def test_deepcopy_and_pickle(specimen: Specimen) -> None:
    model = wp.cut_skips(specimen.make().eval())
    expected = specimen.output(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ]
    for other in copies:
        assert classes(other) == classes(model)
        torch.testing.assert_close(specimen.output(other), expected, rtol=0, atol=0)
        wp.restore_skips(other)
    assert wp.recipe(model), "restoring a copy left the original as it was"


@every_family
def test_compile(specimen: Specimen) -> None:
    model = specimen.make().eval()
    compiled = torch.compile(model, backend="aot_eager")
    with_skips = specimen.output(compiled)
    wp.cut_skips(compiled)
    expected = specimen.output(model)
    torch.testing.assert_close(specimen.output(compiled), expected)
    assert not torch.allclose(with_skips, expected), "the cut reaches a model that was compiled before"
    assert {skip.name for skip in wp.skips(compiled)} == {skip.name for skip in wp.skips(model)}


def test_compile_with_inductor() -> None:
    model = wp.cut_skips(vit())
    expected = model(**images())
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(**images()), expected, rtol=1e-4, atol=1e-5)


@every_family
def test_export(specimen: Specimen) -> None:
    model = wp.cut_skips(specimen.make().eval())
    if hasattr(model, "config"):
        model.config.use_cache = False
    inputs = specimen.inputs()
    program = torch.export.export(model, (), inputs, strict=False)
    torch.testing.assert_close(specimen.output(program.module(), inputs), specimen.output(model, inputs))


@every_family
def test_activation_checkpointing(specimen: Specimen) -> None:
    model = wp.cut_skips(specimen.make()).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()  # its running mean would be updated twice by recomputation
    plain = _gradients(specimen, model)
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()
    else:
        model.gradient_checkpointing_enable()
    for name, gradient in _gradients(specimen, model).items():
        torch.testing.assert_close(gradient, plain[name])


@every_family
def test_ddp_finds_no_unused_parameter(specimen: Specimen, process_group: None) -> None:
    model = wp.cut_skips(specimen.make()).train()
    parallel = nn.parallel.DistributedDataParallel(model)
    assert [skip.name for skip in wp.skips(parallel)] == [skip.name for skip in wp.skips(model)]
    assert wp.recipe(parallel) == wp.recipe(model)
    for _ in range(2):  # a parameter that got no gradient raises at the second forward
        parallel.zero_grad()
        specimen.output(parallel).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_fully_shard_after_the_cut(process_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    reference = wp.cut_skips(vit())
    expected = reference(**images())
    model = copy.deepcopy(reference)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.testing.assert_close(model(**images()), expected)
    with pytest.raises(UnsuitableModelError, match="before sharding"):
        wp.restore_skips(model)
    assert not any(skip.attention for skip in wp.skips(model))


@every_family
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(specimen: Specimen, dtype: torch.dtype) -> None:
    model = specimen.make().eval()
    if specimen.linears is not None:
        wp.condition_(model)  # with the default initialization the cut model's output would be as good as constant
    with_skips = specimen.output(model)
    expected = specimen.output(wp.cut_skips(model))
    with torch.autocast("cpu", dtype=dtype):
        output = specimen.output(model)
    assert (output.float() - expected).norm() < 0.1 * (with_skips - expected).norm()
    output.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_hooks_and_generation_still_work() -> None:
    model: Any = wp.cut_skips(gpt2().eval())
    seen = []
    model.transformer.h[0].register_forward_hook(lambda *_: seen.append(1))
    ids = torch.tensor([[3, 4, 5]])
    cached = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    plain = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, use_cache=False)
    assert torch.equal(cached, plain)
    assert seen
    hidden = model(ids, output_hidden_states=True).hidden_states
    assert len(hidden) == 3


def test_timm_features_of_a_cut_model() -> None:
    model: Any = wp.cut_skips(vit().eval())
    final, intermediates = model.forward_intermediates(images()["x"], indices=[0, 1])
    assert len(intermediates) == 2
    assert final.shape == (2, 17, 32)


def _gradients(specimen: Specimen, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(5)
    specimen.output(model).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
