"""What of a sample is cut so that it fits, and what stays: the last user turn and what opens the answer to it.

Older turns are cut from the left first, then the answer at its end. A record of which the last user turn leaves no room for
an answer is bad: a sample without its question teaches p(answer), not p(answer | question).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dstrain.data.encoding.answer_spans import ANSWER_SENTINEL, with_sentinel
from dstrain.data.encoding.rendering import Prompt, common_prefix_length, render_conversation
from dstrain.data.formats.transcripts import HUMAN_PREFIX
from dstrain.data.records import BadRecord

CUT_COLUMNS = ("response_cut", "prompt_cut", "last_turn_cut")
"""The names under which cuts are counted."""


@dataclass(frozen=True)
class TruncationResult:
    """What a cut leaves of a sample."""

    prompt_tokens: int
    """Tokens of the prompt, its last ones."""
    remaining_tokens: int
    """Tokens for what follows the prompt."""
    cuts: dict[str, int]
    """`prompt_cut`: something of the prompt was cut; `last_turn_cut`: something of its last user turn. 1 or 0."""


@dataclass(frozen=True)
class TokenBudget:
    """The tokens that a sample may take."""

    max_length: int
    max_prompt_length: int | None
    """Tokens of the prompt with its BOS; what the user asks for, though it may cut the last turn."""
    prefix_tokens: int
    """Tokens that no cut takes from the front: BOS or CLS."""
    suffix_tokens: int = 0
    """Tokens that no cut takes from the end: a BERT's SEP."""

    def truncate(
        self, prompt_tokens: int, answer_tokens: int, count_last_turn: Callable[[], int]
    ) -> TruncationResult | BadRecord:
        """`prompt`, `answer`: their tokens, the answer the longer one of a pair; `last_turn()`: those of the prompt from
        its last user turn on, asked for only where something is to be cut.
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
        least = min(turn, most)
        kept = max(min(most, room - answer_tokens), least)
        if kept >= room:
            return BadRecord(self._overflow_message(self.prefix_tokens + least + self.suffix_tokens, least == turn))
        return TruncationResult(
            kept, room - kept, {"prompt_cut": int(kept < prompt_tokens), "last_turn_cut": int(kept < turn)}
        )

    def _overflow_message(self, used_tokens: int, is_full_turn: bool) -> str:
        """Why `held` tokens of prompt and frame leave no token for the answer, and what to do."""
        what = "its last user turn and what opens the answer take" if is_full_turn else "its prompt, cut, takes"
        most = self.max_length - 1 - self.suffix_tokens
        less = "" if is_full_turn else f", data.max_prompt_length to {most} or less"
        return (
            f"{what} {used_tokens} tokens, and data.max_length {self.max_length} leaves none for the answer; set "
            f"data.max_length to {used_tokens + 1} or more{less}, or remove the record"
        )


@dataclass(frozen=True)
class LastTurnFinder:
    """A prompt in the text that was made of it."""

    tokenizer: Any
    prompt: Prompt
    """A text that was written as it stands, or the messages of the text."""
    num_prompt_messages: int
    """How many of the messages stand in front of the answer."""
    add_generation_prompt: bool = False
    """Whether what stands in front of the assistant's next answer ends the text."""
    tools: Sequence[Mapping[str, Any]] = ()

    def find_last_turn(self, text: str) -> int:
        """The letter of the text at which the last user turn begins; 0 where that cannot be told, so that all stays."""
        if isinstance(self.prompt, str):
            return max(self.prompt.rfind(HUMAN_PREFIX), 0)
        users = [at for at in range(self.num_prompt_messages) if self.prompt[at]["role"] == "user"]
        if not users or not users[-1]:
            return 0
        at = users[-1]
        try:
            before = self._render_fn(self.prompt[:at])
        except BadRecord:  # a template that wants a user's turn
            before = None
        if before is not None and text.startswith(before):
            return len(before)
        # The system text of some templates stands inside of the first user turn.
        return 0 if self.prompt[at - 1]["role"] == "system" else self._find_by_sentinel(at, text)

    def _find_by_sentinel(self, index: int, text: str) -> int:
        """For templates that write a turn otherwise where others follow: a mark shows where the turn before it ends."""
        said = with_sentinel(self.prompt[index - 1])  # type: ignore[arg-type]  # messages, as last_turn has seen
        before, after = self.prompt[: index - 1], self.prompt[index:]
        try:
            _, _, tail = self._render_fn([*before, said, *after], add_generation_prompt=self.add_generation_prompt).partition(
                ANSWER_SENTINEL
            )
            _, _, ending = self._render_fn([*before, said]).partition(ANSWER_SENTINEL)
        except BadRecord:
            return 0
        if not tail or not text.endswith(tail):
            return 0
        return len(text) - len(tail) + (len(ending) if tail.startswith(ending) else 0)

    @property
    def _render_fn(self) -> Callable[..., str]:
        return partial(render_conversation, self.tokenizer, tools=list(self.tools) or None)


def describe_limits(max_length: int, max_prompt_length: int | None) -> str:
    """The settings that cut a sample, for a sentence about what they cut."""
    more = "" if max_prompt_length is None else f" (data.max_prompt_length {max_prompt_length})"
    return f"data.max_length {max_length}{more}"


def count_tokens_before(tokenizer: Any, text: str, ids: Sequence[int], char_index: int) -> int:
    """How many of the text's ids end at or before a letter of it."""
    ask = partial(tokenizer, add_special_tokens=False, return_attention_mask=False, verbose=False)
    if not char_index:
        return 0
    if not tokenizer.is_fast:
        return common_prefix_length([ids, ask(text[:char_index])["input_ids"]])
    starts, ends = np.array(ask(text, return_offsets_mapping=True)["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    return int(np.argmax([*(np.maximum(ends, starts + 1) > char_index), True]))


def describe_cuts(report: Mapping[str, Any]) -> str:
    """What was cut of the samples that a report counts, in a sentence; empty where nothing counts cuts."""
    cuts = report.get("cuts") or {}
    if not set(CUT_COLUMNS) <= cuts.keys():
        return ""
    answers, prompts, turns = (int(cuts[name]) for name in CUT_COLUMNS)
    total = f"of {report['kept']} samples"
    if not answers + prompts:
        return f"{total} none was cut to fit data.max_length"
    lost = f", {turns} of them inside of the last user turn (data.max_prompt_length)" if turns else ""
    return f"{total}, {answers} had an answer cut and {prompts} their prompt{lost or ', none its last user turn'}"
