"""The parts of a model that sees: what looks at images, what makes tokens of that, and what reads and writes text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Component = Literal["vision", "projector", "language"]
COMPONENTS: tuple[Component, ...] = ("vision", "projector", "language")

VISION_TOWER_NAMES = (
    "vision_tower",
    "visual",
    "vision_model",
    "vision_encoder",
    "image_tower",
    "image_encoder",
    "video_tower",
)
"""Names of what looks at images, in the families of transformers."""
DECODER_NAMES = ("language_model", "text_model", "text_decoder")
"""Names of what reads and writes text."""
PROJECTOR_WORDS = ("merger", "project", "connector", "aligner", "perceiver", "qformer")
"""Words in the names of what stands between, where it lies inside one of the others."""
EXCLUDED_WORDS = ("audio",)
"""Words in the names of what is none of the three."""


def components_by_id(model: torch.nn.Module) -> dict[int, Component]:
    """id of a parameter -> its part; empty for a model that does not see.

    Of what transformers calls the base model: `vision` is the tower (`get_encoder("image")`), without the merger that
    Qwen's keep inside; `language` the decoder and the embeddings at both ends, tied or not; `projector` the rest. A new
    head outside, such as a reward model's, is none of them. Adapters belong to the part they lie in. Parameters may be
    on the meta device, or in shards.
    """
    core: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # inside peft's
    body = getattr(core, "base_model", core)
    towers = list(_find_vision_towers(core, body))
    if not towers:
        return {}
    found: dict[int, Component] = {}
    strange = {
        id(p)
        for name, child in body.named_children()
        if _contains_any(name, EXCLUDED_WORDS)
        for p in child.parameters()
    }
    _assign_component(found, "projector", [body])
    _assign_component(found, "language", [*_find_decoders(core, body, towers), *_find_embeddings(core)])
    _assign_component(found, "vision", towers)
    _assign_component(
        found,
        "projector",
        [child for tower in towers for name, child in tower.named_children() if _contains_any(name, PROJECTOR_WORDS)],
    )
    return {key: part for key, part in found.items() if key not in strange}


def _assign_component(components: dict[int, Component], component: Component, modules: list[torch.nn.Module]) -> None:
    """What comes later counts."""
    components.update((id(parameter), component) for module in modules for parameter in module.parameters())


def _contains_any(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name for word in words)


def _find_vision_towers(core: Any, body: Any) -> Iterator[torch.nn.Module]:
    there = [getattr(body, name) for name in VISION_TOWER_NAMES if _is_module(getattr(body, name, None))]
    if not there and hasattr(core, "get_encoder") and hasattr(core, "config"):
        found = core.get_encoder("image")
        there = [found] if _is_module(found) and found not in (core, body) else []
    yield from there


def _find_decoders(core: Any, body: Any, towers: list[Any]) -> Iterator[torch.nn.Module]:
    """The decoder; of a family whose base model is itself the decoder, all that lies in it and has no other name."""
    named = [getattr(body, name) for name in DECODER_NAMES if _is_module(getattr(body, name, None))]
    if named:
        yield from named[:1]
        return
    found = core.get_decoder() if hasattr(core, "get_decoder") else None
    if _is_module(found) and found not in (core, body):
        yield found
        return
    yield from (
        child
        for name, child in body.named_children()
        if child not in towers and not _contains_any(name, PROJECTOR_WORDS)
    )


def _find_embeddings(core: Any) -> Iterator[torch.nn.Module]:
    for end in ("get_input_embeddings", "get_output_embeddings"):
        found = getattr(core, end)() if hasattr(core, end) else None
        if _is_module(found):
            yield found


def _is_module(value: Any) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)
