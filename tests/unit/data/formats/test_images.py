"""Where the images of a record stand in its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dstrain.data.encoding.chat_template import to_content_parts
from dstrain.data.formats.conversations import Conversation, read_conversation, read_prompt
from dstrain.data.formats.images import GroupByImageSource, read_with_images
from dstrain.data.formats.messages import IMAGE_PLACEHOLDER, has_images
from dstrain.data.formats.preferences import Preference, read_preference
from dstrain.data.sources.open import open_source
from dstrain.errors import BadRecord

OK = {"role": "assistant", "content": "ok"}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("record", "texts", "images"),
    [
        ({"image": "a", "question": "What?", "answer": "ok"}, ["@\nWhat?"], "a"),
        ({"image": "a", "caption": "ok"}, ["@"], "a"),
        ({"image": "a", "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "ok"}]}, ["@\nWhat?"], "a"),
        ({"images": ["a", "b"], "messages": [user("Is <image> like <image>?"), OK]}, ["Is @ like @?"], "ab"),
        ({"images": ["a", "b"], "messages": [user("Is <image2> like <image1>?"), OK]}, ["Is @ like @?"], "ba"),
        ({"images": ["a", "b"], "messages": [user("Which?"), OK, user("Sure?"), OK]}, ["@@\nWhich?", "Sure?"], "ab"),
        ({"images": ["a", "b"], "messages": [user("<image> one"), OK, user("<image> two"), OK]}, ["@ one", "@ two"], "ab"),
        ({"images": ["a"], "messages": [user([{"type": "text", "text": "See"}, {"type": "image"}]), OK]}, ["See@"], "a"),
        ({"messages": [user([{"type": "image", "image": "a"}, {"type": "text", "text": "see"}]), OK]}, ["@see"], "a"),
        ({"messages": [user([{"type": "image_url", "image_url": {"url": "a"}}, {"type": "text", "text": "see"}]), OK]}, ["@see"], "a"),
        ({"image": "a", "prompt": "Why <image1>", "completion": "ok"}, ["Why @"], "a"),
        ({"question": "What?", "answer": "ok"}, ["What?"], ""),
        ({"image": None, "images": [], "question": "What?", "answer": "ok"}, ["What?"], ""),
        ({"image": float("nan"), "question": "What?", "answer": "ok"}, ["What?"], ""),
    ],
)  # fmt: skip
def test_every_way_to_place_an_image_is_read(record: dict[str, Any], texts: list[str], images: str) -> None:
    seen = read_with_images(record, read_conversation)
    said = seen.parsed
    asked = (
        [turn["content"] for turn in said.messages if turn["role"] == "user"]
        if hasattr(said, "messages")
        else [said.prompt]
    )
    assert [text.replace(IMAGE_PLACEHOLDER, "@") for text in asked] == texts
    assert "".join(seen.images) == images
    assert has_images(record) == bool(images)


@pytest.mark.parametrize(
    "record",
    [
        {"image": "a", "prompt": "Why? <image>", "chosen": "so", "rejected": "no"},
        {"image": "a", "prompt": [user("Why? <image>")], "chosen": [OK], "rejected": [{**OK, "content": "no"}]},
        {"image": "a", "chosen": [user("Why? <image>"), OK], "rejected": [user("Why? <image>"), {**OK, "content": "no"}]},
        {"image": "a", "conversations": [{"from": "human", "value": "Why? <image>"}],
         "chosen": {"from": "gpt", "value": "so"}, "rejected": {"from": "gpt", "value": "no"}},
        {"image": "a", "chosen": "\n\nHuman: Why? <image>\n\nAssistant: so", "rejected": "\n\nHuman: Why? <image>\n\nAssistant: no"},
    ],
)  # fmt: skip
def test_both_answers_are_to_the_same_image(record: dict[str, Any]) -> None:
    seen = read_with_images(record, read_preference)
    assert isinstance(seen.parsed, Preference)
    prompt = seen.parsed.prompt
    assert (prompt if isinstance(prompt, str) else prompt[-1]["content"]) == f"Why? {IMAGE_PLACEHOLDER}"
    assert seen.images == ("a",)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            {"images": ["a", "b"], "messages": [user("<image>"), OK]},
            r"1 placeholder \(<image>\) and 2 images: fewer placeholders",
        ),
        (
            {"images": ["a"], "messages": [user("<image><image>"), OK]},
            r"2 placeholders \(<image>\) and 1 image: more placeholders",
        ),
        ({"messages": [user("<image>"), OK]}, "1 placeholder .* and 0 images"),
        ({"images": ["a"], "messages": [user("<image2>"), OK]}, "<image2> is used, and there are 1 image"),
        ({"images": ["a", "b"], "messages": [user("<image1> <image1>"), OK]}, "image 2 of 2 has no placeholder"),
        ({"images": ["a", "b"], "messages": [user("<image1> <image>"), OK]}, "numbered .* and some are not"),
        (
            {"image": "a", "messages": [user("See"), {**OK, "content": "<image>"}]},
            "an answer contains an image placeholder",
        ),
        ({"image": "a", "images": ["b"], "messages": [user("<image>"), OK]}, "both 'image' and 'images'"),
        ({"image": "a", "messages": [user([{"type": "image", "image": "b"}]), OK]}, "keep one of them"),
        ({"image": "a", "messages": [OK]}, "no user's turn"),
        ({"image": "a", "caption": 3}, "'caption' is a number"),
        ({"image": "a", "caption": " "}, "empty answer"),
    ],
)
def test_images_and_marks_that_do_not_fit_are_refused(record: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRecord, match=words):
        read_with_images(record, read_conversation)


def test_what_is_asked_about_an_image_needs_no_answer() -> None:
    for record in ({"image": "a", "question": "What?"}, {"image": "a", "messages": [user("What?")]}):
        seen = read_with_images(record, read_prompt)
        assert seen.parsed.prompt == [user(f"{IMAGE_PLACEHOLDER}\nWhat?")]
        assert seen.images == ("a",)


def test_templates_get_texts_and_images_apart() -> None:
    image, text = {"type": "image"}, lambda said: {"type": "text", "text": said}
    cases = {
        f"{IMAGE_PLACEHOLDER}\nWhat?": [image, text("What?")],
        f"See {IMAGE_PLACEHOLDER} and {IMAGE_PLACEHOLDER}": [text("See "), image, text(" and "), image],
        IMAGE_PLACEHOLDER: [image],
        "What?": [text("What?")],
        "": [text("")],
    }
    for content, parts in cases.items():
        assert to_content_parts({"role": "user", "content": content})["content"] == parts


# Records about one image as one.


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
