"""The card that goes with fine-tuned weights: what they are, how they were made, and how good they are."""

import json
from dataclasses import dataclass
from typing import Any

from wellposed.training.finetuning.config import FinetuneConfig

_SHOWN = (
    *("method", "r", "lora_alpha", "lora_dropout", "target_modules", "omega", "gain", "epochs", "batch_size", "lr"),
    *("weight_decay", "betas", "warmup_epochs", "clip", "precision", "seed"),
)
_ADAPTER_ONLY = {"r", "lora_alpha", "lora_dropout", "target_modules"}


@dataclass(frozen=True)
class Card:
    """What a card says of one kind of data and model."""

    data: str
    """The name of the set."""
    told: str
    """What it was trained on, in sentences."""
    pipeline: str
    library: str
    """The one that reads a whole model."""
    imports: str
    """Lines of Python that come before those that make the model."""
    base: str
    """The model that an adapter is put on, as Python."""
    whole: str
    """The model in the folder, where all weights were trained, as Python."""
    own_settings: tuple[str, ...] = ()
    """Further settings to show."""


def model_card(config: FinetuneConfig, card: Card, scores: dict[str, float], facts: dict[str, Any]) -> str:
    """The card, in Markdown with the header that model folders have."""
    is_full, is_sine = config.method == "full", config.method.startswith("sine")
    hidden = (_ADAPTER_ONLY if is_full else set()) | (set() if is_sine else {"omega", "gain"})
    values = config.to_dict()
    settings = {name: values[name] for name in (*_SHOWN, *card.own_settings) if name not in hidden}
    if "target_modules" in settings:
        settings["target_modules"] = ", ".join(config.target_modules) or "all linear layers but the head"
    return "\n".join(
        [
            "---",
            f"base_model: {json.dumps(config.model)}",
            f"library_name: {card.library if is_full else 'peft'}",
            f"pipeline_tag: {card.pipeline}",
            "tags: [wellposed]",
            "---",
            "",
            f"# {config.model}, fine-tuned on {card.data} ({config.method})",
            "",
            card.told,
            "",
            "## Scores",
            "",
            *(_table("score", scores) if scores else ["Nothing was tested."]),
            "",
            "## Settings",
            "",
            *_table("setting", settings),
            "",
            "## Made by",
            "",
            *_table("fact", facts),
            "",
            "## Use",
            "",
            "```python",
            *_use(config, card),
            "```",
            "",
        ]
    )


def _table(heading: str, values: dict[str, Any]) -> list[str]:
    rows = [f"| {name} | {f'{value:.4f}' if heading == 'score' else value} |" for name, value in values.items()]
    return [f"| {heading} | value |", "|---|---|", *rows]


def _use(config: FinetuneConfig, card: Card) -> list[str]:
    if config.method == "full":
        return [card.imports, f"model = {card.whole}"]
    return [
        *(["import wellposed.adapters  # makes PEFT know sine adapters"] if config.method.startswith("sine") else []),
        "from peft import PeftModel",
        card.imports,
        f"base = {card.base}",
        'model = PeftModel.from_pretrained(base, "path/to/this/folder")',
    ]
