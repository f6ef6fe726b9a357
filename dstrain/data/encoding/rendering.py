"""Conversations as text, by the chat template or as hh-rlhf transcripts, with image placeholders expanded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from dstrain.data.encoding.template_check import FIX, LOST_COLUMNS, TemplateCheck, check_answers, check_template
from dstrain.data.formats.conversations import Conversation
from dstrain.data.formats.messages import (
    IMAGE_PLACEHOLDER,
    Message,
    common_prefix_length,
)
from dstrain.data.formats.preferences import Prompt, Response
from dstrain.data.records import BadRecord
from dstrain.data.vision.processor import VisionProcessor
from dstrain.errors import DataError, Fault, RecipeError

RECIPE_KEY = "model.chat_template"
BUILTIN_TEMPLATE = "human_assistant"
_TRANSCRIPT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{- '\n\nAssistant: ' -}}
{%- elif message.role != 'system' -%}{{- '\n\nHuman: ' if message.role == 'user' else '\n\nTool: ' -}}{%- endif -%}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}
{{- 'IMAGE' if part.type == 'image' else part.text -}}
{%- endfor -%}{%- endif -%}
{%- if message.role == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '\n\nAssistant:' -}}{%- endif -%}"""
"""Conversations in the form of hh-rlhf, with EOS after each answer."""


def resolve_chat_template(value: str, tokenizer: Any, image_token: str = "") -> str:
    """Return the Jinja template that the value of model.chat_template stands for.

    `image_token`: the text of an image placeholder. Raises RecipeError.
    """
    if value == BUILTIN_TEMPLATE:
        if tokenizer.eos_token is None:
            problem = "ends answers with EOS, and the tokenizer has none"
            raise RecipeError(Fault(RECIPE_KEY, problem, "write a template"))
        return _TRANSCRIPT_TEMPLATE.replace("IMAGE", image_token)
    if "{" in value:
        return value
    file = Path(value).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        fix = f"write {BUILTIN_TEMPLATE}, a Jinja template, or the path of a file with one"
        raise RecipeError(Fault(RECIPE_KEY, f"'{value}' cannot be read ({fault})", fix)) from fault


KWARGS_KEY = "model.chat_template_kwargs"
RESERVED_KWARGS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"}
)
"""Variables of a template that the conversation and the tokenizer set."""


def set_template_kwargs(tokenizer: Any, values: Mapping[str, Any]) -> None:
    """Give variables of the tokenizer's chat template a value where the caller of the template gives none.

    In the template itself, so that the text is the same wherever it is rendered, and in exports. The names that are
    set last count. Raises RecipeError for a name that the template does not read.
    """
    if not values:
        return
    if not has_chat_template(tokenizer):
        fix = "name a template with model.chat_template, or remove it"
        raise RecipeError(Fault(KWARGS_KEY, "is set, but the tokenizer has no chat template", fix))
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, Mapping) else [template]
    read = {name for text in texts for name in re.findall(r"\b[A-Za-z_]\w*", text)}
    asked = {name for text in texts for name in re.findall(r"\b([A-Za-z_]\w*) is (?:not )?defined", text)}
    known = ", ".join(sorted(asked - RESERVED_KWARGS)) or "none"
    faults = [
        Fault(f"{KWARGS_KEY}.{name}", "is set from the conversation and the tokenizer", "remove it")
        if name in RESERVED_KWARGS
        else Fault(f"{KWARGS_KEY}.{name}", "is not read by the chat template", f"variables that it asks for: {known}")
        for name in values
        if name in RESERVED_KWARGS or name not in read
    ]
    if faults:
        raise RecipeError(faults)
    defaults = "".join(
        f"{{%- if {name} is not defined -%}}{{%- set {name} = {_to_jinja(value)} -%}}{{%- endif -%}}\n"
        for name, value in sorted(values.items())
    )

    def prepend(text: str) -> str:
        return text if text.startswith(defaults) else defaults + text

    if isinstance(template, Mapping):
        tokenizer.chat_template = {name: prepend(text) for name, text in template.items()}
    else:
        tokenizer.chat_template = prepend(template)


