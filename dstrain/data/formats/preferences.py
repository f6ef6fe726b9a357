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
    maybe_parse_json,
    parse_prompt_transcript,
    parse_transcript,
    prepend_system,
    read_history,
    read_instruction,
    read_message,
    read_messages,
    read_system,
    read_text,
    read_tools,
    turns_to_messages,
)
from dstrain.data.records import Record, as_record, nan_to_null
from dstrain.errors import BadRecord, suggest_name

Prompt = str | list[Message]
"""A text that an answer continues as it is, or the messages of a conversation."""
Response = str | list[Message]
"""An answer; a list of messages if the conversations diverge before their last turn."""


SAFETY_KEYS = ("chosen_safe", "rejected_safe")
"""Keys of the labels that say whether an answer is safe."""
QUESTION_KEYS = ("question", "query")
"""Keys of a question as a text: of RLHF-V, SPA-VL, align-anything and Orca; of ms-swift."""
CONVERSATION_KEYS = ("conversations", "messages", "conversation", "context_messages")
"""Keys of the prompt as messages: ShareGPT's, OpenAI's, ms-swift's and OpenRLHF's."""


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
    is_common_prefix: bool = False
    """True where the prompt is no text of its own, but what two texts have in common at the start."""


PromptChosenRejected = tuple[Prompt, Response, Response]


def to_chosen_rejected(record: Mapping[str, Any]) -> Record:
    """Return a record of another published form as one with `chosen` and `rejected`; other records as they are.

    PKU-SafeRLHF and align-anything: `response_0`, `response_1` and `better_response_id`, or `response_1`, `response_2`
    and `overall_response`; `is_response_0_safe` and its like give `chosen_safe` and `rejected_safe`. OpenAI: `input`,
    `preferred_output` and `non_preferred_output`. ms-swift: `messages` with `rejected_response` or
    `rejected_messages`. HelpSteer 3: `context`, `response1`, `response2` and `overall_preference`. Argilla: `chosen_response` and `rejected_response`. RLHF-V: JSON of the pair in `text`. Raises
    BadRecord.
    """
    tracked = nan_to_null(record)
    present = tracked.present
    if "chosen" in present or "rejected" in present:
        return tracked
    if {"response_0", "response_1"} <= present:
        return _from_responses(tracked, ("response_0", "response_1"), "better_response_id", (0, 1))
    if {"response_1", "response_2"} <= present:
        return _from_responses(tracked, ("response_1", "response_2"), "overall_response", (1, 2))
    if {"response1", "response2"} <= present:
        return _from_overall_preference(tracked)
    if {"preferred_output", "non_preferred_output"} <= present:
        value = maybe_parse_json(tracked.get("input"))
        if not isinstance(value, Mapping) or not isinstance(value.get("messages"), list):
            raise BadRecord('\'input\' has no \'messages\'; write {"messages": [{"role", "content"}, …]}')
        if unknown := sorted({*value} - {"messages", "tools", "parallel_tool_calls"}):
            raise BadRecord(f"'input.{unknown[0]}' is not read; remove it")
        pair = {"chosen": tracked["preferred_output"], "rejected": tracked["non_preferred_output"]}
        origins = {
            "chosen": "preferred_output",
            "rejected": "non_preferred_output",
            "prompt": "input",
            "tools": "input",
        }
        rest = tracked.without("input", "preferred_output", "non_preferred_output")
        return rest.derive({**rest, **pair, "prompt": value["messages"], "tools": value.get("tools")}, origins)
    if {"chosen_response", "rejected_response"} <= present:
        return _rename(tracked, {"chosen": "chosen_response", "rejected": "rejected_response"})
    if isinstance(text := dict.get(tracked, "text"), str) and text.lstrip().startswith("{"):
        value = maybe_parse_json(text)
        if isinstance(value, Mapping) and {"chosen", "rejected"} <= value.keys():
            # The keys inside are columns too: each of them is read, or named.
            origins = {key: f"text.{key}" for key in value}
            tracked.columns.update({origins[key]: item for key, item in value.items()})
            tracked.used["text"] = "text"
            return tracked.derive({**tracked.without("text"), **value}, origins)
    if "messages" in present and ("rejected_response" in present or "rejected_messages" in present):
        return _from_rejected_answer(tracked)
    return tracked


