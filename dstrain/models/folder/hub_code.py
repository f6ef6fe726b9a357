"""Detection of config settings that make transformers run kernel code from the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrain.errors import Fault

SETTING_SUFFIXES = ("_implementation", "_implementation_internal")
ATTRIBUTE_MAP = "attribute_map"
"""Class attribute of configs; as a key of config.json it would replace the class's (configuration_utils.py,
__setattr__), and so rename settings behind this check."""


def find_hub_code(config: Any) -> str:
    """Return which setting of a config, or of its JSON, names code on the Hub; an empty string without one.

    Attention or another part may name a kernel ORG/NAME (transformers/integrations/hub_kernels.py). Sub-configs are
    searched too.
    """
    waiting: list[tuple[str, Any]] = [("", config)]
    while waiting:  # not recursive: a hostile file may be nested deeply
        setting, value = waiting.pop()
        if isinstance(value, str) and setting and "/" in value:
            return f"{setting} names code on the Hub ({value!r})"
        if isinstance(value, (list, tuple)):
            waiting += [(setting, inner) for inner in value]
        settings = _settings(value)
        if not setting and ATTRIBUTE_MAP in settings:
            return f"{ATTRIBUTE_MAP} renames settings"
        waiting += [
            (setting or (key if str(key).endswith(SETTING_SUFFIXES) else ""), inner) for key, inner in settings.items()
        ]
    return ""


def check_hub_code(config: Any, name: str, key: str, trust_remote_code: bool) -> list[Fault]:
    """Return a fault where the config of `name`, the value of the recipe's `key`, runs Hub code that is not trusted."""
    if trust_remote_code or not (found := find_hub_code(config)):
        return []
    fix = "remove the key from config.json, or add --set model.trust_remote_code=true if you trust that code"
    return [Fault(key, f"in the config of '{name}' {found}", fix)]


def _settings(value: Any) -> Mapping[Any, Any]:
    """Return the settings of a config object, or of its JSON; an empty mapping for anything else."""
    if isinstance(value, Mapping):
        return value
    if not hasattr(type(value), "sub_configs"):  # every config class of transformers has it
        return {}
    properties = ("_attn_implementation", "_experts_implementation")  # not in vars()
    return {**vars(value), **{name: getattr(value, name, None) for name in properties}}