def _to_jinja(value: Any) -> str:
    """Return a value of JSON as a literal of Jinja."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {_to_jinja(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_to_jinja, value)) + "]"
    return "none" if value is None else json.dumps(value)


ID_COLUMNS = {"input_ids", "chosen", "rejected"}
"""Columns of an example that hold image tokens."""
Shifts = Sequence[tuple[int, int]]
"""For each expanded placeholder (its start in the text, characters that the text grew by)."""
_ROLE_TO_SPEAKER = {"user": "Human", "assistant": "Assistant", "tool": "Tool"}
_ASSISTANT_PREFIX = "\n\nAssistant:"
_PROBE_TEXT = "probe"


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt and its answers as text; each answer continues the prompt."""

    prompt: str
    answers: tuple[str, ...]
    used_chat_template: bool
    """True if the tokenizer's chat template wrote it: then nothing is appended to an answer."""
    extra_generation_prompt: str = ""
    """Text that the template writes before an answer to generate, but not before a given answer,
    such as an empty block of thoughts."""
    lost: Mapping[str, int] = field(default_factory=lambda: TemplateCheck().counts)
    """LOST_COLUMNS of the example."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The prompt as the model sees it before it answers, and the prompt with each answer."""
        return self.prompt + self.extra_generation_prompt, *(self.prompt + answer for answer in self.answers)


def render_prompt(
    tokenizer: Any, prompt: Prompt, answers: Sequence[Response] = (), tools: Sequence[Mapping[str, Any]] = ()
) -> RenderedPrompt:
    """Return the text of a prompt and its answers.

    Raises BadRecord if the chat template rejects the conversation or does not keep it (`check_template`), or tools
    have no template.
    """
    if has_chat_template(tokenizer):
        rendered = _render_with_template(tokenizer, prompt, answers, tools)
        checks = [
            _check_answer(tokenizer, prompt, answer, text, tools)
            for answer, text in zip(answers, rendered.answers, strict=True)
        ]
        checks = checks or [_check_prompt(tokenizer, prompt, tools)]
        return replace(rendered, lost={name: max(one.counts[name] for one in checks) for name in LOST_COLUMNS})
    if tools:
        raise BadRecord("'tools' need a chat template, and the tokenizer has none; give it one")
    if isinstance(prompt, str):
        assert all(isinstance(answer, str) for answer in answers), "messages answer messages"
        return RenderedPrompt(prompt, tuple(map(str, answers)), False)
    # Transcripts are plain concatenation: prompt and answer can be rendered separately.
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
    """Return the text of a conversation.

    `add_generation_prompt`: append what comes before the next answer of the assistant. Raises
    BadRecord if the chat template rejects the conversation, DataError for a syntax error in it.
    """
    if not has_chat_template(tokenizer):
        return messages_to_transcript(messages) + (_ASSISTANT_PREFIX if add_generation_prompt else "")
    from jinja2 import TemplateSyntaxError

    said = to_template_messages(tokenizer, messages)
    apply = partial(
        tokenizer.apply_chat_template, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    try:
        try:
            return apply(said)
        except TypeError:  # of a template that joins texts, such as DeepSeek's
            if not any(message.get("tool_calls") for message in said):
                raise
            return apply([_with_text_arguments(message) for message in said])
    except TemplateSyntaxError as fault:  # the same for every conversation
        raise DataError(
            f"the tokenizer's chat template has an error in line {fault.lineno} ({fault.message}); "
            "fix it, or name another with model.chat_template"
        ) from fault
    except Exception as fault:  # a template is a program: it may divide by zero or recurse too deep
        reason = str(fault) or type(fault).__name__
        raise BadRecord(f"the tokenizer's chat template refuses the dialog ({reason}); fix the turns") from fault


def _with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with the arguments of its calls as JSON in a text, OpenAI's own form."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}}
        if not isinstance(arguments := call["function"].get("arguments"), str)
        else call
        for call in message.get("tool_calls") or ()
    ]
    return {**message, **({"tool_calls": calls} if calls else {})}


def to_template_messages(tokenizer: Any, messages: Sequence[Message]) -> Sequence[Any]:
    """Return the messages, as typed parts if they hold images or the template reads only parts."""
    has_images = any(IMAGE_PLACEHOLDER in message["content"] for message in messages)
    if has_images or _requires_content_parts(tokenizer):
        return [to_content_parts(message) for message in messages]
    return messages


_PARTS_ONLY_CACHE: dict[str, bool] = {}


def _requires_content_parts(tokenizer: Any) -> bool:
    """Return whether the template skips string contents, as many vision-language models' do."""
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
    except Exception:  # any error of the template
        return False


