"""Dialogs as token ids: rendering, the tokens around them, and cutting to length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from dstrain.data.encoding.rendering import Rendered, count_alike, render
from dstrain.data.encoding.truncation import Dialog, Room, count_before, show_limits
from dstrain.data.formats.preferences import BadRecord, Preference
from dstrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from dstrain.data.vision.expansion import Views

Alphabet = Literal["bytes", "data"]


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

    def without_bos(self, templated: bool, views: Views | None) -> Frame:
        """The frame of a text that a chat template wrote: it has the BOS that the template writes, and no other.

        So have the ids of `apply_chat_template(tokenize=True)`, of servers and of TRL. Processors of models that see images
        (`views`) add a BOS of their own (transformers, ProcessorMixin.apply_chat_template), and a BERT its CLS.
        """
        return replace(self, start=()) if templated and views is None and not self.wraps else self


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

    Prompt and answer are one text, as the model meets them; the answers begin where the two rows and the prompt's own ids
    part, as in TRL's DPOTrainer. `prompt_cut`, `response_cut` and `last_turn_cut` are 1 where something was cut, else 0.
    `views`: the images of each.
    """
    frame = frame_of(tokenizer)
    if max_length <= len(frame.start) + len(frame.end):
        raise DataError(f"data.max_length {max_length} leaves no room for text; make it larger")
    limits = max_length, max_prompt_length
    rendered = [_try_render(tokenizer, preference) for preference in preferences]
    shown = rendered if views is None else [views.in_prompt(at, item) for at, item in enumerate(rendered)]
    ids = iter(_tokenize(tokenizer, [text for item in shown if isinstance(item, Rendered) for text in item.texts]))
    found: list[dict[str, Any] | BadRecord] = []
    for at, item in enumerate(shown):
        if isinstance(item, BadRecord):
            found.append(item)
            continue
        rows = next(ids), next(ids), next(ids)
        before_turn = partial(
            _before_last_turn, tokenizer, preferences[at], (cast(Rendered, rendered[at]), item, rows[1]), (views, at)
        )
        form = frame.without_bos(item.templated, views), item.templated
        found.append(_assemble(rows, form, limits, before_turn))
    if views is None:
        return found
    return [views.whole(at, item, show_limits(*limits)) for at, item in enumerate(found)]


def _try_render(tokenizer: Any, preference: Preference) -> Rendered | BadRecord:
    try:
        return render(tokenizer, preference.prompt, (preference.chosen, preference.rejected), preference.tools)
    except BadRecord as fault:
        return fault


def _before_last_turn(
    tokenizer: Any,
    preference: Preference,
    written: tuple[Rendered, Rendered, list[int]],
    shown: tuple[Views | None, int],
) -> int:
    """How many ids of the chosen row, the last of `written`, stand before the last user turn of the prompt."""
    plain, item, row = written
    views, at = shown
    prompt = preference.prompt
    if isinstance(prompt, str) and plain.templated:  # one user turn
        return 0
    letter = Dialog(tokenizer, prompt, len(prompt), True, preference.tools).last_turn(plain.texts[0])
    letter = letter if views is None else views.moved(at, plain.prompt, letter)
    return count_before(tokenizer, item.texts[1], row, letter)


def _assemble(
    rows: tuple[list[int], list[int], list[int]],
    form: tuple[Frame, bool],
    limits: tuple[int, int | None],
    before_turn: Callable[[], int],
) -> dict[str, Any] | BadRecord:
    """Split, frame and cut the ids of the prompt alone and with each answer; the prompt stays the same for both."""
    frame, templated = form
    alike = [count_alike([rows[0], row]) for row in rows[1:]]
    for key, row, split in zip(("chosen", "rejected"), rows[1:], alike, strict=True):
        if split == len(row):
            return BadRecord(f"'{key}' becomes no token; write an answer or remove the record")
    begin = min(alike)  # a token on the border belongs to the answers, in both rows
    start, prompt = take_start(rows[1][:begin], frame)
    ending = [] if templated and not frame.wraps else list(frame.end)
    bodies = [
        row[begin : len(row) - len(ending)] if ends_with(row[begin:], ending) else row[begin:] for row in rows[1:]
    ]
    end = ending if frame.wraps else []
    answers = bodies if frame.wraps else [body + ending for body in bodies]
    longest = max(map(len, answers))
    room = Room(*limits, len(start), len(end))
    kept = room.keep(len(prompt), longest, lambda: min(begin - before_turn(), len(prompt)))
    if isinstance(kept, BadRecord):
        return kept
    head = start + prompt[len(prompt) - kept.prompt :]
    chosen, rejected = (head + answer[: kept.room] + end for answer in answers)
    cuts = {**kept.cuts, "response_cut": int(longest > kept.room)}
    return {"chosen": chosen, "rejected": rejected, "prompt_length": len(head), **cuts}


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
