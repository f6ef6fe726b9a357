"""Records about one image as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dstrain.data.formats.conversations import Conversation, read_conversation
from dstrain.data.formats.images import GroupByImageSource, read_with_images
from dstrain.data.formats.messages import IMAGE_PLACEHOLDER
from dstrain.data.sources.open import open_source


def grouped(write_lines: Any, *records: dict[str, Any]) -> GroupByImageSource:
    return GroupByImageSource(open_source(write_lines(list(records))))


def asked(image: str | None, question: str, answer: str = "yes") -> dict[str, Any]:
    return {"image": image, "question": question, "answer": answer}


def test_questions_of_an_image_become_turns(write_lines: Any) -> None:
    source = grouped(
        write_lines, asked("a", "one?"), asked("a", "two?", "no"), asked("b", "three?"), asked(None, "four?"), asked(None, "five?"), asked("a", "six?")
    )  # fmt: skip
    seen = [read_with_images(source[index], read_conversation) for index in range(len(source))]
    assert [one.images for one in seen] == [("a",), ("b",), (), (), ("a",)]
    first = seen[0].parsed
    assert isinstance(first, Conversation)
    assert [turn["content"] for turn in first.messages] == [f"{IMAGE_PLACEHOLDER}\none?", "yes", "two?", "no"]
    assert first.trained_turns == (1, 3)
    assert [source.location(index).rpartition(":")[2] for index in range(5)] == ["1", "3", "4", "5", "6"]
    assert source.get_base_dir(0) == Path(source._source.get_base_dir(0))


def test_a_bad_record_stays_by_itself(write_lines: Any) -> None:
    source = grouped(write_lines, asked("a", "one?"), asked("a", "two?", " "), asked("a", "three?"))
    assert len(source) == 3


def test_other_questions_are_other_data(write_lines: Any) -> None:
    one, other = grouped(write_lines, asked("a", "one?")), open_source(write_lines([asked("a", "one?")]))
    assert one.digest != other.digest
