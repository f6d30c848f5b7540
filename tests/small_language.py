"""Small language models on disk with a tokenizer of bytes, and small files to fine-tune them on."""

import json
import struct
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<pad>", "<s>", "<|endoftext|>"]
WORDS = 3 + 256


def byte_tokenizer(**settings: Any) -> Any:
    """A token for each byte, and three of its own; none is put before or after a text."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokens = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "<|endoftext|>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **(tokens | settings))


def causal_folder(folder: Path, *, tokenizer: bool = True, positions: int = 256) -> Path:
    """A Llama of 60,000 weights as transformers saves it."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return folder


def encoder_folder(folder: Path, positions: int = 128) -> Path:
    """A BERT without a head for classes."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=positions,
        pad_token_id=0,
    )
    transformers.BertModel(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def first_letters(folder: Path, count: int = 64) -> Path:
    """Questions that a small model learns in seconds: which of two letters stands first."""
    letters = ["a", "b"]
    records = [
        {"prompt": f"{letters[n % 2]}{letters[(n // 2) % 2]}?", "completion": letters[n % 2], "choices": letters}
        for n in range(count)
    ]
    write_jsonl(folder / "train.jsonl", records)
    write_jsonl(folder / "test.jsonl", records[:8])
    return folder


def marked_sentences(folder: Path, count: int = 64) -> Path:
    """CoLA's columns: sentences that are right if they end in a full stop."""
    lines = [f"x01\t{n % 2}\t\tthe cat {n % 5}{'.' if n % 2 else '!'}" for n in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "dev.tsv").write_text("\n".join(lines[:17]) + "\n", encoding="utf-8")
    return folder


def gguf_file(path: Path, model: Any) -> Path:
    """A Llama and the tokenizer of bytes as llama.cpp stores them, in float32."""
    config, state = model.config, model.state_dict()
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {f"self_attn.{letter}_proj": f"attn_{letter}" for letter in "qkv"} | {"self_attn.o_proj": "attn_output"}
    names |= {f"mlp.{kind}_proj": f"ffn_{kind}" for kind in ("gate", "up", "down")}
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for theirs, short in names.items():
            weight = state[f"model.layers.{layer}.{theirs}.weight"]
            if short in heads:  # llama.cpp turns neighbouring pairs, transformers the two halves
                weight = weight.view(heads[short], 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
            tensors[f"blk.{layer}.{short}.weight"] = weight
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    facts: dict[str, Any] = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "llama.vocab_size": WORDS,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * 256,
        "tokenizer.ggml.merges": [],
        **{f"tokenizer.ggml.{name}_token_id": n for n, name in enumerate(["padding", "bos", "eos"])},
    }
    head, data = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(facts)), b""
    for name, value in facts.items():
        head += _text(name) + _typed(value)
    for name, tensor in tensors.items():
        sizes = tensor.shape[::-1]
        head += _text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, 0, len(data))
        data += tensor.contiguous().numpy().tobytes()
        data += bytes(-len(data) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _typed(value: Any) -> bytes:
    """A value of GGUF's with its type: 4 unsigned, 5 signed, 6 float, 8 text, 9 a list."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        kind = 5 if value and isinstance(value[0], int) else 8
        items = b"".join(_text(item) if kind == 8 else struct.pack("<i", item) for item in value)
        return struct.pack("<IIQ", 9, kind, len(value)) + items
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)
