"""A chat renders what was said as training does, streams the answers, and keeps each model's own conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from dstrain.cli import main
from dstrain.commands.chat import Chat, open_chat
from dstrain.commands.generate import PromptReader
from dstrain.errors import BadRecord, UsageError
from dstrain.training.generate import SamplingParams, generate_answers
from tests.contract.export_cases import make_run

FEW = {"max_new_tokens": 12, "temperature": 0.0, "top_p": 1.0, "seed": 0}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of different seeds."""
    return [make_run(tmp_path_factory.mktemp("run"), "sft", {"seed": seed}) for seed in (0, 1)]


def answer_alone(chat: Chat, index: int, messages: list[dict[str, str]]) -> str:
    """Return what `dstrain generate` answers to a conversation."""
    speaker = chat.speakers[index]
    reader = PromptReader(speaker.task)
    (prompt,) = reader.encode([reader.parse({"messages": messages})], [Path.cwd()])
    assert not isinstance(prompt, BadRecord)
    (ids,) = generate_answers(speaker.engine, [prompt], SamplingParams(max_new_tokens=12), speaker.task.tokenizer)
    text: str = speaker.task.tokenizer.decode(ids, skip_special_tokens=True)
    return text


def test_each_model_answers_its_own_conversation_as_it_is_generated(runs: list[Path]) -> None:
    chat, written = open_chat(runs, None, "last", [], "Be brief.", FEW), list[str]()
    chat.send_message("How do I mend the pump?", written.append)
    chat.send_message("And the kettle?", written.append, lambda name: written.append(f"<{name}>"))
    for index, speaker in enumerate(chat.speakers):
        said = speaker.messages
        assert [one["role"] for one in said] == ["user", "assistant"] * 2
        system = [{"role": "system", "content": "Be brief."}]
        assert said[1]["content"] == answer_alone(chat, index, [*system, said[0]])
        assert said[3]["content"] == answer_alone(chat, index, [*system, *said[:3]])
        assert f"<{speaker.name}>{said[3]['content']}\n" in "".join(written)
    assert chat.speakers[0].messages != chat.speakers[1].messages
    assert len(written) > 8, "token by token"


def test_commands_change_the_conversation(runs: list[Path]) -> None:
    chat = open_chat(runs[:1], None, "last", [], None, FEW)
    chat.send_message("How do I mend the pump?", lambda text: None)
    assert chat.run_command("/temperature 0.7") == "temperature 0.7"
    assert chat.sampling.temperature == 0.7
    chat.run_command("/system Be brief.")
    assert chat.system == "Be brief."
    chat.run_command("/reset")
    assert (chat.system, chat.speakers[0].messages) == ("Be brief.", [])
    chat.run_command("/system")
    assert chat.system is None
    assert "/image PATH" in chat.run_command("/help")
    for line, wanted in (
        ("/temprature 1", "/temprature: is not a command"),
        ("/temperature hot", "must be a number from 0"),
        ("/image photo.png", "text-only model; talk without images"),
    ):
        with pytest.raises(UsageError, match=wanted):
            chat.run_command(line)


def test_a_conversation_that_the_model_does_not_see_whole_is_told(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    chat = open_chat(runs[:1], None, "last", ["data.max_prompt_length=40"], "Be brief.", FEW)
    chat.speakers[
        0
    ].task.tokenizer.chat_template = (
        "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    )
    for _ in range(2):
        chat.send_message(
            "How do I mend the pump and the kettle, and who sells parts of both of them?", lambda text: None
        )
    cut, lost = capsys.readouterr().err.splitlines()
    assert cut.startswith("run: 1 of 1 prompts have more than 40 tokens, and the model sees the last 40 only; shorten")
    assert lost.startswith("run: the chat template drops their system text in 1 of 1 samples")


def test_a_message_that_cannot_be_asked_changes_nothing(runs: list[Path]) -> None:
    chat = open_chat(runs[:1], None, "last", [], None, FEW)
    chat.images.append("photo.png")  # of a text-only model
    with pytest.raises(BadRecord):
        chat.send_message("What is this?", lambda text: None)
    assert chat.speakers[0].messages == []


def test_ctrl_c_keeps_what_was_generated(runs: list[Path]) -> None:
    chat, written = open_chat(runs[:1], None, "last", [], None, FEW), list[str]()

    def write(text: str) -> None:
        written.append(text)
        if len("".join(written)) > 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write("abc")
    written.clear()
    chat.send_message("How do I mend the pump?", lambda text: write(text) if text.strip() else None)
    (_, answer) = chat.speakers[0].messages
    assert 0 < len(answer["content"]) <= len(answer_alone(chat, 0, chat.speakers[0].messages[:1]))


def piped(text: str, *words: Any) -> Result:
    return CliRunner().invoke(main, ["chat", *map(str, words), "--step", "last", "--max-new-tokens", "8"], input=text)


def test_lines_of_a_pipe_are_messages(runs: list[Path]) -> None:
    found = piped('How do I mend the pump?\n/reset\n"""one\ntwo"""\n', *runs)
    assert found.exit_code == 0, found.output
    assert found.stdout.count("run:") == 4, "two models answer two messages"
    assert "> " not in found.stdout
    assert "conversation forgotten" in found.stderr
    wrong = piped("/nope\n", runs[0])
    assert wrong.exit_code == 2
    assert "/nope: is not a command" in wrong.stderr
    assert piped("", *runs, runs[0]).exit_code == 2


def test_images_are_shown_by_path(tmp_path: Path) -> None:
    run = make_run(tmp_path, "vlm")
    Image.new("RGB", (32, 24), "red").save(tmp_path / "red.png")
    chat, written = open_chat([run], None, "last", [], None, FEW), list[str]()
    assert "32 x 24" in chat.run_command(f"/image {tmp_path / 'red.png'}")
    chat.send_message("What is this?", written.append)
    assert chat.speakers[0].messages[0]["content"].endswith("\nWhat is this?")
    first = chat.speakers[0].messages[1]["content"]
    chat.send_message("And its size?", written.append)
    chat.run_command("/reset")
    Image.new("RGB", (32, 24), "blue").save(tmp_path / "blue.png")
    chat.run_command(f"/image {tmp_path / 'blue.png'}")
    chat.send_message("What is this?", written.append)
    assert chat.images == [str(tmp_path / "blue.png")]
    assert isinstance(first, str)
    with pytest.raises(UsageError, match=r"none\.png"):
        chat.run_command(f"/image {tmp_path / 'none.png'}")


def test_a_folder_with_a_broken_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{broken")
    said = CliRunner().invoke(main, ["chat", str(tmp_path)])
    assert said.exit_code == 2, said.output
    assert "config.json" in said.output


def test_a_reward_model_does_not_talk(tmp_path: Path) -> None:
    found = piped("Hello\n", make_run(tmp_path, "rm"))
    assert found.exit_code == 2
    assert "does not generate text" in found.stderr
