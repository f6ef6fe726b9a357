"""Dialogs as text: what a chat template, or hh-rlhf's way without one, makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dstrain.data.encoding.template_timeout import check_template_terminates
from dstrain.data.formats.preferences import Response
from dstrain.data.formats.transcripts import IMAGE_PLACEHOLDER, Message, messages_to_transcript, to_content_parts
from dstrain.data.records import BadRecord
from dstrain.errors import DataError

Prompt = str | list[Message]
_ASSISTANT_PREFIX = "\n\nAssistant:"
_PROBE_TEXT = "probe"


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt and its answers as text; each answer goes on where the prompt ends."""

    prompt: str
    answers: tuple[str, ...]
    used_chat_template: bool
    """True where the tokenizer's chat template wrote it: nothing is to be put after the answer."""
    extra_generation_prompt: str = ""
    """What the template opens an answer with and leaves out where one stands, such as an empty block of thoughts."""

    @property
    def texts(self) -> tuple[str, ...]:
        """What the model sees before it answers, and the prompt with each answer."""
        return self.prompt + self.extra_generation_prompt, *(self.prompt + answer for answer in self.answers)


def render_prompt(
    tokenizer: Any, prompt: Prompt, answers: Sequence[Response] = (), tools: Sequence[Mapping[str, Any]] = ()
) -> RenderedPrompt:
    """The text of a prompt and of its answers. Raises BadRecord where the chat template refuses the dialog."""
    if getattr(tokenizer, "chat_template", None):
        return _render_with_template(partial(render_conversation, tokenizer, tools=tools or None), prompt, answers)
    if tools:
        raise BadRecord("'tools' need a chat template, and the tokenizer has none; give it one")
    if isinstance(prompt, str):
        assert all(isinstance(answer, str) for answer in answers), "messages answer messages"
        return RenderedPrompt(prompt, tuple(map(str, answers)), False)
    texts = tuple(render_conversation(tokenizer, _to_messages(answer, "assistant")) for answer in answers)
    return RenderedPrompt(
        render_conversation(tokenizer, prompt, True),
        tuple(text.removeprefix(_ASSISTANT_PREFIX) for text in texts),
        False,
    )


def render_conversation(
    tokenizer: Any,
    messages: Sequence[Message],
    add_generation_prompt: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """A dialog's text; `opened`: with what stands in front of the assistant's next answer.

    Raises BadRecord where the chat template refuses the dialog.
    """
    if not getattr(tokenizer, "chat_template", None):
        return messages_to_transcript(messages) + (_ASSISTANT_PREFIX if add_generation_prompt else "")
    from jinja2 import TemplateSyntaxError

    check_template_terminates(tokenizer, messages)
    said = to_template_messages(tokenizer, messages)
    try:
        return tokenizer.apply_chat_template(
            said, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
        )
    except TemplateSyntaxError as fault:  # not of this dialog
        raise DataError(
            f"the tokenizer's chat template has an error in line {fault.lineno} ({fault.message}); fix it, or name another "
            "with model.chat_template"
        ) from fault
    except Exception as fault:  # a template is a program: it divides by zero, calls itself, runs out of memory
        why = str(fault) or type(fault).__name__
        raise BadRecord(f"the tokenizer's chat template refuses the dialog ({why}); fix the turns") from fault


def to_template_messages(tokenizer: Any, messages: Sequence[Message]) -> Sequence[Any]:
    """The messages, in typed parts where they hold images or the template reads nothing else."""
    if any(IMAGE_PLACEHOLDER in message["content"] for message in messages) or _requires_content_parts(tokenizer):
        return [to_content_parts(message) for message in messages]
    return messages


_PARTS_ONLY_CACHE: dict[str, bool] = {}


def _requires_content_parts(tokenizer: Any) -> bool:
    """Whether the chat template leaves out a message whose content is a string, as those of many models that see do."""
    template = str(tokenizer.chat_template)
    if template not in _PARTS_ONLY_CACHE:
        plain: Message = {"role": "user", "content": _PROBE_TEXT}
        _PARTS_ONLY_CACHE[template] = not _renders_probe(tokenizer, plain) and _renders_probe(
            tokenizer, to_content_parts(plain)
        )
    return _PARTS_ONLY_CACHE[template]


def _renders_probe(tokenizer: Any, message: Any) -> bool:
    try:
        return _PROBE_TEXT in tokenizer.apply_chat_template([message], tokenize=False)
    except Exception:  # whatever a template trips over
        return False


def _render_with_template(render_fn: Callable[..., str], prompt: Prompt, answers: Sequence[Response]) -> RenderedPrompt:
    before = _to_messages(prompt, "user")
    if isinstance(prompt, str):  # split at a space, which belongs to no message
        answers = [answer.removeprefix(" ") if isinstance(answer, str) else answer for answer in answers]
    opening = render_fn(before, add_generation_prompt=True)
    whole = [render_fn(before + _to_messages(answer, "assistant")) for answer in answers]
    # Some templates open the answer with what they later leave out, such as an empty block of thoughts.
    start = common_prefix_length([opening, *whole])
    return RenderedPrompt(opening[:start], tuple(text[start:] for text in whole), True, opening[start:])


def common_prefix_length(sequences: Sequence[Any]) -> int:
    """How many letters, or ids, the sequences have in common at their beginning."""
    low, high = min(sequences), max(sequences)
    return next((at for at, one in enumerate(low) if high[at] != one), len(low))


def _to_messages(value: Response, role: str) -> list[Message]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value
