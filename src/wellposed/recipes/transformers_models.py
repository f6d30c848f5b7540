"""HuggingFace models as data: the class and its configuration."""

from typing import Any

from torch import nn

from wellposed.errors import ModelFileError, UnsuitableModelError, WellposedError
from wellposed.families import FAMILIES

_KNOWN = {home for family in FAMILIES for home in family.homes if home.startswith("transformers.")}
# A configuration may name attention kernels or classes to be fetched from a hub and run.
_REFUSED = ("_implementation", "auto_map", "backbone", "quantization_config")


def is_transformers(model: nn.Module) -> bool:
    """Whether `model` is a PreTrainedModel."""
    return any(
        f"{c.__module__}.{c.__name__}" == "transformers.modeling_utils.PreTrainedModel" for c in type(model).__mro__
    )


def describe(model: Any) -> dict[str, Any]:
    """The class's name and the configuration, where it differs from the library's defaults."""
    cls = type(model)
    if cls.__module__ not in _KNOWN:
        raise UnsuitableModelError(
            f"{cls.__module__}.{cls.__qualname__} is not of a family that wellposed.load builds again "
            f"({', '.join(sorted(_KNOWN))}); save it with its own save_pretrained"
        )
    return {"library": "transformers", "class": cls.__name__, "config": model.config.to_diff_dict()}


def build(described: dict[str, Any]) -> nn.Module:
    """A fresh HuggingFace model without initialization; only classes the package has, and nothing is fetched."""
    name, values = described.get("class"), described.get("config")
    if not isinstance(name, str) or not isinstance(values, dict):
        raise ModelFileError(f"expected a class and its configuration, got {name!r} and {values!r}")
    _refuse(values)
    cls = _model_class(name)
    from transformers.initialization import no_init_weights

    values = {key: value for key, value in values.items() if key != "transformers_version"}
    try:
        with no_init_weights():
            return cls(cls.config_class.from_dict(values))
    except WellposedError:
        raise
    except Exception as error:  # whatever a configuration can make a constructor stumble over
        raise ModelFileError(f"transformers cannot make {name} from its configuration: {error}") from error


def _model_class(name: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ModelFileError("this is a transformers model: pip install 'wellposed[peft]'") from error
    cls = getattr(transformers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel) and cls.__module__ in _KNOWN):
        raise ModelFileError(
            f"the installed transformers {transformers.__version__} has no model class {name!r} of a known family"
        )
    return cls


def _refuse(values: Any) -> None:
    if isinstance(values, list):
        for item in values:
            _refuse(item)
    if not isinstance(values, dict):
        return
    for key, value in values.items():
        if any(word in key for word in _REFUSED) and value:
            raise ModelFileError(f"the file's configuration sets {key!r}, which can fetch and run code; it is not used")
        _refuse(value)
