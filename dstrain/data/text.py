"""Dialogs as token ids: rendering, the tokens around them, and cutting to length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from dstrain.data.dialogs import IMAGE, Message, in_parts, render_messages
from dstrain.data.formats import BadRecord, Preference, Response
from dstrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from dstrain.data.views import Views

Prompt = str | list[Message]
Alphabet = Literal["bytes", "data"]
_OPENER = "\n\nAssistant:"
_PROBE = "probe"


@dataclass(frozen=True)
class Rendered:
    """A prompt and its answers as text; each answer goes on where the prompt ends."""

    prompt: str
    answers: tuple[str, ...]
    templated: bool
    """True where the tokenizer's chat template wrote it: nothing is to be put after the answer."""


@dataclass(frozen=True)
class Frame:
    """The ids around a prompt and its answer."""

    start: tuple[int, ...]
    """BOS or CLS, where the tokenizer adds one by itself."""
    end: tuple[int, ...]
    """EOS, a part of the answer; or the SEP of a BERT."""
    wraps: bool
    """True for a BERT: the end is a part of the frame, and no cut takes it away."""
    begin: int | None = None
    """The BOS that a template may write, though the tokenizer adds none."""


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
    from jinja2 import TemplateError

    said = as_template_takes(tokenizer, messages)
    try:
        return tokenizer.apply_chat_template(said, tools=tools, add_generation_prompt=opened, tokenize=False)
    except (TemplateError, TypeError, KeyError, ValueError) as fault:
        raise BadRecord(f"the tokenizer's chat template refuses the dialog ({fault}); mend the turns") from fault


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
    return Rendered(opening[:start], tuple(text[start:] for text in whole), True)


def count_alike(sequences: Sequence[Any]) -> int:
    """How many letters, or ids, the sequences have in common at their beginning."""
    low, high = min(sequences), max(sequences)
    return next((at for at, one in enumerate(low) if high[at] != one), len(low))


def _as_messages(value: Response, role: str) -> list[Message]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def frame_of(tokenizer: Any) -> Frame:
    """What the tokenizer adds by itself, seen by asking it; and its EOS, which causal tokenizers rarely add."""
    bare, full = _tokenize(tokenizer, ["a"])[0], tokenizer("a", verbose=False)["input_ids"]
    openers = tokenizer.bos_token_id, tokenizer.cls_token_id
    found = (at for at in range(len(full)) if full[at : at + len(bare)] == bare)
    at = next(found, 0) if bare else sum(token in openers for token in full)
    start, end = tuple(full[:at]), tuple(full[at + len(bare) :])
    if tokenizer.sep_token_id is not None and tokenizer.sep_token_id in end:
        return Frame(start, end, True)
    eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return Frame(start, eos, False, tokenizer.bos_token_id)


