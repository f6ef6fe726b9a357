"""Dialogs as text: what a chat template, or hh-rlhf's way without one, makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dstrain.data.encoding.template_timeout import require_end
from dstrain.data.formats.preferences import BadRecord, Response
from dstrain.data.formats.transcripts import IMAGE, Message, in_parts, render_messages
from dstrain.errors import DataError

Prompt = str | list[Message]
_OPENER = "\n\nAssistant:"
_PROBE = "probe"


@dataclass(frozen=True)
class Rendered:
    """A prompt and its answers as text; each answer goes on where the prompt ends."""

    prompt: str
    answers: tuple[str, ...]
    templated: bool
    """True where the tokenizer's chat template wrote it: nothing is to be put after the answer."""
    opened: str = ""
    """What the template opens an answer with and leaves out where one stands, such as an empty block of thoughts."""

    @property
    def texts(self) -> tuple[str, ...]:
        """What the model sees before it answers, and the prompt with each answer."""
        return self.prompt + self.opened, *(self.prompt + answer for answer in self.answers)


def render(
    tokenizer: Any, prompt: Prompt, answers: Sequence[Response] = (), tools: Sequence[Mapping[str, Any]] = ()
) -> Rendered:
    """The text of a prompt and of its answers. Raises BadRecord where the chat template refuses the dialog."""
    if getattr(tokenizer, "chat_template", None):
        return _render_template(partial(write_dialog, tokenizer, tools=tools or None), prompt, answers)
    if tools:
        raise BadRecord("'tools' need a chat template, and the tokenizer has none; give it one")
    if isinstance(prompt, str):
        assert all(isinstance(answer, str) for answer in answers), "messages answer messages"
        return Rendered(prompt, tuple(map(str, answers)), False)
    texts = tuple(write_dialog(tokenizer, _as_messages(answer, "assistant")) for answer in answers)
    return Rendered(write_dialog(tokenizer, prompt, True), tuple(text.removeprefix(_OPENER) for text in texts), False)


def write_dialog(
    tokenizer: Any, messages: Sequence[Message], opened: bool = False, tools: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """A dialog's text; `opened`: with what stands in front of the assistant's next answer.

    Raises BadRecord where the chat template refuses the dialog.
    """
    if not getattr(tokenizer, "chat_template", None):
        return render_messages(messages) + (_OPENER if opened else "")
    from jinja2 import TemplateSyntaxError

    require_end(tokenizer, messages)
    said = as_template_takes(tokenizer, messages)
    try:
        return tokenizer.apply_chat_template(said, tools=tools, add_generation_prompt=opened, tokenize=False)
    except TemplateSyntaxError as fault:  # not of this dialog
        raise DataError(
            f"the tokenizer's chat template has an error in line {fault.lineno} ({fault.message}); fix it, or name another "
            "with model.chat_template"
        ) from fault
    except Exception as fault:  # a template is a program: it divides by zero, calls itself, runs out of memory
        why = str(fault) or type(fault).__name__
        raise BadRecord(f"the tokenizer's chat template refuses the dialog ({why}); fix the turns") from fault


def as_template_takes(tokenizer: Any, messages: Sequence[Message]) -> Sequence[Any]:
    """The messages, in typed parts where they hold images or the template reads nothing else."""
    if any(IMAGE in message["content"] for message in messages) or _reads_parts_alone(tokenizer):
        return [in_parts(message) for message in messages]
    return messages


_PARTS_ALONE: dict[str, bool] = {}


def _reads_parts_alone(tokenizer: Any) -> bool:
    """Whether the chat template leaves out a message whose content is a string, as those of many models that see do."""
    template = str(tokenizer.chat_template)
    if template not in _PARTS_ALONE:
        plain: Message = {"role": "user", "content": _PROBE}
        _PARTS_ALONE[template] = not _shows(tokenizer, plain) and _shows(tokenizer, in_parts(plain))
    return _PARTS_ALONE[template]


def _shows(tokenizer: Any, message: Any) -> bool:
    try:
        return _PROBE in tokenizer.apply_chat_template([message], tokenize=False)
    except Exception:  # whatever a template trips over
        return False


def _render_template(write: Callable[..., str], prompt: Prompt, answers: Sequence[Response]) -> Rendered:
    before = _as_messages(prompt, "user")
    if isinstance(prompt, str):  # split at a space, which belongs to no message
        answers = [answer.removeprefix(" ") if isinstance(answer, str) else answer for answer in answers]
    opening = write(before, opened=True)
    whole = [write(before + _as_messages(answer, "assistant")) for answer in answers]
    # Some templates open the answer with what they later leave out, such as an empty block of thoughts.
    start = count_alike([opening, *whole])
    return Rendered(opening[:start], tuple(text[start:] for text in whole), True, opening[start:])


def count_alike(sequences: Sequence[Any]) -> int:
    """How many letters, or ids, the sequences have in common at their beginning."""
    low, high = min(sequences), max(sequences)
    return next((at for at, one in enumerate(low) if high[at] != one), len(low))


def _as_messages(value: Response, role: str) -> list[Message]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value
