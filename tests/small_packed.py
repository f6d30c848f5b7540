"""Adapters of every kind that can be packed, as PEFT saves them."""

from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn

from small_adapters import llama
from wellposed.adapters import SineLoraConfig

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"of": peft.LoraConfig},
    "rslora": {"of": peft.LoraConfig, "use_rslora": True},
    "dora": {"of": peft.LoraConfig, "use_dora": True},
    "sine": {"of": SineLoraConfig},
    "sine dora": {"of": SineLoraConfig, "use_dora": True},
}


def trained(kind: str = "sine", seed: int = 0, base: nn.Module | None = None, **settings: Any) -> Any:
    """A small Llama with an adapter as training leaves it."""
    given = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    chosen = given | KINDS[kind] | settings
    model = peft.get_peft_model(llama() if base is None else base, chosen.pop("of")(**chosen))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name or ".lora_embedding_A." in name:
            nn.init.normal_(parameter, std=0.01, generator=generator)
        elif "lora_magnitude" in name:
            parameter.data.mul_(1 + 0.1 * torch.rand(parameter.shape, generator=generator))
    return model.eval()


def saved(folder: Path, kind: str = "sine", seed: int = 0, **settings: Any) -> Path:
    trained(kind, seed, **settings).save_pretrained(folder)
    return folder