def _render_with_template(
    tokenizer: Any, prompt: Prompt, answers: Sequence[Response], tools: Sequence[Mapping[str, Any]]
) -> RenderedPrompt:
    render_fn = partial(render_conversation, tokenizer, tools=tools or None)
    messages = _to_messages(prompt, "user")
    if isinstance(prompt, str):  # the space between prompt and answer belongs to neither message
        answers = [answer.removeprefix(" ") if isinstance(answer, str) else answer for answer in answers]
    opening = render_fn(messages, add_generation_prompt=True)
    full = [render_fn(messages + _to_messages(answer, "assistant")) for answer in answers]
    # Some templates open an answer with text that they omit where the answer is given, such as an
    # empty block of thoughts: the prompt ends where the texts diverge.
    start = common_prefix_length([opening, *full])
    turns = [_to_messages(answer, "assistant")[-1] for answer in answers]
    # Only what follows an end token is cut: whitespace stays, as the template writes it.
    ends = [
        find_answer_end(text, start, len(text.rstrip()), turn, (tokenizer.eos_token,))
        for text, turn in zip(full, turns, strict=True)
    ]
    texts = tuple(
        text[start:] if end == len(text.rstrip()) else text[start:end] for text, end in zip(full, ends, strict=True)
    )
    return RenderedPrompt(opening[:start], texts, True, opening[start:])


def find_answer_end(text: str, start: int, end: int, message: Message, end_tokens: tuple[str, ...]) -> int:
    """Return where the answer in `text[start:end]` ends: after its end token.

    Some templates write a line break there, and some, such as Command R+'s, the prompt of the next answer, which the
    model never has to generate.
    """
    end_tokens = tuple(filter(None, end_tokens))
    stripped = start + len(text[start:end].rstrip())
    content, at = message["content"].strip(), -1
    if content and not message.get("tool_calls"):
        at = text.rfind(content, start, end)
    ends = [
        found + len(token)
        for token in end_tokens
        if at >= 0 and (found := text.find(token, at + len(content), end)) >= 0
    ]
    if ends:
        rest = text[min(ends) : end]
        for token in end_tokens:
            rest = rest.replace(token, "")
        if rest.strip():
            return min(ends)
    return stripped if text.endswith(end_tokens, start, stripped) else end


def _check_prompt(tokenizer: Any, prompt: Prompt, tools: Sequence[Mapping[str, Any]]) -> TemplateCheck:
    """Return what the template does with a prompt that no answer follows."""

    def locate(sample: Conversation) -> tuple[str, list[tuple[int, int]]]:
        return _render_with_template(tokenizer, sample.messages, (), tools).prompt, []

    sample = Conversation(_to_messages(prompt, "user"), (), tuple(dict(tool) for tool in tools))
    return check_template(tokenizer, sample, "prompt", locate)


def _check_answer(
    tokenizer: Any, prompt: Prompt, answer: Response, text: str, tools: Sequence[Mapping[str, Any]]
) -> TemplateCheck:
    """Return what the template does with a prompt and an answer to it, rendered as `text`. Raises BadRecord."""
    before, after = _to_messages(prompt, "user"), _to_messages(answer, "assistant")
    count = len(before)

    def locate(sample: Conversation) -> tuple[str, list[tuple[int, int]]]:
        rendered = _render_with_template(tokenizer, sample.messages[:count], [sample.messages[count:]], tools)
        return rendered.texts[1], [(len(rendered.prompt), len(rendered.texts[1]))]

    trained = tuple(turn for turn in range(count, count + len(after)) if after[turn - count]["role"] == "assistant")
    sample = Conversation([*before, *after], trained, tuple(dict(tool) for tool in tools))
    check = check_template(tokenizer, sample, "answer", locate, count)
    if check.reason:
        raise BadRecord(check.reason)
    if check.removed_turns:
        raise BadRecord(f"the chat template writes the result of a tool into the answer; {FIX}")
    return replace(check, lost=check.lost | frozenset(check_answers(sample, text)))


def keep_system_text(tokenizer: Any, messages: list[Message], num_context: int) -> list[Message]:
    """Return the messages with the system text in the last user turn of the context, where the template needs it there.

    Some templates, such as Mistral's, write the system text before the last message only if that is the user's: a
    conversation that ends with an answer would lose it, and the prompt of the same answer would not.
    """
    users = [turn for turn in range(num_context) if messages[turn]["role"] == "user"]
    if not has_chat_template(tokenizer) or not users or messages[0]["role"] != "system":
        return messages
    glue = _find_system_glue(tokenizer)
    if glue is None:
        return messages
    moved = messages[users[-1]]
    moved = cast("Message", {**moved, "content": messages[0]["content"] + glue + moved["content"]})
    return [*messages[1 : users[-1]], moved, *messages[users[-1] + 1 :]]


_system_glue: dict[str, str | None] = {}


