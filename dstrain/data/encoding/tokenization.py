"""Tokenizer calls, and a tokenizer trained on the data where a recipe brings none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dstrain.cache import get_or_build
from dstrain.config.rules import MIN_VOCAB_SIZE
from dstrain.data.encoding.answer_spans import ANSWER_SENTINEL, with_sentinel
from dstrain.data.encoding.chat_template import render_conversation
from dstrain.data.formats.messages import HUMAN_PREFIX, common_prefix_length
from dstrain.data.formats.preferences import Prompt
from dstrain.data.records import BadRecord
from dstrain.data.sources.base import Source
from dstrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


CUT_COLUMNS = ("response_cut", "prompt_cut", "last_turn_cut")
"""Columns that count truncated samples."""


def tokenize(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text, without special tokens."""
    if not texts:
        return []
    # verbose=False: samples are truncated later, so texts longer than the model need no warning.
    return tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def tokenize_with_offsets(tokenizer: Any, texts: Sequence[str]) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    """Yield each text's ids and, per token, where its characters start (N,) and end (N,).

    The tokenizer must be a fast one.
    """
    if not texts:
        return
    found = tokenizer(
        list(texts),
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    for ids, offsets in zip(found["input_ids"], found["offset_mapping"], strict=True):
        starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
        # A token without characters of its own counts as part of the character after it.
        yield ids, starts, np.maximum(ends, starts + 1)


def count_tokens_before(tokenizer: Any, text: str, ids: Sequence[int], char_index: int) -> int:
    """Return how many of the text's `ids` end at or before the character at `char_index`."""
    if not char_index:
        return 0
    if not tokenizer.is_fast:
        # Slow tokenizers have no offsets: the ids that the beginning has in common with the whole.
        return common_prefix_length([ids, tokenize(tokenizer, [text[:char_index]])[0]])
    ((_, _, ends),) = tokenize_with_offsets(tokenizer, [text])
    return int(np.argmax([*(ends > char_index), True]))


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids around a prompt and its answer: BOS or CLS, and EOS or SEP."""

    prefix_ids: tuple[int, ...]
    """BOS or CLS, if the tokenizer adds one itself."""
    suffix_ids: tuple[int, ...]
    """EOS, a part of the answer; or the SEP of a BERT."""
    has_sep: bool
    """True for a BERT: the suffix is not a part of the answer and is never truncated."""
    template_bos_id: int | None = None
    """BOS that a chat template may write even if the tokenizer adds none."""

    def for_template(self, used_chat_template: bool, has_images: bool) -> SpecialTokens:
        """Return the special tokens to add to a text, none in front if a chat template wrote it.

        The template writes the BOS itself, as for `apply_chat_template(tokenize=True)`, inference
        servers and TRL. Two exceptions add their own: processors of vision-language models
        (transformers, ProcessorMixin.apply_chat_template) add a BOS, and a BERT adds its CLS.
        """
        if used_chat_template and not has_images and not self.has_sep:
            return replace(self, prefix_ids=())
        return self

    def check_max_length(self, max_length: int) -> None:
        """Raise DataError if `max_length` leaves no token for the text."""
        if max_length <= len(self.prefix_ids) + len(self.suffix_ids):
            raise DataError(f"data.max_length {max_length} leaves no room for text; make it larger")


def get_special_tokens(tokenizer: Any) -> SpecialTokens:
    """Return the special tokens that the tokenizer adds to a text, found by a call, and its EOS.

    EOS is asked for by name, because causal tokenizers rarely add it.
    """
    bare, full = tokenize(tokenizer, ["a"])[0], tokenizer("a", verbose=False)["input_ids"]
    openers = tokenizer.bos_token_id, tokenizer.cls_token_id
    # Where the bare ids stand among those of a full call shows what was put around them.
    starts = (at for at in range(len(full)) if full[at : at + len(bare)] == bare)
    # A vocabulary without "a" gives no ids for it: then count the known first tokens.
    start = next(starts, 0) if bare else sum(token in openers for token in full)
    prefix, suffix = tuple(full[:start]), tuple(full[start + len(bare) :])
    # Only if it was really added: many tokenizers name a SEP that they never write.
    if tokenizer.sep_token_id is not None and tokenizer.sep_token_id in suffix:
        return SpecialTokens(prefix, suffix, True)
    eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return SpecialTokens(prefix, eos, False, tokenizer.bos_token_id)


def split_bos(ids: list[int], special_tokens: SpecialTokens) -> tuple[list[int], list[int]]:
    """Split ids into the first tokens, which truncation never removes, and the rest.

    The prefix is added if the text does not start with it.
    """
    prefix = list(special_tokens.prefix_ids)
    if prefix and ids[: len(prefix)] == prefix:
        return prefix, ids[len(prefix) :]
    if special_tokens.template_bos_id is not None and ids[:1] == [special_tokens.template_bos_id]:
        return ids[:1], ids[1:]
    return prefix, ids


def has_suffix(ids: list[int], suffix: list[int]) -> bool:
    """Return whether `ids` end with `suffix`; False for an empty suffix."""
    return bool(suffix) and ids[-len(suffix) :] == suffix


@dataclass(frozen=True)
class TruncationResult:
    """Sizes of a sample after truncation."""

    prompt_tokens: int
    """Tokens of the prompt that remain, counted from its end."""
    remaining_tokens: int
    """Room for what follows the prompt."""
    cuts: dict[str, int]
    """`prompt_cut`: the prompt was truncated; `last_turn_cut`: its last user turn was. 1 or 0."""


@dataclass(frozen=True)
class TokenBudget:
    """Limits on the tokens of a sample."""

    max_length: int
    max_prompt_length: int | None
    """Tokens of the prompt with its BOS; a limit set by the user, which may cut the last turn."""
    prefix_tokens: int
    """Tokens in front that are never removed: BOS or CLS."""
    suffix_tokens: int = 0
    """Tokens at the end that are never removed: SEP of a BERT."""

    def truncate(
        self, prompt_tokens: int, answer_tokens: int, count_last_turn: Callable[[], int]
    ) -> TruncationResult | BadRecord:
        """Return how many tokens of prompt and answer fit.

        `answer_tokens`: the longer answer of a pair. `count_last_turn` returns the prompt's tokens
        from its last user turn on; called only if something must be removed. A record whose last
        user turn leaves no room for an answer is bad: a sample without its question would teach
        p(answer), not p(answer | question).
        """
        room = self.max_length - self.prefix_tokens - self.suffix_tokens
        most = (
            prompt_tokens
            if self.max_prompt_length is None
            else min(prompt_tokens, max(self.max_prompt_length - self.prefix_tokens, 0))
        )
        if most == prompt_tokens and prompt_tokens + answer_tokens <= room:
            return TruncationResult(prompt_tokens, room - prompt_tokens, {"prompt_cut": 0, "last_turn_cut": 0})
        turn = count_last_turn() if prompt_tokens else 0
        # A limit set by the user may cut even the last turn; max_length alone may not.
        least = min(turn, most)
        # The prompt gives way to the answer, down to its last turn.
        kept = max(min(most, room - answer_tokens), least)
        if kept >= room:
            return BadRecord(self._overflow_message(self.prefix_tokens + least + self.suffix_tokens, least == turn))
        cuts = {"prompt_cut": int(kept < prompt_tokens), "last_turn_cut": int(kept < turn)}
        return TruncationResult(kept, room - kept, cuts)

    def _overflow_message(self, used_tokens: int, is_full_turn: bool) -> str:
        """Return why `used_tokens` of prompt and special tokens leave no room, and the fix."""
        what = "its last user turn and the start of the answer take" if is_full_turn else "its prompt, cut, takes"
        most = self.max_length - 1 - self.suffix_tokens
        less = f", data.max_prompt_length to {most} or less" + (" (then texts of the turn are cut)" * is_full_turn)
        return (
            f"{what} {used_tokens} tokens, and data.max_length {self.max_length} leaves none for the answer; set "
            f"data.max_length to {used_tokens + 1} or more{less}, or remove the record"
        )


def find_last_turn(
    tokenizer: Any,
    prompt: Prompt,
    num_prompt_messages: int,
    text: str,
    *,
    add_generation_prompt: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> int:
    """Return where the last user turn of the prompt starts in the text that was rendered from it; 0 if unknown.

    `prompt`: a text that was rendered as it is, or the messages of the text, of which `num_prompt_messages` come before
    the answer. `add_generation_prompt`: the text ends with what opens the assistant's next answer.
    """
    if isinstance(prompt, str):
        return max(prompt.rfind(HUMAN_PREFIX), 0)
    users = [turn for turn in range(num_prompt_messages) if prompt[turn]["role"] == "user"]
    if not users or not users[-1]:
        return 0
    last, render = users[-1], partial(render_conversation, tokenizer, tools=list(tools) or None)
    with suppress(BadRecord):  # of a template that requires a user's turn
        if text.startswith(before := render(prompt[:last])):
            return len(before)
    # Some templates write the system text inside the first user turn.
    if prompt[last - 1]["role"] == "system":
        return 0
    # Some render a turn differently if others follow: the turn starts where the one before it ends.
    marked, earlier = with_sentinel(prompt[last - 1]), prompt[: last - 1]
    try:
        full = render([*earlier, marked, *prompt[last:]], add_generation_prompt=add_generation_prompt)
        ending = render([*earlier, marked]).partition(ANSWER_SENTINEL)[2]
    except BadRecord:
        return 0
    tail = full.partition(ANSWER_SENTINEL)[2]
    if not tail or not text.endswith(tail):
        return 0
    return len(text) - len(tail) + (len(ending) if tail.startswith(ending) else 0)


def describe_limits(max_length: int, max_prompt_length: int | None) -> str:
    """Return the settings that truncate a sample, for a message."""
    more = "" if max_prompt_length is None else f" (data.max_prompt_length {max_prompt_length})"
    return f"data.max_length {max_length}{more}"


def describe_cuts(report: Mapping[str, Any]) -> str:
    """Return a sentence on the truncated samples of a report; empty if it does not count them."""
    cuts = report.get("cuts") or {}
    if not set(CUT_COLUMNS) <= cuts.keys():
        return ""
    answers, prompts, turns = (int(cuts[name]) for name in CUT_COLUMNS)
    total = f"of {report['kept']} samples"
    if not answers + prompts:
        return f"{total} none was cut to fit data.max_length"
    lost = f", {turns} of them inside of the last user turn (data.max_prompt_length)" if turns else ""
    return f"{total}, {answers} had an answer cut and {prompts} their prompt{lost or ', none its last user turn'}"


MAX_TRAINING_RECORDS = 200_000
Alphabet = Literal["bytes", "data"]
"""Base vocabulary: all 256 bytes, or only those that occur in the texts."""


def load_or_train_tokenizer(
    source: Source,
    extract_texts: Callable[[dict[str, Any]], Iterable[str]],
    texts_name: str,
    vocab_size: int,
    alphabet: Alphabet = "bytes",
) -> Any:
    """Return a byte-level BPE of the source's texts, from the cache if it was trained before.

    `texts_name`: what `extract_texts` is in the key; `alphabet`: as in model.tokenizer. Raises DataError
    if vocab_size is too small.
    """
    from transformers import PreTrainedTokenizerFast

    # Special tokens and the base alphabet are always in the vocabulary.
    if vocab_size < (least := MIN_VOCAB_SIZE[alphabet]):
        kind = "byte-level" if alphabet == "bytes" else "trained"
        raise DataError(f"a {kind} tokenizer has at least {least} entries, not {vocab_size}; raise vocab_size")
    key = {"data": source.digest, "texts": texts_name, "vocab_size": vocab_size, "alphabet": alphabet, "format": 2}

    def build(folder: Path) -> None:
        tokenizer = train_tokenizer(_iter_texts(source, extract_texts), vocab_size, alphabet)
        try:
            tokenizer.save_pretrained(str(folder))
        except Exception as fault:  # the tokenizers library raises a bare Exception for a full disk
            raise OSError(str(fault)) from fault

    return get_or_build("tokenizers", key, build, lambda folder: PreTrainedTokenizerFast.from_pretrained(str(folder)))


def train_tokenizer(texts: Iterable[str], vocab_size: int, alphabet: Alphabet = "bytes") -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of these texts, with `<pad>` and the EOS `</s>`. Deterministic.

    With the alphabet `data`, bytes that occur in no text are unknown: each run of them becomes one
    `<unk>`. Raises DataError if the texts have more different bytes than vocab_size.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    all_bytes = alphabet == "bytes"
    unknown = None if all_bytes else "<unk>"
    tokenizer = Tokenizer(models.BPE(unk_token=unknown, fuse_unk=not all_bytes))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "</s>", *([unknown] if unknown else [])],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()) if all_bytes else [],
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (size := tokenizer.get_vocab_size()) > vocab_size:
        raise DataError(
            f"the letters of the training texts and {unknown} take {size} entries, and vocab_size "
            f"is {vocab_size}; raise it"
        )
    named = {"pad_token": "<pad>", "eos_token": "</s>", **({"unk_token": unknown} if unknown else {})}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def _iter_texts(source: Source, extract_texts: Callable[[dict[str, Any]], Iterable[str]]) -> Iterator[str]:
    for index in range(min(len(source), MAX_TRAINING_RECORDS)):
        try:
            yield from extract_texts(source[index])
        except BadRecord:
            continue  # reported when the examples are encoded
