"""Conversations and prompts of all known record forms."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from dstrain.data.formats.messages import (
    MESSAGES_KEYS,
    ROLE_ALIASES,
    Message,
    get_turn_pair,
    is_null_image,
    is_transcript,
    parse_prompt_transcript,
    parse_transcript,
    prepend_system,
    read_history,
    read_instruction,
    read_messages,
    read_text,
    read_tools,
    turns_to_messages,
)
from dstrain.data.formats.preferences import (
    QUESTION_KEYS,
    Prompt,
    is_preference_pair,
    read_preference,
    to_chosen_rejected,
)
from dstrain.data.records import Record, nan_to_null
from dstrain.errors import BadRecord

if TYPE_CHECKING:
    import torch


class SoftInputs(Protocol):
    """Inputs of a model that stand in its ids as tokens without a text, such as a time series."""

    @property
    def num_tokens(self) -> int:
        """Tokens that they stand for."""

    @staticmethod
    def stack(inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Return the tensors of a batch of such inputs, by their names in the model's `forward`."""


MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
MEDIA_PART_TYPES = ("image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio")
LABEL_KEYS = ("label", "kto_tag")
"""Keys of an unpaired preference's label: of TRL and of LLaMA-Factory."""


@dataclass(frozen=True)
class Conversation:
    """A conversation, some turns of which are trained on."""

    messages: list[Message]
    trained_turns: tuple[int, ...]
    """Indices of the assistant's messages that are trained on, in order; at least one."""
    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the assistant may call, for the chat template."""


@dataclass(frozen=True)
class PromptCompletion:
    """A text that is trained on as it is, after another that is not."""

    prompt: str
    """Empty if all of the text is trained on."""
    answer: str

    def to_conversation(self) -> Conversation:
        """Return prompt and answer as two messages; the space between them belongs to neither."""
        answer = self.answer.removeprefix(" ")
        return Conversation([_make_message("user", self.prompt), _make_message("assistant", answer)], (1,))


Sample = Conversation | PromptCompletion


def get_message_field(message: Message, name: str) -> Any:
    """Return an extra field of a message; None if it has none of this name."""
    return cast("dict[str, Any]", message).get(name)


def read_conversation(record: Mapping[str, Any]) -> Sample:
    """Return the sample in a record of any known form. Raises BadRecord."""
    record = nan_to_null(record)
    _reject_media(record)
    # Training on an answer that people rejected would be the opposite of what is meant.
    if unwanted := next((key for key in LABEL_KEYS if _is_unwanted(record, key)), None):
        raise BadRecord(
            f"'{unwanted}' is {json.dumps(record[unwanted])}: the answer was not wanted; remove the record, or train on both with task kto"
        )
    record = to_chosen_rejected(record)
    if is_preference_pair(record):
        return _from_preference(record)
    for keys, read in FORMAT_READERS.items():
        if record.present.issuperset(keys):
            return read(record)
    raise BadRecord(_unknown_form_message(record))


def _is_unwanted(record: Record, key: str) -> bool:
    """Return whether a label says that the answer was not wanted; a class 0 of a text is no such label."""
    value = dict.get(record, key)
    if isinstance(value, str):
        return value.strip().lower() == "false"
    is_flag = isinstance(value, int | float) and value in (0, 1)
    is_of_answer = isinstance(value, bool) or key == "kto_tag" or "completion" in record.present
    return is_flag and is_of_answer and not record[key]


def _unknown_form_message(record: Record) -> str:
    nulls = [key for first, *rest in FORMAT_READERS for key in (first, *rest) if key in record and record[key] is None]
    if nulls and not any(first in record.present for first, *_ in FORMAT_READERS):
        return f"'{nulls[0]}' is null; write it, or remove the record"
    # Report the form that is nearly complete, such as a prompt without a completion.
    halves = [(first, second) for first, *rest in FORMAT_READERS for second in rest if first in record.present]
    # A space around a name would not be seen.
    keys = ", ".join(key if key == key.strip() else repr(key) for key in record) or "none"
    problem = f"'{halves[0][0]}' comes without '{halves[0][1]}'" if halves else f"the keys are {keys}"
    return f"no conversation: {problem}; write 'messages', or rename columns with data.columns"


def _from_preference(record: Record) -> Sample:
    """Return the chosen answer, trained on, after its prompt, which is not."""
    preference = read_preference(record)
    record.used.pop(record.origins.get("rejected", "rejected"), None)
    if isinstance(preference.prompt, str):
        assert isinstance(preference.chosen, str), "messages answer messages"
        return PromptCompletion(preference.prompt, preference.chosen)
    answer = (
        [_make_message("assistant", preference.chosen)] if isinstance(preference.chosen, str) else preference.chosen
    )
    return _make_conversation([*preference.prompt, *answer], "chosen", len(preference.prompt), preference.tools)


def _messages_reader(key: str) -> Callable[[Record], Sample]:
    def read(record: Record) -> Conversation:
        messages = prepend_system([*read_history(record), *read_messages(record[key], key)], record)
        return _make_conversation(messages, key, tools=read_tools(record))

    return read


def _completion_reader(key: str) -> Callable[[Record], Sample]:
    """Return a reader of two texts, the second a continuation, or of two message lists.

    The second is trained on.
    """

    def read(record: Record) -> Sample:
        prompt, answer = record.read("prompt", key)
        if isinstance(prompt, str) and not prompt.strip():
            raise BadRecord("'prompt' is empty; write one, or call the answer 'text' to train on it alone")
        history, tools = read_history(record), read_tools(record)
        before = prepend_system(history, record)
        # Plain texts have no place for other turns and tools.
        if isinstance(prompt, str) and isinstance(answer, str) and not before and not tools:
            return _read_text_completion(prompt, answer, key)
        question = _messages_or_text(prompt, "prompt", "user")
        reply = _messages_or_text(answer, key, "assistant")
        before = prepend_system([*history, *question], record)
        if [message["role"] for message in (*before[-1:], *reply[:1])] == ["assistant", "assistant"]:
            raise BadRecord(
                "the prompt ends with a turn of the assistant, which a chat template closes before the answer; write its text "
                f"at the start of '{key}', or all turns as 'messages'"
            )
        return _make_conversation(before + reply, key, len(before), tools)

    return read


def _read_text_completion(prompt: str, answer: str, key: str) -> Sample:
    _check_not_empty(answer, f"'{key}'")
    messages = parse_prompt_transcript(prompt)
    if messages is None:
        return PromptCompletion(prompt, answer)
    reply = _make_message("assistant", answer.removeprefix(" "))
    return _make_conversation([*messages, reply], key, len(messages))


def _messages_or_text(value: Any, key: str, role: str) -> list[Message]:
    return [_make_message(role, value)] if isinstance(value, str) else read_messages(value, key)


def _answer_reader(read_question: Callable[[Record], list[Message]], key: str) -> Callable[[Record], Sample]:
    """Return a reader of the messages of a question, and of the answer under `key`."""

    def read(record: Record) -> Sample:
        question = read_question(record)
        messages = prepend_system([*question, _make_message("assistant", read_text(record[key], key))], record)
        return _make_conversation(messages, key, tools=read_tools(record))

    return read


def _question_reader(key: str) -> Callable[[Record], list[Message]]:
    return lambda record: [*read_history(record), _make_message("user", read_text(record[key], key))]


def _from_text(record: Record) -> Sample:
    """Return a transcript with its assistant turns trained on, or any other text, all trained on."""
    text = read_text(record["text"], "text")
    _check_not_empty(text, "'text'")
    if is_transcript(text):
        return _make_conversation(turns_to_messages(parse_transcript(text)), "text")
    return PromptCompletion("", text)


FORMAT_READERS: dict[tuple[str, ...], Callable[[Record], Sample]] = {
    **{(key,): _messages_reader(key) for key in MESSAGES_KEYS},
    # Before `prompt`, which may be a rendering of both, with the answer in it.
    **{
        ("instruction", answer): _answer_reader(read_instruction, answer)
        for answer in ("output", "response", "completion", "answer")
    },
    **{("prompt", answer): _completion_reader(answer) for answer in ("completion", "response", "answer", "output")},
    **{
        (question, answer): _answer_reader(_question_reader(question), answer)
        for question in QUESTION_KEYS
        for answer in ("answer", "response", "completion", "output")
    },
    ("problem", "solution"): _answer_reader(_question_reader("problem"), "solution"),
    ("inputs", "targets"): _answer_reader(_question_reader("inputs"), "targets"),
    ("input", "output"): _answer_reader(read_instruction, "output"),
    ("text",): _from_text,
}
"""Keys that identify a form -> its reader; the first form with all its keys present is used."""


def _make_conversation(
    messages: list[Message], key: str, first_trained: int = 0, tools: tuple[dict[str, Any], ...] = ()
) -> Conversation:
    """Return a conversation that trains on the assistant's turns from `first_trained` on.

    Raises BadRecord if there is no such turn, or one of them is empty.
    """
    turns = [at for at, message in enumerate(messages) if at >= first_trained and message["role"] == "assistant"]
    trained = tuple(at for at in turns if messages[at].get("weight") != 0)
    if not trained:
        raise BadRecord(f"'{key}' has no turn of the assistant to train on; write one or remove the record")
    for at in trained:
        # A turn that only calls tools has no text.
        if not get_message_field(messages[at], "tool_calls"):
            _check_not_empty(messages[at]["content"], f"'{key}' (turn {at + 1} of the dialog)")
    return Conversation(messages, trained, tools)


def _check_not_empty(text: str, label: str) -> None:
    if not text.strip():
        raise BadRecord(f"{label} is an empty answer; write one or remove the record")


def _make_message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _reject_media(record: Record) -> None:
    """Raise BadRecord if the record holds images, video or audio."""
    values = [dict(record.items()).get(key) for key in (*MESSAGES_KEYS, "prompt")]
    turns = [value for value in values if isinstance(value, list)]
    parts = [message.get("content") for turn in turns for message in turn if isinstance(message, Mapping)]
    typed = [part for content in parts if isinstance(content, list) for part in content if isinstance(part, Mapping)]
    media = [key for key in MEDIA_KEYS if key in record.present and not is_null_image(record[key])]
    media += [str(part["type"]) for part in typed if part.get("type") in MEDIA_PART_TYPES]
    if media and media[0].startswith("image"):
        raise BadRecord(f"'{media[0]}' is not text, and sft trains on text only; train on images with task vlm")
    if media:
        raise BadRecord(
            f"'{media[0]}' is neither text nor an image, which is all that can be trained on; remove the record"
        )


DUMMY_ANSWER = "answer"
"""Takes the place of an answer that a record may lack, so that one parser reads both."""
ANSWER_MESSAGE = {"role": "assistant", "content": DUMMY_ANSWER}
ANSWER_KEYS = {
    "instruction": "output",
    "prompt": "completion",
    "question": "answer",
    "query": "response",
    "problem": "solution",
    "inputs": "targets",
    "input": "output",
}
"""Key of the question -> key of its answer."""


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt that a model is to answer."""

    prompt: Prompt
    """A text that the answer continues as it is, or a conversation that ends with another's turn."""
    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the assistant may call, for the chat template."""
    soft_inputs: SoftInputs | None = None
    """Inputs whose soft tokens stand before the prompt."""


def read_prompt(record: Mapping[str, Any]) -> ParsedPrompt:
    """Return the prompt of a record of any known form.

    The last answer of a complete conversation is dropped, and may be missing. Raises BadRecord.
    """
    record = to_chosen_rejected(record)
    pair = is_preference_pair(record)
    text = record["text"] if not pair and "text" in record.present else None
    if isinstance(text, str) and (messages := parse_prompt_transcript(text)):
        return ParsedPrompt(messages)
    sample = read_conversation(record if pair else _with_dummy_answer(record))
    if isinstance(sample, PromptCompletion):
        return ParsedPrompt(sample.prompt or sample.answer)
    prompt = sample.messages[: sample.trained_turns[0 if pair else -1]]
    if not prompt:
        raise BadRecord("nothing is asked before the answer; write a user's turn")
    return ParsedPrompt(prompt, sample.tools)


def _with_dummy_answer(record: Record) -> Record:
    """Return the record with an answer, if it asks something."""
    # A label of false refuses a record for sft, but an unwanted answer has a prompt too.
    full = record.without(*LABEL_KEYS)
    for key in MESSAGES_KEYS:
        turns = dict.get(full, key)
        if isinstance(turns, list):
            last = turns[-1] if turns else None
            if isinstance(last, str):
                return full if len(turns) % 2 == 0 else full.derive({**full, key: [*turns, DUMMY_ANSWER]})
            answered = isinstance(last, Mapping) and (
                get_turn_pair(last) or ROLE_ALIASES.get(str(last.get("role", last.get("from"))).lower()) == "assistant"
            )
            return full if answered else full.derive({**full, key: [*turns, ANSWER_MESSAGE]})
    for key, answer_key in ANSWER_KEYS.items():
        if key in full.present:
            return full.derive({**full, answer_key: DUMMY_ANSWER})
    return full
