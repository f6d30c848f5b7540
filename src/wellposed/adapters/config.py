"""The configuration of a sine adapter: PEFT's LoraConfig and three fields."""

from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Literal

from peft import LoraConfig
from peft.utils.other import get_pattern_key

from wellposed.adapters.registration import SINE_LORA
from wellposed.errors import InvalidArgumentError
from wellposed.lowrank.frequency import adapter_omega, check_gain, check_omega

_INITS = (True, False, "gaussian")
_REFUSED = {
    "lora_bias": "the update is a matrix, it has no bias",
    "target_parameters": "it adapts layers, not single parameters",
    "megatron_config": "it has no Megatron layers",
    "use_qalora": "QALoRA pools the input of a product of two factors, and here there is no such product",
    **dict.fromkeys(
        ["velora_config", "alora_invocation_tokens", "monteclora_config", "use_bdlora", "arrow_config", "kasa_config"],
        "it is another change of the same update",
    ),
}


@dataclass
class SineLoraConfig(LoraConfig):  # type: ignore[misc]
    """W = W0 + (lora_alpha / r) sin(omega B A) / g, as a PEFT configuration.

    With use_dora, V = W0 + (lora_alpha / r) sin(omega B A) / g and W = m V / ||V|| row by row, m starting at the norms
    of W0; with use_rslora, lora_alpha / sqrt(r) takes the place of lora_alpha / r. B starts at 0, and with it the
    update. All fields of LoraConfig have their meaning; those that assume that the update is B A are refused.

    Linear layers, embeddings and transformers' Conv1D can be adapted, also linear ones that bitsandbytes or torchao
    has quantized.

    Example:
        >>> SineLoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]).omega
        'auto'
    """

    omega: float | Literal["auto"] = field(
        default="auto",
        metadata={"help": "The frequency, above 0; 'auto' for sqrt(3 in_features) / (0.01 sqrt(r)) of each layer."},
    )
    omega_pattern: dict[str, float] = field(
        default_factory=dict,
        metadata={
            "help": "Other omegas by names or regular expressions, like rank_pattern. Once the adapter is made, the "
            "omega of each layer is here too, under its full name, and saved with the adapter."
        },
    )
    gain: float | None = field(default=None, metadata={"help": "g, above 0; sqrt(in_features) of each layer if None."})

    def __post_init__(self) -> None:
        check_omega(self.omega)
        check_gain(self.gain)
        if not isinstance(self.omega_pattern, dict):
            raise InvalidArgumentError(f"omega_pattern={self.omega_pattern!r}: expected a dict from names to omegas")
        for name, omega in self.omega_pattern.items():
            check_omega(omega, f"omega_pattern[{name!r}]")
        if self.init_lora_weights not in _INITS:
            raise InvalidArgumentError(
                f"init_lora_weights={self.init_lora_weights!r} is made for an update B A, and here it is "
                "sin(omega B A): expected True, False or 'gaussian'"
            )
        for name, reason in _REFUSED.items():
            if getattr(self, name, None):
                raise InvalidArgumentError(f"a sine adapter cannot have {name}: {reason}. Leave it out.")
        if self.bias != "none" and _peft_version() < (0, 21):
            raise InvalidArgumentError(
                f"bias={self.bias!r}: PEFT {version('peft')} would train the biases but not save them. Upgrade to "
                "0.21, or use bias='none'."
            )
        super().__post_init__()
        self.peft_type = SINE_LORA
        self._resolved: set[str] = set()

    def resolve_omega(self, name: str, rank: int, init_std: float) -> float:
        """The omega of the layer called `name`, remembered in `omega_pattern`; see `adapter_omega` for the rest."""
        given = {key: omega for key, omega in self.omega_pattern.items() if key not in self._resolved}
        omega: Any = given.get(name)
        if omega is None:
            omega = given.get(get_pattern_key(given.keys(), name), self.omega)
        omega = adapter_omega(rank, init_std) if isinstance(omega, str) else float(omega)
        if given.get(name) != omega:
            self.omega_pattern = self.omega_pattern | {name: omega}
            self._resolved.add(name)
        return omega

    def forget_resolved(self) -> None:
        """Take out of `omega_pattern` what `resolve_omega` put in, before the same object configures another model."""
        kept = {name: omega for name, omega in self.omega_pattern.items() if name not in self._resolved}
        self.omega_pattern, self._resolved = kept, set()


def _peft_version() -> tuple[int, ...]:
    return tuple(int(part) for part in version("peft").split(".")[:2])