def _tokenize(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    if not texts:
        return []
    # verbose=False: longer than the model is no news here, for the cut comes later.
    return tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def encode_preference(
    tokenizer: Any, preference: Preference, max_length: int, max_prompt_length: int | None = None
) -> dict[str, Any]:
    """One preference; see `encode_preferences`. Raises BadRecord."""
    example = encode_preferences(tokenizer, [preference], max_length, max_prompt_length)[0]
    if isinstance(example, BadRecord):
        raise example
    return example


def encode_preferences(
    tokenizer: Any,
    preferences: Sequence[Preference],
    max_length: int,
    max_prompt_length: int | None = None,
    views: Views | None = None,
) -> list[dict[str, Any] | BadRecord]:
    """Ids of prompt and answer, as `chosen` and `rejected`, and where both answers begin, as `prompt_length`.

    `prompt_cut` and `response_cut` are 1 where something was cut, else 0. `views`: the images of each.
    """
    frame = frame_of(tokenizer)
    if max_length <= len(frame.start) + len(frame.end):
        raise DataError(f"data.max_length {max_length} leaves no room for text; make it larger")
    rendered = [_try_render(tokenizer, preference) for preference in preferences]
    if views is not None:
        rendered = [views.in_prompt(at, item) for at, item in enumerate(rendered)]
    good = [item for item in rendered if isinstance(item, Rendered)]
    ids = iter(_tokenize(tokenizer, [text for item in good for text in (item.prompt, *item.answers)]))
    limits = max_length, max_prompt_length
    found = [
        item
        if isinstance(item, BadRecord)
        else _assemble((next(ids), next(ids), next(ids)), frame, item.templated, limits)
        for item in rendered
    ]
    return (
        found
        if views is None
        else [views.whole(at, item, f"data.max_length {max_length}") for at, item in enumerate(found)]
    )


def _try_render(tokenizer: Any, preference: Preference) -> Rendered | BadRecord:
    try:
        return render(tokenizer, preference.prompt, (preference.chosen, preference.rejected), preference.tools)
    except BadRecord as fault:
        return fault


def _assemble(
    ids: tuple[list[int], list[int], list[int]], frame: Frame, templated: bool, limits: tuple[int, int | None]
) -> dict[str, Any] | BadRecord:
    """Frame and cut: the prompt from the left, so that the longer answer fits; an answer at its end, if it must be."""
    start, prompt = take_start(ids[0], frame)
    for key, answer in zip(("chosen", "rejected"), ids[1:], strict=True):
        if not answer:
            return BadRecord(f"'{key}' becomes no token; write an answer or remove the record")
    ending = [] if templated and not frame.wraps else list(frame.end)
    bodies = [answer[: len(answer) - len(ending)] if ends_with(answer, ending) else answer for answer in ids[1:]]
    end = ending if frame.wraps else []
    answers = bodies if frame.wraps else [body + ending for body in bodies]
    max_length, max_prompt_length = limits
    room = max_length - len(start) - len(end)
    keep = min(len(prompt), max(room - max(map(len, answers)), 0))
    if max_prompt_length is not None:
        keep = min(keep, max(max_prompt_length - len(start), 0))
    head = start + prompt[len(prompt) - keep :]
    chosen, rejected = (head + answer[:room] + end for answer in answers)
    return {
        "chosen": chosen,
        "rejected": rejected,
        "prompt_length": len(head),
        "prompt_cut": int(keep < len(prompt)),
        "response_cut": int(max(map(len, answers)) > room),
    }


def take_start(prompt: list[int], frame: Frame) -> tuple[list[int], list[int]]:
    """The ids that no cut takes from the front, and the prompt without them where the template wrote them."""
    start = list(frame.start)
    if start and prompt[: len(start)] == start:
        return start, prompt[len(start) :]
    if frame.begin is not None and prompt[:1] == [frame.begin]:
        return prompt[:1], prompt[1:]
    return start, prompt


def ends_with(ids: list[int], ending: list[int]) -> bool:
    return bool(ending) and ids[-len(ending) :] == ending


def train_tokenizer(texts: Iterable[str], vocab_size: int, alphabet: Alphabet = "bytes") -> PreTrainedTokenizerFast:
    """A byte-level BPE of these texts, with `<pad>` and, as EOS, `</s>`; the same for the same texts.

    `data` leaves out the bytes that none of them has; of a word they come in, each run of them is one `<unk>`. Raises
    DataError where the texts have more bytes than fit.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    whole = alphabet == "bytes"
    unknown = None if whole else "<unk>"
    tokenizer = Tokenizer(models.BPE(unk_token=unknown, fuse_unk=not whole))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "</s>", *([unknown] if unknown else [])],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()) if whole else [],
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (size := tokenizer.get_vocab_size()) > vocab_size:
        raise DataError(
            f"the letters of the training texts and {unknown} take {size} entries, and vocab_size is {vocab_size}; raise it"
        )
    named = {"pad_token": "<pad>", "eos_token": "</s>", **({"unk_token": unknown} if unknown else {})}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