def _find_system_glue(tokenizer: Any) -> str | None:
    """Return what the template writes between system text and question; None: it keeps the system text with an answer."""
    template = str(tokenizer.chat_template)
    if template not in _system_glue:
        _system_glue[template] = None
        system, question, answer = "\ue012system", "\ue012question", "\ue012answer"
        asked: list[Message] = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        try:
            opening = render_conversation(tokenizer, asked, True)
            full = render_conversation(tokenizer, [*asked, {"role": "assistant", "content": answer}])
            glue = opening.partition(system)[2].partition(question)[0]
            merged: list[Message] = [{"role": "user", "content": system + glue + question}]
            if system not in full and render_conversation(tokenizer, merged, True) == opening:
                _system_glue[template] = glue
        except BadRecord:  # a template without system turns
            return None
    return _system_glue[template]


def _to_messages(value: Response, role: str) -> list[Message]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def has_chat_template(tokenizer: Any) -> bool:
    """Return whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def describe_missing_template(tokenizer: Any) -> Sequence[str]:
    """Return a notice for a tokenizer without a chat template; nothing if it has one."""
    if has_chat_template(tokenizer):
        return ()
    eos = tokenizer.eos_token
    end = f"the last answer ends with {eos}" if eos else "nothing ends an answer, since it has no EOS token either"
    return [
        'the tokenizer has no chat template: dialogs are written as "\\n\\nHuman: ... \\n\\nAssistant: ..." and '
        f"{end} (model.chat_template names another form; human_assistant ends each answer)"
    ]


def messages_to_transcript(messages: Iterable[Message]) -> str:
    """Return messages as a transcript, with the system text in front."""
    text = ""
    for message in messages:
        if message["role"] == "system":
            text += f"\n\n{message['content']}" if text else message["content"]
        else:
            text += f"\n\n{_ROLE_TO_SPEAKER[message['role']]}: {message['content']}"
    return text


def to_content_parts(message: Message) -> dict[str, Any]:
    """Return the message in typed parts, as templates of vision-language models read it.

    The line break between a text and an image is dropped: the template adds its own.
    """
    texts = message["content"].split(IMAGE_PLACEHOLDER)
    parts: list[dict[str, str]] = []
    for at, text in enumerate(texts):
        text = text.removeprefix("\n") if at else text
        text = text.removesuffix("\n") if at < len(texts) - 1 else text
        parts += [{"type": "text", "text": text}] if text or len(texts) == 1 else []
        parts += [{"type": "image"}] if at < len(texts) - 1 else []
    return {**message, "content": parts}


@dataclass(frozen=True)
class PlaceholderExpansion:
    """Images of a chunk of samples, in the form in which they appear in the texts."""

    vision_processor: VisionProcessor
    image_texts: Sequence[Sequence[str]]
    """For each sample the expanded text of each of its images, in order."""

    def expand(self, index: int, text: str) -> tuple[str, Shifts]:
        """Return the text of sample `index` with its placeholders expanded, and the shifts.

        Raises BadRecord if the text has more or fewer placeholders than the sample has images.
        """
        return self.vision_processor.expand_images(text, self.image_texts[index])

    def mask_image_tokens(self, ids: list[int], loss_mask: list[int]) -> list[int]:
        """Return the loss mask with 0 for every token that belongs to an image."""
        image_ids = self.vision_processor.image_related_ids
        return [0 if token in image_ids else mask for token, mask in zip(ids, loss_mask, strict=True)]

    def check_truncation(
        self, index: int, example: dict[str, Any] | BadRecord, limit_name: str
    ) -> dict[str, Any] | BadRecord:
        """Return the example, or a BadRecord if truncation removed a part of an image.

        `limit_name`: the limit, for the message.
        """
        if isinstance(example, BadRecord):
            return example
        processor = self.vision_processor
        needed = sum(processor.count_in_text(text) for text in self.image_texts[index])
        # Truncation removes tokens only, so a complete image is one whose tokens are all there.
        for name in ID_COLUMNS & example.keys():
            # Counted by special ids, since line breaks around an image occur in text too.
            found = processor.count_image_ids(example[name])
            if found < needed:
                return BadRecord(
                    f"its images take {needed} tokens, and {limit_name} cuts {needed - found} of them off; "
                    "raise it, or remove the record"
                )
            if found > needed:
                return BadRecord(
                    f"its text contains {processor.image_token}, which stands for an image; write it in another way"
                )
        return example


def shift_offset(offset: int, shifts: Shifts) -> int:
    """Return where the character at `offset` of a text is after the expansion with these shifts."""
    return offset + sum(grown for start, grown in shifts if start < offset)


def shift_spans(spans: Sequence[tuple[int, int]], shifts: Shifts) -> tuple[tuple[int, int], ...]:
    """Return where spans of a text are after the expansion with these shifts."""
    return tuple((shift_offset(start, shifts), shift_offset(end, shifts)) for start, end in spans)
