"""Dialogs as token ids: rendering, the tokens around them, and cutting to length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from dstrain.data.encoding.rendering import RenderedPrompt, common_prefix_length, render_prompt
from dstrain.data.encoding.truncation import LastTurnFinder, TokenBudget, count_tokens_before, describe_limits
from dstrain.data.formats.preferences import Preference
from dstrain.data.records import BadRecord
from dstrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from dstrain.data.vision.expansion import PlaceholderExpansion

Alphabet = Literal["bytes", "data"]


@dataclass(frozen=True)
class SpecialTokens:
    """The ids around a prompt and its answer."""

    prefix_ids: tuple[int, ...]
    """BOS or CLS, where the tokenizer adds one by itself."""
    suffix_ids: tuple[int, ...]
    """EOS, a part of the answer; or the SEP of a BERT."""
    has_sep: bool
    """True for a BERT: the end is a part of the frame, and no cut takes it away."""
    template_bos_id: int | None = None
    """The BOS that a template may write, though the tokenizer adds none."""

    def for_template(self, used_chat_template: bool, expansion: PlaceholderExpansion | None) -> SpecialTokens:
        """The frame of a text that a chat template wrote: it has the BOS that the template writes, and no other.

        So have the ids of `apply_chat_template(tokenize=True)`, of servers and of TRL. Processors of models that see images
        (`views`) add a BOS of their own (transformers, ProcessorMixin.apply_chat_template), and a BERT its CLS.
        """
        return replace(self, prefix_ids=()) if used_chat_template and expansion is None and not self.has_sep else self


def get_special_tokens(tokenizer: Any) -> SpecialTokens:
    """What the tokenizer adds by itself, seen by asking it; and its EOS, which causal tokenizers rarely add."""
    bare, full = _tokenize(tokenizer, ["a"])[0], tokenizer("a", verbose=False)["input_ids"]
    openers = tokenizer.bos_token_id, tokenizer.cls_token_id
    found = (at for at in range(len(full)) if full[at : at + len(bare)] == bare)
    at = next(found, 0) if bare else sum(token in openers for token in full)
    start, end = tuple(full[:at]), tuple(full[at + len(bare) :])
    if tokenizer.sep_token_id is not None and tokenizer.sep_token_id in end:
        return SpecialTokens(start, end, True)
    eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return SpecialTokens(start, eos, False, tokenizer.bos_token_id)


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
    expansion: PlaceholderExpansion | None = None,
) -> list[dict[str, Any] | BadRecord]:
    """Ids of prompt and answer, as `chosen` and `rejected`, and where both answers begin, as `prompt_length`.

    Prompt and answer are one text, as the model meets them; the answers begin where the two rows and the prompt's own ids
    part, as in TRL's DPOTrainer. `prompt_cut`, `response_cut` and `last_turn_cut` are 1 where something was cut, else 0.
    `views`: the images of each.
    """
    frame = get_special_tokens(tokenizer)
    if max_length <= len(frame.prefix_ids) + len(frame.suffix_ids):
        raise DataError(f"data.max_length {max_length} leaves no room for text; make it larger")
    limits = max_length, max_prompt_length
    rendered = [_try_render(tokenizer, preference) for preference in preferences]
    shown = rendered if expansion is None else [expansion.expand_prompt(at, item) for at, item in enumerate(rendered)]
    ids = iter(
        _tokenize(tokenizer, [text for item in shown if isinstance(item, RenderedPrompt) for text in item.texts])
    )
    found: list[dict[str, Any] | BadRecord] = []
    for at, item in enumerate(shown):
        if isinstance(item, BadRecord):
            found.append(item)
            continue
        rows = next(ids), next(ids), next(ids)
        before_turn = partial(
            _tokens_before_last_turn,
            tokenizer,
            preferences[at],
            (cast(RenderedPrompt, rendered[at]), item, rows[1]),
            (expansion, at),
        )
        form = frame.for_template(item.used_chat_template, expansion), item.used_chat_template
        found.append(_build_example(rows, form, limits, before_turn))
    if expansion is None:
        return found
    return [expansion.check_truncation(at, item, describe_limits(*limits)) for at, item in enumerate(found)]


def _try_render(tokenizer: Any, preference: Preference) -> RenderedPrompt | BadRecord:
    try:
        return render_prompt(tokenizer, preference.prompt, (preference.chosen, preference.rejected), preference.tools)
    except BadRecord as fault:
        return fault


def _tokens_before_last_turn(
    tokenizer: Any,
    preference: Preference,
    rendered: tuple[RenderedPrompt, RenderedPrompt, list[int]],
    expansion_at: tuple[PlaceholderExpansion | None, int],
) -> int:
    """How many ids of the chosen row, the last of `written`, stand before the last user turn of the prompt."""
    plain, item, row = rendered
    views, at = expansion_at
    prompt = preference.prompt
    if isinstance(prompt, str) and plain.used_chat_template:  # one user turn
        return 0
    letter = LastTurnFinder(tokenizer, prompt, len(prompt), True, preference.tools).find_last_turn(plain.texts[0])
    letter = letter if views is None else views.map_offset(at, plain.prompt, letter)
    return count_tokens_before(tokenizer, item.texts[1], row, letter)


def _build_example(
    row_ids: tuple[list[int], list[int], list[int]],
    template_info: tuple[SpecialTokens, bool],
    limits: tuple[int, int | None],
    get_last_turn_start: Callable[[], int],
) -> dict[str, Any] | BadRecord:
    """Split, frame and cut the ids of the prompt alone and with each answer; the prompt stays the same for both."""
    frame, templated = template_info
    alike = [common_prefix_length([row_ids[0], row]) for row in row_ids[1:]]
    for key, row, split in zip(("chosen", "rejected"), row_ids[1:], alike, strict=True):
        if split == len(row):
            return BadRecord(f"'{key}' becomes no token; write an answer or remove the record")
    begin = min(alike)  # a token on the border belongs to the answers, in both rows
    start, prompt = split_bos(row_ids[1][:begin], frame)
    ending = [] if templated and not frame.has_sep else list(frame.suffix_ids)
    bodies = [
        row[begin : len(row) - len(ending)] if has_suffix(row[begin:], ending) else row[begin:] for row in row_ids[1:]
    ]
    end = ending if frame.has_sep else []
    answers = bodies if frame.has_sep else [body + ending for body in bodies]
    longest = max(map(len, answers))
    room = TokenBudget(*limits, len(start), len(end))
    kept = room.truncate(len(prompt), longest, lambda: min(begin - get_last_turn_start(), len(prompt)))
    if isinstance(kept, BadRecord):
        return kept
    head = start + prompt[len(prompt) - kept.prompt_tokens :]
    chosen, rejected = (head + answer[: kept.remaining_tokens] + end for answer in answers)
    cuts = {**kept.cuts, "response_cut": int(longest > kept.remaining_tokens)}
    return {"chosen": chosen, "rejected": rejected, "prompt_length": len(head), **cuts}


def split_bos(ids: list[int], special_tokens: SpecialTokens) -> tuple[list[int], list[int]]:
    """The ids that no cut takes from the front, and the prompt without them where the template wrote them."""
    start = list(special_tokens.prefix_ids)
    if start and ids[: len(start)] == start:
        return start, ids[len(start) :]
    if special_tokens.template_bos_id is not None and ids[:1] == [special_tokens.template_bos_id]:
        return ids[:1], ids[1:]
    return start, ids


def has_suffix(ids: list[int], suffix: list[int]) -> bool:
    return bool(suffix) and ids[-len(suffix) :] == suffix


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
