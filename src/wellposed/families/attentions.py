"""The attention layers whose softmax can be replaced, and where they stand in a model.

timm and transformers are not imported here: a module that reaches this code was made by them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from wellposed.errors import UnknownFamilyError
from wellposed.families.family import class_path
from wellposed.families.finding import readable_name, unwrapped
from wellposed.families.huggingface import MODELS
from wellposed.families.sited_attention import TimmAttention, TimmClassAttn, TimmWindowAttention, TimmXCA
from wellposed.families.surgery import SitedModule, library_class


def _interfaced(name: str) -> Callable[[], type[SitedModule]]:
    def load() -> type[SitedModule]:
        from wellposed.families import interface

        forward: type[SitedModule] = getattr(interface, name)
        return forward

    return load


@dataclass(frozen=True)
class AttentionSite:
    """The attention layer of one or more architectures in one library."""

    models: str
    path: str
    """Path of the class whose forward makes a module such a layer."""
    homes: tuple[str, ...]
    """The modules whose classes may stand around it; elsewhere other attention may stand beside it."""
    forward: Callable[[], type[SitedModule]]
    """Its forward with the site; transformers' is imported with it."""
    heads: Callable[[Any], int] = lambda layer: layer.num_heads
    """The number of its query heads."""
    dropout: Callable[[Any], float] = lambda layer: layer.attn_drop.p
    """The share of its weights that it drops in training."""


def _timm(models: str, forward: type[SitedModule], *homes: str) -> AttentionSite:
    homes = tuple(f"timm.models.{home}" for home in (*homes, "_features"))
    return AttentionSite(models, forward.wp_forward_of, homes, lambda: forward)


def _transformers(models: str, home: str, name: str, **how: Any) -> AttentionSite:
    home = f"{MODELS}.{home}"
    return AttentionSite(models, f"{home}.{name}", (home,), _interfaced(name), **how)


ATTENTIONS = (
    _timm("timm VisionTransformer", TimmAttention, "vision_transformer", "deit", "pit", "naflexvit"),
    _timm("timm Swin", TimmWindowAttention, "swin_transformer"),
    _timm("timm XCiT", TimmXCA, "xcit"),
    _timm("timm XCiT", TimmClassAttn, "xcit"),
    _transformers(
        "HuggingFace ViT",
        "vit.modeling_vit",
        "ViTAttention",
        heads=lambda layer: layer.num_attention_heads,
        dropout=lambda layer: layer.attention_dropout,
    ),
    _transformers(
        "HuggingFace BERT",
        "bert.modeling_bert",
        "BertSelfAttention",
        heads=lambda layer: layer.num_attention_heads,
        dropout=lambda layer: layer.dropout.p,
    ),
    _transformers(
        "HuggingFace GPT-2", "gpt2.modeling_gpt2", "GPT2Attention", dropout=lambda layer: layer.attn_dropout.p
    ),
    _transformers(
        "HuggingFace Llama",
        "llama.modeling_llama",
        "LlamaAttention",
        heads=lambda layer: layer.config.num_attention_heads,
        dropout=lambda layer: layer.attention_dropout,
    ),
)

_BY_PATH = {each.path: each for each in ATTENTIONS}
_LIBRARIES = ("timm.models.", "transformers.models.")


def attentions(model: nn.Module) -> list[tuple[str, nn.Module, AttentionSite]]:
    """Every attention layer of `model`, by name, in the order of its definition.

    Raises UnknownFamilyError where it has none that is known, or others beside them: changed in part, a model would be
    neither one thing nor the other.
    """
    model = unwrapped(model)
    modules = {readable_name(name): module for name, module in model.named_modules()}
    found = [(name, module, _BY_PATH[class_path(module)]) for name, module in modules.items() if _is_known(module)]
    if not found:
        raise UnknownFamilyError(f"{_name_of(model)} has no known attention layer. {_known()}")
    for name, module in modules.items():
        if getattr(module, "is_cross_attention", False):
            raise UnknownFamilyError(f"{name} is cross-attention, which is not supported. {_known()}")
    for name, _, site in found:
        for around in _around(name):
            home = library_class(modules[around]).__module__
            if home.startswith(_LIBRARIES) and home not in site.homes:
                raise UnknownFamilyError(
                    f"the attention layer {name} is part of a {_name_of(modules[around])}, which is another model. "
                    f"{_known()}"
                )
        _check_siblings(name, modules)
    return found


def _check_siblings(name: str, modules: dict[str, nn.Module]) -> None:
    """Raise where another block of the stack that this layer's block is one of has something else in its place."""
    stack = next((each for each in _around(name) if isinstance(modules[each], nn.ModuleList | nn.Sequential)), None)
    if stack is None:
        return
    before = f"{stack}." if stack else ""
    _, _, inside = name.removeprefix(before).partition(".")
    for child in modules[stack]._modules:
        other = modules.get(f"{before}{child}.{inside}")
        if other is None or not _is_known(other):
            what = "none" if other is None else f"a {_name_of(other)}"
            raise UnknownFamilyError(
                f"{name} is a known attention layer, but {before}{child} has {what} in its place. {_known()}"
            )


def _around(name: str) -> Iterable[str]:
    """The names of the modules around the module `name`, the nearest first."""
    parts = name.split(".") if name else []
    return (".".join(parts[:depth]) for depth in reversed(range(len(parts))))


def _is_known(module: nn.Module) -> bool:
    return class_path(module) in _BY_PATH


def _name_of(module: nn.Module) -> str:
    cls = library_class(module)
    return f"{cls.__module__}.{cls.__qualname__}"


def _known() -> str:
    return "Known is that of " + ", ".join(dict.fromkeys(each.models for each in ATTENTIONS)) + "."
