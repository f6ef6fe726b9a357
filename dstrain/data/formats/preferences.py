"""Parsing of preference records in all published forms to prompt, chosen and rejected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dstrain.data.formats.messages import (
    Message,
    common_proper_prefix_length,
    common_word_prefix_length,
    is_transcript,
    json_type_name,
    parse_prompt_transcript,
    parse_transcript,
    read_instruction,
    read_message,
    read_messages,
    read_system,
    read_tools,
    turns_to_messages,
)
from dstrain.data.records import BadRecord
from dstrain.errors import suggest_name

Prompt = str | list[Message]
"""A text that an answer continues as it is, or the messages of a conversation."""
Response = str | list[Message]
"""An answer; a list of messages if the conversations diverge before their last turn."""


SAFETY_KEYS = ("chosen_safe", "rejected_safe")
"""Keys of the labels that say whether an answer is safe."""
_RESPONSE_KEYS = ("response_0", "response_1")


@dataclass(frozen=True)
class Preference:
    """Two answers to a prompt; people preferred the first."""

    prompt: Prompt
    """A text that the answer continues as it is, or a conversation that ends with a user's turn."""
    chosen: Response
    rejected: Response
    margin: float | None = None
    """By how much the chosen answer is better."""
    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the assistant may call, for the chat template."""
    chosen_safe: bool | None = None
    """Safety label of the chosen answer, None if it is unknown or not read."""
    rejected_safe: bool | None = None


PromptChosenRejected = tuple[Prompt, Response, Response]


def to_chosen_rejected(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a PKU-SafeRLHF record as one with `chosen` and `rejected`; other records as they are.

    `better_response_id` gives the chosen one of `response_0` and `response_1`; `is_response_0_safe` and
    `is_response_1_safe` give `chosen_safe` and `rejected_safe`. Raises BadRecord.
    """
    if any(record.get(key) is None for key in _RESPONSE_KEYS) or record.get("chosen") is not None:
        return record
    better = record.get("better_response_id")
    if isinstance(better, bool) or better not in (0, 1):
        raise BadRecord(f"'better_response_id' is {better!r:.40}; write 0 or 1, the number of the better response")
    order = (int(better), 1 - int(better))
    pair = {name: record[_RESPONSE_KEYS[at]] for name, at in zip(("chosen", "rejected"), order, strict=True)}
    labels = {
        name: record[f"is_response_{at}_safe"]
        for name, at in zip(SAFETY_KEYS, order, strict=True)
        if f"is_response_{at}_safe" in record
    }
    return {**{key: value for key, value in record.items() if key not in _RESPONSE_KEYS}, **pair, **labels}


def is_preference_pair(record: Mapping[str, Any]) -> bool:
    """Return whether the record holds two answers, rather than one or none."""
    has_pair = any(record.get(key) is not None for key in ("chosen", "rejected"))
    return has_pair or isinstance(record.get("output"), list)


def read_preference(record: Mapping[str, Any]) -> Preference:
    """Return the preference in a record of any known form. Raises BadRecord."""
    record = to_chosen_rejected(record)
    chosen, rejected = _read_pair(record)
    if record.get("prompt") is not None:
        prompt, chosen, rejected = _split_with_prompt(record["prompt"], chosen, rejected)
    elif key := next((key for key in ("conversations", "messages") if record.get(key) is not None), ""):
        prompt = read_messages(record[key], key)
        chosen, rejected = _read_answer(chosen, "chosen"), _read_answer(rejected, "rejected")
    elif any(record.get(key) is not None for key in ("instruction", "input")):
        prompt = read_instruction(record)
        chosen, rejected = _read_answer(chosen, "chosen"), _read_answer(rejected, "rejected")
    else:
        _reject_null_prompt(record, chosen, rejected)
        prompt, chosen, rejected = _split_common_prompt(chosen, rejected)
    # Checks come after the split, when prompt and answers have the same form in all records.
    prompt = _prepend_system(prompt, record)
    _check_prompt(prompt)
    chosen, rejected = _check_answer(chosen, "chosen"), _check_answer(rejected, "rejected")
    if chosen == rejected:
        raise BadRecord("'chosen' and 'rejected' are the same; remove the record")
    # Messages can only answer messages.
    if isinstance(prompt, str) and not (isinstance(chosen, str) and isinstance(rejected, str)):
        prompt = [{"role": "user", "content": prompt}]
    return Preference(prompt, chosen, rejected, _read_margin(record), read_tools(record))


