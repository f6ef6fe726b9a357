"""The parts of a model that sees: what looks at images, what makes tokens of that, and what reads and writes text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Part = Literal["vision", "projector", "language"]
PARTS: tuple[Part, ...] = ("vision", "projector", "language")

TOWERS = ("vision_tower", "visual", "vision_model", "vision_encoder", "image_tower", "image_encoder", "video_tower")
"""Names of what looks at images, in the families of transformers."""
DECODERS = ("language_model", "text_model", "text_decoder")
"""Names of what reads and writes text."""
BETWEEN = ("merger", "project", "connector", "aligner", "perceiver", "qformer")
"""Words in the names of what stands between, where it lies inside one of the others."""
ELSEWHERE = ("audio",)
"""Words in the names of what is none of the three."""


def sections(model: torch.nn.Module) -> dict[int, Part]:
    """id of a parameter -> its part; empty for a model that does not see.

    Of what transformers calls the base model: `vision` is the tower (`get_encoder("image")`), without the merger that
    Qwen's keep inside; `language` the decoder and the embeddings at both ends, tied or not; `projector` the rest. A new
    head outside, such as a reward model's, is none of them. Adapters belong to the part they lie in. Parameters may be
    on the meta device, or in shards.
    """
    core: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # inside peft's
    body = getattr(core, "base_model", core)
    towers = list(_towers(core, body))
    if not towers:
        return {}
    found: dict[int, Part] = {}
    strange = {id(p) for name, child in body.named_children() if _has(name, ELSEWHERE) for p in child.parameters()}
    _mark(found, "projector", [body])
    _mark(found, "language", [*_readers(core, body, towers), *_embeddings(core)])
    _mark(found, "vision", towers)
    _mark(
        found, "projector", [child for tower in towers for name, child in tower.named_children() if _has(name, BETWEEN)]
    )
    return {key: part for key, part in found.items() if key not in strange}


def _mark(found: dict[int, Part], part: Part, modules: list[torch.nn.Module]) -> None:
    """What comes later counts."""
    found.update((id(parameter), part) for module in modules for parameter in module.parameters())


def _has(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name for word in words)


def _towers(core: Any, body: Any) -> Iterator[torch.nn.Module]:
    there = [getattr(body, name) for name in TOWERS if _is_module(getattr(body, name, None))]
    if not there and hasattr(core, "get_encoder") and hasattr(core, "config"):
        found = core.get_encoder("image")
        there = [found] if _is_module(found) and found not in (core, body) else []
    yield from there


def _readers(core: Any, body: Any, towers: list[Any]) -> Iterator[torch.nn.Module]:
    """The decoder; of a family whose base model is itself the decoder, all that lies in it and has no other name."""
    named = [getattr(body, name) for name in DECODERS if _is_module(getattr(body, name, None))]
    if named:
        yield from named[:1]
        return
    found = core.get_decoder() if hasattr(core, "get_decoder") else None
    if _is_module(found) and found not in (core, body):
        yield found
        return
    yield from (child for name, child in body.named_children() if child not in towers and not _has(name, BETWEEN))


def _embeddings(core: Any) -> Iterator[torch.nn.Module]:
    for end in ("get_input_embeddings", "get_output_embeddings"):
        found = getattr(core, end)() if hasattr(core, end) else None
        if _is_module(found):
            yield found


def _is_module(value: Any) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)