def _from_responses(record: Record, keys: tuple[str, str], better_key: str, names: tuple[int, int]) -> Record:
    """Return the pair of two numbered responses, the better one as `chosen`. Raises BadRecord."""
    better = record.get(better_key)
    if better is None:
        problem = f"'{keys[0]}' and '{keys[1]}' come without '{better_key}', the number of the better one"
        raise BadRecord(f"{problem} ({names[0]} or {names[1]}); write it, or rename a column with data.columns")
    if isinstance(better, bool) or better not in names:
        numbers = " or ".join(map(str, names))
        raise BadRecord(f"'{better_key}' is {better!r:.40}; write {numbers}, the number of the better response")
    order = (names.index(better), 1 - names.index(better))
    origins = {name: keys[at] for name, at in zip(("chosen", "rejected"), order, strict=True)}
    for name, at in zip(SAFETY_KEYS, order, strict=True):
        if f"is_{keys[at]}_safe" in record:
            origins[name] = f"is_{keys[at]}_safe"
    return _rename(record, origins)


def _rename(record: Record, origins: Mapping[str, str]) -> Record:
    """Return the record with other keys: new -> old. Renaming a column is not reading it."""
    values = {name: dict.get(record, key) for name, key in origins.items()}
    return record.derive({**record.without(*origins.values()), **values}, origins)


def _from_overall_preference(record: Record) -> Record:
    """Return the pair of two responses; `overall_preference` is below 0 where the first is better. Raises BadRecord."""
    preference = record.get("overall_preference")
    if isinstance(preference, bool) or not isinstance(preference, int | float) or not preference:
        problem = f"'overall_preference' is {preference!r:.40}, which does not say which response is better"
        raise BadRecord(f"{problem}; write a number below 0 for response1, above 0 for response2, or remove the record")
    origins = {"chosen": "response1", "rejected": "response2"}
    if preference > 0:
        origins = {"chosen": "response2", "rejected": "response1"}
    if "context" in record.present:
        origins["prompt"] = "context"
    return _rename(record, origins)


def _from_rejected_answer(record: Record) -> Record:
    """Return the pair of a conversation and another last answer, or another conversation. Raises BadRecord."""
    full = read_messages(record["messages"], "messages")
    if not full or full[-1]["role"] != "assistant":
        raise BadRecord("'messages' does not end with the answer that was preferred; write it, or 'chosen'")
    origins = {"chosen": "messages"}
    if "rejected_messages" in record.present:
        other = read_messages(record["rejected_messages"], "rejected_messages")
        rejected: Any = other if other[: len(full) - 1] == full[:-1] else [*full[:-1], *other]
        origins["rejected"] = "rejected_messages"
    else:
        text = read_text(record["rejected_response"], "rejected_response")
        rejected = [*full[:-1], {"role": "assistant", "content": text}]
        origins["rejected"] = "rejected_response"
    rest = record.without("messages", "rejected_messages", "rejected_response")
    return rest.derive({**rest, "chosen": full, "rejected": rejected}, origins)


def is_preference_pair(record: Mapping[str, Any]) -> bool:
    """Return whether the record holds two answers, rather than one or none."""
    record = as_record(record)
    has_pair = "chosen" in record.present or "rejected" in record.present
    return has_pair or isinstance(dict.get(record, "output"), list)