def _read_pair(record: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return `chosen` and `rejected`, or LLaMA-Factory's older form, the two items of `output`."""
    pair = {key: record.get(key) for key in ("chosen", "rejected")}
    if pair["chosen"] is None and pair["rejected"] is None and record.get("output") is not None:
        output = record["output"]
        if not isinstance(output, list) or len(output) != 2:
            raise BadRecord(f"'output' is {json_type_name(output)}, not two answers; write [chosen, rejected]")
        pair = dict(zip(pair, output, strict=True))
    for key, value in pair.items():
        if value is None and key in record:
            raise BadRecord(f"'{key}' is null; write an answer or remove the record")
        if value is None:
            near = suggest_name(key, [name for name in record if name not in pair])
            raise BadRecord(f"no '{key}' ({near}); write it, or rename a column with data.columns")
    return pair["chosen"], pair["rejected"]


def _reject_null_prompt(record: Mapping[str, Any], chosen: Any, rejected: Any) -> None:
    """Raise BadRecord for plain answers without a prompt.

    Converted files have null in a column that a record lacks: that is fine for conversations, which
    contain the prompt, but plain answers would be trained on without one.
    """
    plain = all(isinstance(answer, str) and not is_transcript(answer) for answer in (chosen, rejected))
    if "prompt" in record and plain:
        raise BadRecord("'prompt' is null; write it, or leave the key out if the answers contain the full text")


def _split_with_prompt(prompt: Any, chosen: Any, rejected: Any) -> PromptChosenRejected:
    """Split where answers follow the prompt, or, as messages or transcripts, start with it."""
    answers = _read_answer(chosen, "chosen"), _read_answer(rejected, "rejected")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise BadRecord("'prompt' is empty; write one, or leave the key out of full dialogs")
        if all(isinstance(answer, str) for answer in answers):
            return _split_text_prompt(prompt, chosen, rejected)
        before: list[Message] = [{"role": "user", "content": prompt}]
    else:
        before = read_messages(prompt, "prompt")
    if any(isinstance(answer, list) and not _continues_prompt(before, answer) for answer in answers):
        return _split_full_conversations(prompt, *answers)
    return before, _strip_prompt(before, answers[0]), _strip_prompt(before, answers[1])


def _split_text_prompt(prompt: str, chosen: str, rejected: str) -> PromptChosenRejected:
    """Split texts; a prompt that is a transcript up to "Assistant:" becomes messages."""
    before = parse_prompt_transcript(prompt)
    if before is None:
        return prompt, chosen, rejected
    if chosen.startswith(prompt.rstrip()) and rejected.startswith(prompt.rstrip()):
        return _split_common_prompt(chosen, rejected)
    return before, chosen.removeprefix(" "), rejected.removeprefix(" ")


def _continues_prompt(prompt: list[Message], answer: list[Message]) -> bool:
    return answer[: len(prompt)] == prompt or (bool(answer) and answer[0]["role"] == "assistant")


def _strip_prompt(prompt: list[Message], answer: Response) -> Response:
    repeats = isinstance(answer, list) and answer[: len(prompt)] == prompt
    return answer[len(prompt) :] if repeats else answer


def _split_full_conversations(prompt: Any, chosen: Response, rejected: Response) -> PromptChosenRejected:
    """Split full conversations whose `prompt` is only their last question, as in UltraFeedback."""
    if isinstance(prompt, str) and isinstance(chosen, list) and isinstance(rejected, list):
        common, *answers = _split_messages(chosen, rejected)
        # The prompt is redundant: accept it only if it is the last question of both.
        if common[-1]["content"].strip() == prompt.strip():
            return common, answers[0], answers[1]
    raise BadRecord(
        "'chosen' or 'rejected' begins with messages that are not 'prompt'; leave 'prompt' out, or "
        "only the answer in 'chosen' and 'rejected'"
    )


def _prepend_system(prompt: Prompt, record: Mapping[str, Any]) -> Prompt:
    """Return the prompt after the record's `system` text, unless it has a system turn of its own."""
    system = read_system(record)
    if not system or (isinstance(prompt, list) and prompt[:1] and prompt[0]["role"] == "system"):
        return prompt
    if isinstance(prompt, list):
        return system + prompt
    if record.get("prompt") is None:
        raise BadRecord(
            "'system' is given with texts that contain the prompt; write 'prompt', "
            "or put 'system' into 'chosen' and 'rejected'"
        )
    return [*system, {"role": "user", "content": prompt}]


def _split_common_prompt(chosen: Any, rejected: Any) -> PromptChosenRejected:
    """Split answers that both contain the full conversation: the common start is the prompt."""
    if isinstance(chosen, list) and isinstance(rejected, list):
        return _split_messages(read_messages(chosen, "chosen"), read_messages(rejected, "rejected"))
    if not (isinstance(chosen, str) and isinstance(rejected, str)):
        raise BadRecord(
            f"'chosen' is {json_type_name(chosen)}, 'rejected' is {json_type_name(rejected)} and there is no 'prompt'; "
            "write two texts or two message lists, or add 'prompt'"
        )
    if chosen == rejected:
        raise BadRecord("'chosen' and 'rejected' are the same; remove the record")
    # Otherwise the common prefix of a transcript and a plain text would become the prompt.
    if is_transcript(chosen) != is_transcript(rejected):
        plain = "rejected" if is_transcript(chosen) else "chosen"
        raise BadRecord(
            f"'{plain}' is not a dialog, but the other is; write \"\\n\\nHuman: … \\n\\nAssistant: …\" in both"
        )
    if is_transcript(chosen):
        left, right = parse_transcript(chosen), parse_transcript(rejected)
        common = common_proper_prefix_length(left, right)
        split = left[:common], left[common:], right[common:]
        prompt, chosen_turns, rejected_turns = (turns_to_messages(turns) for turns in split)
        _check_split(prompt, chosen_turns, rejected_turns)
        return prompt, chosen_turns, rejected_turns
    cut = common_word_prefix_length(chosen, rejected)
    return chosen[:cut], chosen[cut:], rejected[cut:]


def _split_messages(chosen: list[Message], rejected: list[Message]) -> tuple[list[Message], Response, Response]:
    common = common_proper_prefix_length(chosen, rejected)
    _check_split(chosen[:common], chosen[common:], rejected[common:])
    return chosen[:common], chosen[common:], rejected[common:]


def _check_split(prompt: list[Message], chosen: list[Message], rejected: list[Message]) -> None:
    if not prompt:
        raise BadRecord("'chosen' and 'rejected' do not start with the same turn; both must start with the prompt")
    for key, rest in (("chosen", chosen), ("rejected", rejected)):
        if not rest or rest[0]["role"] != "assistant":
            raise BadRecord(
                f"'{key}' has no assistant's turn where the dialogs diverge (turn {len(prompt) + 1}); "
                "both must start with the same prompt and continue with an answer"
            )


def _read_answer(value: Any, key: str) -> Response:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return [read_message(value, key)]
    if isinstance(value, list):
        return read_messages(value, key)
    raise BadRecord(
        f"'{key}' is {json_type_name(value)}, not an answer; write a string, a message or a list of messages"
    )


def _check_prompt(prompt: Prompt) -> None:
    if isinstance(prompt, str):
        return
    if not prompt:
        raise BadRecord("the prompt has no messages; it must end with a user's turn")
    if prompt[-1]["role"] not in ("user", "tool"):
        raise BadRecord(f"the prompt ends with the turn of the {prompt[-1]['role']}; it must end with a user's turn")


def _check_answer(answer: Response, key: str) -> Response:
    """Return the answer, a single message as its text. Raises BadRecord."""
    if isinstance(answer, list):
        if not answer:
            raise BadRecord(f"'{key}' has no messages after the prompt; write an answer or remove the record")
        for message in (answer[0], answer[-1]):
            if message["role"] != "assistant":
                raise BadRecord(
                    f"'{key}' has a turn of the {message['role']} as answer; "
                    "an answer must start and end with an assistant's turn"
                )
    last = answer if isinstance(answer, str) else answer[-1]["content"]
    if not last.strip():
        raise BadRecord(f"'{key}' is an empty answer; write one or remove the record")
    return last if isinstance(answer, str) or len(answer) == 1 else answer


def _read_margin(record: Mapping[str, Any]) -> float | None:
    margin = record.get("margin")
    if margin is None:
        return None
    # bool is a subclass of int.
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise BadRecord(f"'margin' is {margin!r}, not a finite number; write a number or remove it")
    return float(margin)
