"""Small language models, and sine adapters on them as training leaves them."""

from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn

from wellposed.adapters import SineLoraConfig

IDS = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(1))


def llama(layers: int = 2, width: int = 32, **settings: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=60,
            hidden_size=width,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
            **settings,
        )
    ).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    config.bos_token_id = config.eos_token_id = 0
    return transformers.GPT2LMHeadModel(config).eval()


def adapted(base: nn.Module, **settings: Any) -> Any:
    """With an adapter as training leaves it, B about 0.01."""
    model = peft.get_peft_model(base, SineLoraConfig(**({"r": 4, "lora_alpha": 8} | settings)))
    for name, parameter in model.named_parameters():
        if ".lora_B." in name or ".lora_embedding_A." in name:
            nn.init.normal_(parameter, std=0.01, generator=torch.Generator(parameter.device).manual_seed(3))
    return model.eval()


def logits(model: Any) -> Tensor:
    return model(input_ids=IDS).logits.detach()
