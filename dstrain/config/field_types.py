"""Types of the recipe's values, for pydantic, and limits of the options of tasks."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from dstrain.errors import SECRET_NAME, URL_PASSWORD

PositiveInt = Annotated[int, Field(ge=1, lt=2**31)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


def _check_split_name(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"\w+(\.\w+)*", value, re.ASCII):
        raise ValueError("a split is one name such as train; data.max_samples limits its records")
    return value


SplitName = Annotated[str, BeforeValidator(_check_split_name)]


ATTN_IMPLEMENTATIONS = ("auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Values of model.attn_implementation, besides kernels on the Hub."""


def _check_attn_implementation(value: str) -> str:
    if value not in ATTN_IMPLEMENTATIONS and not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w.-]+)?(:\w+)?", value, re.ASCII):
        known = ", ".join(ATTN_IMPLEMENTATIONS)
        raise ValueError(f"must be one of {known}, or a kernel on the Hub such as kernels-community/flash-attn2")
    return value


AttnImplementation = Annotated[str, AfterValidator(_check_attn_implementation)]


def _check_share_of_layers(value: bool | float) -> bool | float:
    if not isinstance(value, bool) and not 0 < value < 1:
        raise ValueError("must be true, false, or the share of the layers, between 0 and 1")
    return value


ShareOfLayers = Annotated[bool | float, AfterValidator(_check_share_of_layers)]
"""True for all, false for none."""


_RECIPES_ARE_SAVED = "and recipes are saved; write the name alone, and set the variable where you launch"


def _check_env_var(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(=[^\0]*)?", value, re.ASCII):
        raise ValueError("must be the name of an environment variable, or NAME=value")
    name, given, content = value.partition("=")
    if given and URL_PASSWORD.search(content):
        raise ValueError(f"{name} holds a URL with a password, {_RECIPES_ARE_SAVED}")
    if given and SECRET_NAME.search(name):
        raise ValueError(f"{name} looks like a secret, {_RECIPES_ARE_SAVED}")
    return value


EnvVar = Annotated[str, AfterValidator(_check_env_var)]


def hide_secret(value: Any) -> Any:
    """Return the value as a message may show it: `NAME=...` for a secret."""
    name, given, _ = value.partition("=") if isinstance(value, str) else ("", "", "")
    return f"{name}=..." if given and (SECRET_NAME.search(name) or URL_PASSWORD.search(value)) else value


def check_limits(options: Any, *names: str, least: float = 0, below: float = math.inf) -> None:
    """Raise ValueError for an option, an attribute with one of the names, under `least` or not below `below`.

    None, an option that is not set, is within any limits.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and not least <= value < below:
            limits = f"at least {least:g}" + ("" if below == math.inf else f" and below {below:g}")
            raise ValueError(f"{name} is {value:g}, but it must be {limits}")
