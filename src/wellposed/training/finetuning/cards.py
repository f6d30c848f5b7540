"""The card that goes with fine-tuned weights: what they are, how they were made, and how good they are."""

import json
from typing import Any

from wellposed.data.language import LanguageData
from wellposed.training.finetuning.config import LanguageConfig

_SHOWN = (
    *("method", "r", "lora_alpha", "lora_dropout", "target_modules", "omega", "gain", "epochs", "batch_size", "lr"),
    *("weight_decay", "betas", "warmup_epochs", "clip", "precision", "max_length", "pack", "seed"),
)
_ADAPTER_ONLY = {"r", "lora_alpha", "lora_dropout", "target_modules"}


def model_card(config: LanguageConfig, data: LanguageData, scores: dict[str, float], facts: dict[str, Any]) -> str:
    """The card, in Markdown with the header that model folders have."""
    is_full, is_sine = config.method == "full", config.method.startswith("sine")
    hidden = (_ADAPTER_ONLY if is_full else set()) | (set() if is_sine else {"omega", "gain"})
    settings = {name: value for name, value in config.to_dict().items() if name in _SHOWN and name not in hidden}
    if "target_modules" in settings:
        settings["target_modules"] = ", ".join(config.target_modules) or "all linear layers but the head"
    counts = f"{facts['sequences_cut']} of {facts['sequences_read']}"
    told = f"{counts} sequences were longer than {facts['max_length']} tokens and were cut."
    labels = f" with the labels {', '.join(data.classes)}" if data.classes else ""
    return "\n".join(
        [
            "---",
            f"base_model: {json.dumps(config.model)}",
            f"library_name: {'transformers' if is_full else 'peft'}",
            f"pipeline_tag: {'text-classification' if data.classes else 'text-generation'}",
            "tags: [wellposed]",
            "---",
            "",
            f"# {config.model}, fine-tuned on {data.name} ({config.method})",
            "",
            f"Trained on {len(data)} examples{labels}. {told}",
            "",
            "## Scores",
            "",
            *(_table("score", scores) if scores else ["Nothing was tested."]),
            "",
            "## Settings",
            "",
            *_table("setting", {name: settings[name] for name in _SHOWN if name in settings}),
            "",
            "## Made by",
            "",
            *_table("fact", facts),
            "",
            "## Use",
            "",
            "```python",
            *_use(config, data),
            "```",
            "",
        ]
    )


def _table(heading: str, values: dict[str, Any]) -> list[str]:
    rows = [f"| {name} | {f'{value:.4f}' if heading == 'score' else value} |" for name, value in values.items()]
    return [f"| {heading} | value |", "|---|---|", *rows]


def _use(config: LanguageConfig, data: LanguageData) -> list[str]:
    kind = "AutoModelForSequenceClassification" if data.classes else "AutoModelForCausalLM"
    if config.method == "full":
        return [f"from transformers import {kind}", f'model = {kind}.from_pretrained("path/to/this/folder")']
    labels = f", num_labels={len(data.classes)}" if data.classes else ""
    return [
        *(["import wellposed.adapters  # makes PEFT know sine adapters"] if config.method.startswith("sine") else []),
        "from peft import PeftModel",
        f"from transformers import {kind}",
        f'base = {kind}.from_pretrained("path/to/the/base/model"{labels})',
        'model = PeftModel.from_pretrained(base, "path/to/this/folder")',
    ]
