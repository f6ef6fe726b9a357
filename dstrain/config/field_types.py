"""Kinds of values in the recipe."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from dstrain.errors import URL_PASSWORD

PositiveInt = Annotated[int, Field(ge=1, lt=2**31)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


def _check_split_name(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"\w+(\.\w+)*", value, re.ASCII):
        raise ValueError("a split is one name such as train, and data.max_samples takes a part of it")
    return value


SplitName = Annotated[str, BeforeValidator(_check_split_name)]


SECRET_NAME = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|(^|_)(API_?)?KEY", re.IGNORECASE)
"""In names of variables whose values must not lie in a run folder or reach a tracker."""


def _check_env_var(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(=[^\0]*)?", value, re.ASCII):
        raise ValueError("must be the name of an environment variable, or NAME=value")
    name, given, content = value.partition("=")
    if given and URL_PASSWORD.search(content):
        raise ValueError(
            f"{name} holds a URL with a password, and recipes are kept; write the name alone, and set it where you launch"
        )
    if given and SECRET_NAME.search(name):
        raise ValueError(
            f"{name} looks like a secret, and recipes are kept; write the name alone, and set it where you launch"
        )
    return value


EnvVar = Annotated[str, AfterValidator(_check_env_var)]


def hide_secret(value: Any) -> Any:
    """The value as a message may show it."""
    name, given, _ = value.partition("=") if isinstance(value, str) else ("", "", "")
    return f"{name}=..." if given and (SECRET_NAME.search(name) or URL_PASSWORD.search(value)) else value
