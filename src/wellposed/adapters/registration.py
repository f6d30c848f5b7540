"""Making PEFT know a type of adapter that is not its own."""

from typing import Any

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.utils import PeftType

NAME = "WELLPOSED_SINE_LORA"
"""What adapter_config.json says. Where the type is not known, PEFT's error is a KeyError with this name."""


def _member(name: str) -> Any:
    """PeftType's member `name`, added if it is not there.

    PEFT's own way to register a method refuses names outside this enum, and PEFT 0.20 does not save an adapter whose
    type is a string of another kind.
    """
    if name not in PeftType.__members__:
        member = str.__new__(PeftType, name)
        member._name_ = member._value_ = name
        member._sort_order_ = len(PeftType.__members__)
        PeftType._member_names_.append(name)
        PeftType._member_map_[name] = member
        PeftType._value2member_map_[name] = member
    return PeftType(name)


SINE_LORA = _member(NAME)


def register(config: type, model: type) -> None:
    """Enter the type with its configuration, its model and LoRA's prefix of weights in PEFT's three tables."""
    PEFT_TYPE_TO_CONFIG_MAPPING[SINE_LORA] = config
    PEFT_TYPE_TO_TUNER_MAPPING[SINE_LORA] = model
    PEFT_TYPE_TO_PREFIX_MAPPING[SINE_LORA] = "lora_"
