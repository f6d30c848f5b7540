"""What a language model answers when it is left to write."""

import re
from collections.abc import Sequence
from typing import Any

import torch

from wellposed.data.language.records import Completion
from wellposed.data.language.tokens import Encoder
from wellposed.runs import tracked


@torch.no_grad()
def written_answers(
    model: Any, encoder: Encoder, examples: Sequence[Completion], *, batch_size: int, new_tokens: int, padding: int
) -> list[str]:
    """What `model`, one of transformers' or PEFT's, writes after each prompt, always the likeliest token."""
    from transformers import GenerationConfig

    prompts = [encoder.prompt(example, new_tokens) for example in examples]
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    end = encoder.tokenizer.eos_token_id
    how = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=padding, eos_token_id=end)
    found = [""] * len(prompts)
    for start in tracked(range(0, len(order), batch_size), "writing answers"):
        chosen = order[start : start + batch_size]
        longest = max(len(prompts[number]) for number in chosen)
        ids = torch.full((len(chosen), longest), padding)
        mask = torch.zeros_like(ids)
        for row, number in enumerate(chosen):  # on the left, so that all go on from the last place
            ids[row, longest - len(prompts[number]) :] = torch.tensor(prompts[number])
            mask[row, longest - len(prompts[number]) :] = 1
        given = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
        written = model.generate(**given, generation_config=how)[:, longest:]
        for number, text in zip(chosen, encoder.tokenizer.batch_decode(written, skip_special_tokens=True), strict=True):
            found[number] = text
    return found


def is_right(written: str, example: Completion) -> bool:
    """Whether the first of the choices that occurs in what was written is the answer; all of it, if that is open.

    Example:
        >>> asked = Completion("2 + 2?", "the answer is b2", "b2", ("b1", "b2"))
        >>> is_right("I say b2, not b1", asked), is_right("b1", asked), is_right("b20", asked)
        (True, False, False)
    """
    if not example.choices:
        return written.strip() == example.completion.strip()
    longest_first = sorted(example.choices, key=len, reverse=True)
    named = re.search(rf"(?<!\w)({'|'.join(map(re.escape, longest_first))})(?!\w)", written)
    return named is not None and named[1] == example.answer
