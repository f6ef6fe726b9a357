"""Settings of a model's config with which transformers fetches code from the hub and runs it, without trust_remote_code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrain.errors import Fault

SETTING_SUFFIXES = ("_implementation", "_implementation_internal")
ATTRIBUTE_MAP = "attribute_map"
"""Of a config's class; as a key of config.json it would replace the class's own (configuration_utils.py, __setattr__)."""


def find_hub_code(config: Any) -> str:
    """Which setting of a config, or of the JSON of one, names code on the hub: attention, or another part, that comes as a
    kernel ORG/NAME (transformers/integrations/hub_kernels.py). Sub-configs are searched too. Empty where there is none."""
    waiting: list[tuple[str, Any]] = [("", config)]
    while waiting:  # a loop, because a file that was handed over may be nested deeply
        setting, value = waiting.pop()
        if isinstance(value, str) and setting and "/" in value:
            return f"{setting} names code on the hub ({value!r})"
        if isinstance(value, (list, tuple)):
            waiting += [(setting, inner) for inner in value]
        settings = _settings(value)
        if not setting and ATTRIBUTE_MAP in settings:
            return f"{ATTRIBUTE_MAP} gives settings other names"
        waiting += [
            (setting or (key if str(key).endswith(SETTING_SUFFIXES) else ""), inner) for key, inner in settings.items()
        ]
    return ""


def check_hub_code(config: Any, name: str, key: str, trust_remote_code: bool) -> list[Fault]:
    """A fault where the config of the model `name`, which the recipe's `key` names, has code of the hub run without the user's word."""
    if trust_remote_code or not (found := find_hub_code(config)):
        return []
    mend = "remove the key from config.json, or add --set model.trust_remote_code=true if you trust that code"
    return [Fault(key, f"in the config of '{name}' {found}", mend)]


def _settings(value: Any) -> Mapping[Any, Any]:
    """The settings of a config object, or of the JSON of one; empty for anything else."""
    if isinstance(value, Mapping):
        return value
    if not hasattr(type(value), "sub_configs"):  # of every config class of transformers
        return {}
    read = ("_attn_implementation", "_experts_implementation")  # as the model reads them
    return {**vars(value), **{name: getattr(value, name, None) for name in read}}
