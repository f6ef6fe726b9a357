"""A tokenizer's chat template: its choice, its variables, and conversations as the text that it writes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from dstrain.data.formats.messages import IMAGE_PLACEHOLDER, Message
from dstrain.errors import BadRecord, DataError, Fault, RecipeError

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
CLOCK_FUNCTION = "strftime_now"
"""Function of transformers' templates that formats the present time."""
_TIME_ATTRIBUTE = "template_time"
_CALL = re.compile(rf"{CLOCK_FUNCTION}\s*\(\s*(?:format\s*=\s*)?(\"[^\"]*\"|'[^']*')\s*\)")
"""A call with the format written out, as published templates have it."""


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
    {
        *(
            "messages",
            "tools",
            "documents",
            "add_generation_prompt",
            "bos_token",
            "eos_token",
            "pad_token",
            "unk_token",
        ),
        CLOCK_FUNCTION,
    }
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


_ROLE_TO_SPEAKER = {"user": "Human", "assistant": "Assistant", "tool": "Tool"}
ASSISTANT_PREFIX = "\n\nAssistant:"
_PROBE_TEXT = "probe"


def has_chat_template(tokenizer: Any) -> bool:
    """Return whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


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
        return messages_to_transcript(messages) + (ASSISTANT_PREFIX if add_generation_prompt else "")
    from jinja2 import TemplateSyntaxError

    said = to_template_messages(tokenizer, messages)
    apply = partial(
        tokenizer.apply_chat_template,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
        chat_template=get_template(tokenizer, tools),
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


def get_template(tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Return the tokenizer's template for conversations with these tools, with the run's time written in it."""
    return write_time(tokenizer, tokenizer.get_chat_template(None, tools))


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


def messages_to_transcript(messages: Iterable[Message]) -> str:
    """Return messages as a transcript, with the system text in front."""
    text = ""
    for message in messages:
        if message["role"] == "system":
            text += f"\n\n{message['content']}" if text else message["content"]
        else:
            text += f"\n\n{_ROLE_TO_SPEAKER[message['role']]}: {message['content']}"
    return text


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


def reads_clock(tokenizer: Any) -> bool:
    """Return whether the tokenizer's chat template writes the time."""
    return bool(_CALL.search(_get_text(tokenizer)))


def set_template_time(tokenizer: Any, time: datetime) -> None:
    """Let the tokenizer's chat template write this time in the place of the present one, in `write_time`."""
    setattr(tokenizer, _TIME_ATTRIBUTE, time)


def write_time(tokenizer: Any, template: str) -> str:
    """Return a template of the tokenizer with the time of `set_template_time` as text; unchanged where none was set."""
    time = getattr(tokenizer, _TIME_ATTRIBUTE, None)
    if time is None:
        return template
    return _CALL.sub(lambda call: json.dumps(time.strftime(call[1][1:-1])), template)


def get_written_times(tokenizer: Any) -> list[str]:
    """Return what the template writes of its time, such as the day; empty where none was set."""
    time = getattr(tokenizer, _TIME_ATTRIBUTE, None)
    if time is None:
        return []
    return sorted({time.strftime(call[1][1:-1]) for call in _CALL.finditer(_get_text(tokenizer))})


def describe_written_times(tokenizer: Any) -> list[str]:
    """Return a sentence on the time that the template writes into every sample; none where it writes none."""
    times = get_written_times(tokenizer)
    if not times:
        return []
    return [
        f"the chat template writes the time: {', '.join(times)} in all samples, also where the run is resumed, evaluated or "
        "generates (model.chat_template_time)"
    ]


def _get_text(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\n".join(template.values())


def tokenizer_fingerprint(tokenizer: Any, with_pad_token: bool = True) -> str:
    """Return a hash of everything that determines the ids of a text, the time that its template writes too, and of the pad token."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # A slow tokenizer has no state as JSON; its vocabulary has to do.
    if backend is None:
        state: Any = sorted(tokenizer.get_vocab().items())
    else:
        state = json.loads(backend.to_str())  # noqa: TID251  of the tokenizers library
        # The last call that padded or truncated leaves these settings behind; ids do not depend on them.
        state = {name: value for name, value in state.items() if name not in ("padding", "truncation")}
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    if not with_pad_token:
        special.pop("pad_token", None)
    parts = [type(tokenizer).__name__, state, special, getattr(tokenizer, "chat_template", None)]
    times = get_written_times(tokenizer)
    if times:
        parts.append(times)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
