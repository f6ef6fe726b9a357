"""dstrain: train reward models, policies and vision-language models on DeepSpeed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dstrain.commands.notebook import RunStopped, evaluate, export, load, train
    from dstrain.models.reward_model import load_reward_model

__all__ = ["RunStopped", "__version__", "evaluate", "export", "load", "load_reward_model", "train"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Return a name of __all__, which is imported when it is asked for: torch takes seconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "dstrain.models.reward_model" if name == "load_reward_model" else "dstrain.commands.notebook"
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
