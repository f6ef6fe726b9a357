"""Truncation of samples to a token budget that keeps the last user turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dstrain.data.encoding.answer_spans import ANSWER_SENTINEL, with_sentinel
from dstrain.data.encoding.rendering import render_conversation
from dstrain.data.formats.preferences import Prompt
from dstrain.data.formats.transcripts import HUMAN_PREFIX
from dstrain.data.records import BadRecord

CUT_COLUMNS = ("response_cut", "prompt_cut", "last_turn_cut")
"""Columns that count truncated samples."""


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
        less = "" if is_full_turn else f", data.max_prompt_length to {most} or less"
        return (
            f"{what} {used_tokens} tokens, and data.max_length {self.max_length} leaves none for the answer; set "
            f"data.max_length to {used_tokens + 1} or more{less}, or remove the record"
        )


@dataclass(frozen=True)
class LastTurnFinder:
    """Locates the last user turn of a prompt in the text that was rendered from it."""

    tokenizer: Any
    prompt: Prompt
    """A text that was rendered as it is, or the messages of the text."""
    num_prompt_messages: int
    """Number of messages before the answer."""
    add_generation_prompt: bool = False
    """True if the text ends with what opens the assistant's next answer."""
    tools: Sequence[Mapping[str, Any]] = ()

    def find_last_turn(self, text: str) -> int:
        """Return where the last user turn of the text starts; 0 if unknown, so that all is kept."""
        if isinstance(self.prompt, str):
            return max(self.prompt.rfind(HUMAN_PREFIX), 0)
        users = [turn for turn in range(self.num_prompt_messages) if self.prompt[turn]["role"] == "user"]
        if not users or not users[-1]:
            return 0
        last = users[-1]
        try:
            before = self._render_fn(self.prompt[:last])
        except BadRecord:  # a template that requires a user's turn
            before = None
        if before is not None and text.startswith(before):
            return len(before)
        # Some templates write the system text inside the first user turn.
        return 0 if self.prompt[last - 1]["role"] == "system" else self._find_by_sentinel(last, text)

    def _find_by_sentinel(self, index: int, text: str) -> int:
        """Return where turn `index` starts: after the end of the turn before it, found by a sentinel.

        For templates that render a turn differently if others follow.
        """
        marked = with_sentinel(self.prompt[index - 1])  # type: ignore[arg-type]  # a list of messages here
        before, after = self.prompt[: index - 1], self.prompt[index:]
        try:
            full = self._render_fn([*before, marked, *after], add_generation_prompt=self.add_generation_prompt)
            _, _, tail = full.partition(ANSWER_SENTINEL)
            _, _, ending = self._render_fn([*before, marked]).partition(ANSWER_SENTINEL)
        except BadRecord:
            return 0
        if not tail or not text.endswith(tail):
            return 0
        return len(text) - len(tail) + (len(ending) if tail.startswith(ending) else 0)

    @property
    def _render_fn(self) -> Callable[..., str]:
        return partial(render_conversation, self.tokenizer, tools=list(self.tools) or None)


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
