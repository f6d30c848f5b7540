"""Sine LoRA and sine DoRA as PEFT adapters (arXiv 2403.19243).

Importing this package registers them with PEFT; from then on `peft.get_peft_model` takes a `SineLoraConfig`, and the
plain `peft.PeftModel.from_pretrained` loads what was saved. Without it, loading such an adapter is a KeyError that
names WELLPOSED_SINE_LORA.
"""

from wellposed.adapters.config import SineLoraConfig as SineLoraConfig
from wellposed.adapters.export import LoraExport as LoraExport
from wellposed.adapters.export import to_lora as to_lora
from wellposed.adapters.layers import SineLoraEmbedding as SineLoraEmbedding
from wellposed.adapters.layers import SineLoraLinear as SineLoraLinear
from wellposed.adapters.model import SineLoraModel as SineLoraModel
from wellposed.adapters.registration import register
from wellposed.adapters.report import AdapterReport as AdapterReport
from wellposed.adapters.report import LayerUpdate as LayerUpdate
from wellposed.adapters.report import adapter_report as adapter_report
from wellposed.adapters.training_log import AdapterLog as AdapterLog
from wellposed.adapters.training_log import adapter_numbers as adapter_numbers

register(SineLoraConfig, SineLoraModel)
