"""Options of a new temporal encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dstrain.config.field_types import check_limits
from dstrain.data.series.patches import SERIES_TOKEN_ID, PatchConfig


@dataclass(frozen=True)
class EncoderOptions:
    """Sizes of a new temporal encoder. A model.path that holds an encoder keeps its own."""

    patch_length: int = 8
    """Time steps of a patch."""
    patches_per_token: int = 1
    """Neighbouring patches of a channel that become one soft token of the language model."""
    hidden_size: int = 128
    """Width of the encoder."""
    num_layers: int = 4
    """Transformer layers of the encoder."""
    num_heads: int = 4
    """Attention heads of each layer; they divide hidden_size."""
    dropout: float = 0.0
    """Dropout probability in the encoder."""

    def __post_init__(self) -> None:
        check_limits(self, "patch_length", "patches_per_token", "hidden_size", "num_layers", "num_heads", least=1)
        if self.hidden_size % self.num_heads or self.hidden_size % 2:
            raise ValueError(f"hidden_size is {self.hidden_size}, but it must be even and a multiple of num_heads")
        check_limits(self, "dropout", below=1)

    @property
    def patches(self) -> PatchConfig:
        """How series are cut into patches."""
        return PatchConfig(self.patch_length, self.patches_per_token)

    def config_values(self) -> dict[str, Any]:
        """Return the settings of a `TemporalConfig`."""
        names = {
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "dropout": "hidden_dropout_prob",
        }
        values = {names.get(name, name): value for name, value in asdict(self).items()}
        return {**values, "intermediate_size": 4 * self.hidden_size, "series_token_id": SERIES_TOKEN_ID}

    def find_mismatched(self, config: Any, given: Mapping[str, Any]) -> list[str]:
        """Return the names in `given` whose value here is not that of the config."""
        values = EncoderOptions(**given).config_values() if given else {}
        default = EncoderOptions().config_values()
        return [name for name, value in values.items() if value != default[name] and getattr(config, name) != value]