def read_preference(record: Mapping[str, Any]) -> Preference:
    """Return the preference in a record of any known form. Raises BadRecord."""
    record = to_chosen_rejected(record)
    chosen, rejected, given_prompt, given_margin = record.read("chosen", "rejected", "prompt", "margin")
    chosen, rejected = _check_pair(record, chosen, rejected)
    key = next((key for key in (*CONVERSATION_KEYS, *QUESTION_KEYS) if key in record.present), "")
    is_common_prefix = False
    if given_prompt is not None:
        prompt, chosen, rejected = _split_with_prompt(given_prompt, chosen, rejected)
    elif key in CONVERSATION_KEYS and not _are_full_conversations(chosen, rejected):
        prompt = read_messages(record[key], key)
        chosen, rejected = _read_answer(chosen, "chosen"), _read_answer(rejected, "rejected")
    elif key in QUESTION_KEYS:
        prompt, chosen, rejected = _split_with_prompt(record[key], chosen, rejected)
    elif "instruction" in record.present or "input" in record.present:
        prompt = read_instruction(record)
        chosen, rejected = _read_answer(chosen, "chosen"), _read_answer(rejected, "rejected")
    else:
        _reject_null_prompt(record, chosen, rejected)
        prompt, chosen, rejected = _split_common_prompt(chosen, rejected)
        is_common_prefix = isinstance(prompt, str)
    if "history" in record.present and "instruction" not in record.present:
        prompt = [
            *read_history(record),
            *([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt),
        ]
    # Checks come after the split, when prompt and answers have the same form in all records.
    prompt = _prepend_system(prompt, record)
    _check_prompt(prompt)
    chosen, rejected = _check_answer(chosen, "chosen"), _check_answer(rejected, "rejected")
    if chosen == rejected:
        raise BadRecord("'chosen' and 'rejected' are the same; remove the record")
    # Messages can only answer messages.
    if isinstance(prompt, str) and not (isinstance(chosen, str) and isinstance(rejected, str)):
        prompt = [{"role": "user", "content": prompt}]
    return Preference(
        prompt, chosen, rejected, _read_margin(given_margin), read_tools(record), is_common_prefix=is_common_prefix
    )


def _are_full_conversations(chosen: Any, rejected: Any) -> bool:
    """Return whether both answers are conversations that begin before the answer: then they hold the prompt."""
    return all(
        isinstance(answer, list)
        and len(answer) > 1
        and isinstance(answer[0], Mapping)
        and str(answer[0].get("role", answer[0].get("from"))).lower() in ("system", "developer", "user", "human")
        for answer in (chosen, rejected)
    )


def _check_pair(record: Record, chosen: Any, rejected: Any) -> tuple[Any, Any]:
    """Return both answers, or those of LLaMA-Factory's older form, the two items of `output`. Raises BadRecord."""
    pair = {"chosen": chosen, "rejected": rejected}
    if chosen is None and rejected is None and "output" in record.present:
        output = record["output"]
        if not isinstance(output, list) or len(output) != 2:
            raise BadRecord(f"'output' is {json_type_name(output)}, not two answers; write [chosen, rejected]")
        pair = dict(zip(pair, output, strict=True))
    for key, value in pair.items():
        if value is None and key in record:
            raise BadRecord(f"'{key}' is null; write an answer or remove the record")
        if value is None:
            near = suggest_name(key, [name for name in record if name not in pair])
            near = near.replace("known here:", "its keys are:")
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


def _prepend_system(prompt: Prompt, record: Record) -> Prompt:
    """Return the prompt after the record's `system` text. Raises BadRecord where it has another system turn."""
    system = read_system(record)
    if not system:
        return prompt
    if isinstance(prompt, list):
        messages = prepend_system(prompt, record)
        if len(messages) > 1 and messages[0]["role"] == messages[1]["role"] == "system":
            raise BadRecord("the prompt has a system turn, and 'system' is another text; keep one of them")
        return messages
    if not record.present.intersection(("prompt", *QUESTION_KEYS)):
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
        if any(message.get("weight") == 0 for message in answer):
            raise BadRecord(f"'{key}' has a turn that must not be trained on, and an answer is compared as a whole")
    last = answer if isinstance(answer, str) else answer[-1]["content"]
    calls = not isinstance(answer, str) and bool(answer[-1].get("tool_calls"))
    if not last.strip() and not calls:
        raise BadRecord(f"'{key}' is an empty answer; write one or remove the record")
    is_text = isinstance(answer, str) or (len(answer) == 1 and not {*answer[0]} - {"role", "content", "weight"})
    return last if is_text else answer


def _read_margin(margin: Any) -> float | None:
    if margin is None:
        return None
    # bool is a subclass of int.
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise BadRecord(f"'margin' is {margin!r}, not a finite number; write a number or remove it")
    return float(margin)
