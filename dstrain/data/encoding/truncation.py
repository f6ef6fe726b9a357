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

from dstrain.data.encoding.answer_spans import MARK, marked
from dstrain.data.encoding.rendering import Prompt, count_alike, write_dialog
from dstrain.data.formats.messages import BadRecord
from dstrain.data.formats.transcripts import HUMAN

CUTS = ("response_cut", "prompt_cut", "last_turn_cut")
"""The names under which cuts are counted."""


@dataclass(frozen=True)
class Kept:
    """What a cut leaves of a sample."""

    prompt: int
    """Tokens of the prompt, its last ones."""
    room: int
    """Tokens for what follows the prompt."""
    cuts: dict[str, int]
    """`prompt_cut`: something of the prompt was cut; `last_turn_cut`: something of its last user turn. 1 or 0."""


@dataclass(frozen=True)
class Room:
    """The tokens that a sample may take."""

    max_length: int
    max_prompt_length: int | None
    """Tokens of the prompt with its BOS; what the user asks for, though it may cut the last turn."""
    start: int
    """Tokens that no cut takes from the front: BOS or CLS."""
    end: int = 0
    """Tokens that no cut takes from the end: a BERT's SEP."""

    def keep(self, prompt: int, answer: int, last_turn: Callable[[], int]) -> Kept | BadRecord:
        """`prompt`, `answer`: their tokens, the answer the longer one of a pair; `last_turn()`: those of the prompt from
        its last user turn on, asked for only where something is to be cut.
        """
        room = self.max_length - self.start - self.end
        most = prompt if self.max_prompt_length is None else min(prompt, max(self.max_prompt_length - self.start, 0))
        if most == prompt and prompt + answer <= room:
            return Kept(prompt, room - prompt, {"prompt_cut": 0, "last_turn_cut": 0})
        turn = last_turn() if prompt else 0
        least = min(turn, most)
        kept = max(min(most, room - answer), least)
        if kept >= room:
            return BadRecord(self._no_answer(self.start + least + self.end, least == turn))
        return Kept(kept, room - kept, {"prompt_cut": int(kept < prompt), "last_turn_cut": int(kept < turn)})

    def _no_answer(self, held: int, whole_turn: bool) -> str:
        """Why `held` tokens of prompt and frame leave no token for the answer, and what to do."""
        what = "its last user turn and what opens the answer take" if whole_turn else "its prompt, cut, takes"
        most = self.max_length - 1 - self.end
        less = "" if whole_turn else f", data.max_prompt_length to {most} or less"
        return (
            f"{what} {held} tokens, and data.max_length {self.max_length} leaves none for the answer; set "
            f"data.max_length to {held + 1} or more{less}, or remove the record"
        )


@dataclass(frozen=True)
class Dialog:
    """A prompt in the text that was made of it."""

    tokenizer: Any
    prompt: Prompt
    """A text that was written as it stands, or the messages of the text."""
    end: int
    """How many of the messages stand in front of the answer."""
    opened: bool = False
    """Whether what stands in front of the assistant's next answer ends the text."""
    tools: Sequence[Mapping[str, Any]] = ()

    def last_turn(self, text: str) -> int:
        """The letter of the text at which the last user turn begins; 0 where that cannot be told, so that all stays."""
        if isinstance(self.prompt, str):
            return max(self.prompt.rfind(HUMAN), 0)
        users = [at for at in range(self.end) if self.prompt[at]["role"] == "user"]
        if not users or not users[-1]:
            return 0
        at = users[-1]
        try:
            before = self._write(self.prompt[:at])
        except BadRecord:  # a template that wants a user's turn
            before = None
        if before is not None and text.startswith(before):
            return len(before)
        # The system text of some templates stands inside of the first user turn.
        return 0 if self.prompt[at - 1]["role"] == "system" else self._by_mark(at, text)

    def _by_mark(self, at: int, text: str) -> int:
        """For templates that write a turn otherwise where others follow: a mark shows where the turn before it ends."""
        said = marked(self.prompt[at - 1])  # type: ignore[arg-type]  # messages, as last_turn has seen
        before, after = self.prompt[: at - 1], self.prompt[at:]
        try:
            _, _, tail = self._write([*before, said, *after], opened=self.opened).partition(MARK)
            _, _, ending = self._write([*before, said]).partition(MARK)
        except BadRecord:
            return 0
        if not tail or not text.endswith(tail):
            return 0
        return len(text) - len(tail) + (len(ending) if tail.startswith(ending) else 0)

    @property
    def _write(self) -> Callable[..., str]:
        return partial(write_dialog, self.tokenizer, tools=list(self.tools) or None)


def show_limits(max_length: int, max_prompt_length: int | None) -> str:
    """The settings that cut a sample, for a sentence about what they cut."""
    more = "" if max_prompt_length is None else f" (data.max_prompt_length {max_prompt_length})"
    return f"data.max_length {max_length}{more}"


def count_before(tokenizer: Any, text: str, ids: Sequence[int], letter: int) -> int:
    """How many of the text's ids end at or before a letter of it."""
    ask = partial(tokenizer, add_special_tokens=False, return_attention_mask=False, verbose=False)
    if not letter:
        return 0
    if not tokenizer.is_fast:
        return count_alike([ids, ask(text[:letter])["input_ids"]])
    starts, ends = np.array(ask(text, return_offsets_mapping=True)["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    return int(np.argmax([*(np.maximum(ends, starts + 1) > letter), True]))


def show_cuts(report: Mapping[str, Any]) -> str:
    """What was cut of the samples that a report counts, in a sentence; empty where nothing counts cuts."""
    cuts = report.get("cuts") or {}
    if not set(CUTS) <= cuts.keys():
        return ""
    answers, prompts, turns = (int(cuts[name]) for name in CUTS)
    total = f"of {report['kept']} samples"
    if not answers + prompts:
        return f"{total} none was cut to fit data.max_length"
    lost = f", {turns} of them inside of the last user turn (data.max_prompt_length)" if turns else ""
    return f"{total}, {answers} had an answer cut and {prompts} their prompt{lost or ', none its last user turn'}"
