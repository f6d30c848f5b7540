"""A language model and its tokenizer from disk; nothing in a file is executed, and nothing fetched unless asked."""

import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wellposed.errors import InvalidArgumentError, ModelFileError
from wellposed.training.finetuning.config import LanguageConfig

_TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "merges.txt", "spiece.model", "tekken.json"),
    *("sentencepiece.bpe.model", "tokenizer.tiktoken"),
)


@dataclass(frozen=True)
class Opened:
    """A model, its tokenizer, and how many tokens both take."""

    model: Any
    tokenizer: Any
    context: int
    padding: int
    new: list[str]
    """Names of the modules in the body of a classifier that its file has no weights for, such as what pools tokens."""


def open_language_model(config: LanguageConfig, classes: Sequence[str], dtype: torch.dtype) -> Opened:
    """The model that `config` names, with a new head for `classes`, or as it is if there are none."""
    try:
        import peft  # noqa: F401
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    except ImportError as error:
        raise InvalidArgumentError("fine-tuning needs transformers and PEFT: pip install 'wellposed[peft]'") from error
    tokenizer = open_tokenizer(config)
    kind = AutoModelForSequenceClassification if classes else AutoModelForCausalLM
    names = dict(enumerate(classes))
    options = {"id2label": names, "label2id": {label: number for number, label in names.items()}} if classes else {}
    model, told = _read(kind, Path(config.model), config, **options, dtype=dtype, output_loading_info=True)
    new = new_modules(model, told["missing_keys"], config.model, with_head=not classes)
    if Path(config.model).suffix == ".gguf":
        _forget_quantization(model)
    words = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > words:
        raise ModelFileError(
            f"the tokenizer has {len(tokenizer)} tokens and {config.model} embeds {words}: expected the model's own"
        )
    padding = next((one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None), 0)
    model.config.get_text_config().pad_token_id = model.config.pad_token_id = padding
    return Opened(model, tokenizer, _context(model, tokenizer), padding, new)


def unpack(config: LanguageConfig, folder: Path) -> None:
    """Write the model and the tokenizer in the .gguf file that `config` names into `folder`, as transformers does.

    It takes a minute to read such a file, and a second to read the folder.
    """
    opened = open_language_model(config, (), torch.float32)
    written = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(written, ignore_errors=True)
    opened.model.save_pretrained(str(written))
    opened.tokenizer.save_pretrained(str(written))
    written.replace(folder)


def new_modules(model: Any, missing: Collection[str], source: str, *, with_head: bool = False) -> list[str]:
    """The modules within the body of `model` that `source` has no weights for, and that may be new: poolers.

    Raises ModelFileError where others are missing. A head for classes is not of the body, unless `with_head`.
    """
    inside = sorted(key for key in missing if with_head or key.startswith(f"{model.base_model_prefix}."))
    if lacking := [key for key in inside if with_head or "pooler" not in key]:
        raise ModelFileError(f"{source} lacks {len(lacking)} weights of the model, such as {lacking[0]}")
    return list(dict.fromkeys(key.rpartition(".")[0] for key in inside))


def open_tokenizer(config: LanguageConfig) -> Any:
    """The tokenizer beside the model, inside its .gguf file, or in the folder that was named."""
    from transformers import AutoTokenizer

    path = config.tokenizer or Path(config.model)
    if path.is_dir() and not any((path / name).is_file() for name in _TOKENIZERS):
        raise ModelFileError(
            f"{path} has no tokenizer: expected {', '.join(_TOKENIZERS[:4])} or the like in it. Copy them from where "
            "the model comes from, or name a folder that has them with --tokenizer"
        )
    tokenizer = _read(AutoTokenizer, path, config)
    if not len(tokenizer):
        raise ModelFileError(f"the tokenizer in {path} has no tokens: its files are not whole")
    return tokenizer


def _read(kind: Any, path: Path, config: LanguageConfig, **options: Any) -> Any:
    """What transformers makes of a folder, a .gguf file or, where that is asked for, a name."""
    if not path.exists() and not config.download:
        raise ModelFileError(
            f"{path} does not exist: expected a folder with a model and its tokenizer, or a .gguf file; only with "
            "--download is a name looked up elsewhere"
        )
    if path.is_file() and path.suffix != ".gguf":
        raise ModelFileError(f"{path} is a file: expected a folder, or a .gguf file")
    source: Any = path if path.exists() else config.model
    if path.suffix == ".gguf":
        source, options = path.parent, {**options, "gguf_file": path.name, **_unpacked(options)}
    elif "dtype" in options:
        options["use_safetensors"] = True
    try:
        return kind.from_pretrained(source, local_files_only=not config.download, trust_remote_code=False, **options)
    except Exception as error:  # whatever a broken or foreign file makes the reader raise
        reason = " ".join(str(error).split())[:300]
        advice = "; .gguf files need pip install gguf" if path.suffix == ".gguf" and "gguf" in reason.lower() else ""
        what = "a tokenizer" if "dtype" not in options else "a model"
        raise ModelFileError(f"{path} cannot be read as {what}: {reason}{advice}") from error


def _unpacked(options: dict[str, Any]) -> dict[str, Any]:
    """For transformers that could leave the weights of a .gguf file packed, what has it make plain ones of them."""
    import transformers

    if "dtype" not in options or not hasattr(transformers, "GgufConfig"):
        return {}
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}


def _forget_quantization(model: Any) -> None:
    """Weights that were packed in their file are plain ones now, to be trained and saved like any others."""
    model.is_quantized, model.hf_quantizer = False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def _context(model: Any, tokenizer: Any) -> int:
    """Tokens that the model has positions for, and the tokenizer was made for."""
    text = model.config.get_text_config()
    limits = [getattr(text, name, None) for name in ("max_position_embeddings", "n_positions", "max_sequence_length")]
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx is not None:
            limits.append(module.num_embeddings - module.padding_idx - 1)  # RoBERTa's begin after the padding's
    known = [limit for limit in (*limits, tokenizer.model_max_length) if isinstance(limit, int) and 0 < limit < 10**9]
    return min(known, default=10**9)
