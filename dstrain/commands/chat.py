"""dstrain chat: a conversation with one or two trained policies in the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dstrain.commands.generate import describe_changes, get_text_task, max_prompt_tokens
from dstrain.commands.trained_model import (
    ADAPTER_CONFIG,
    REPLICATED_DS_CONFIG,
    SavedModel,
    find_saved_model,
    load_saved_model,
    quiet_libraries,
)
from dstrain.commands.untrusted import read_json_object
from dstrain.data.formats.messages import IMAGE_PLACEHOLDER
from dstrain.data.vision.images import read_image, resolve_image
from dstrain.errors import BadRecord, DstrainError, UsageError, escape_controls
from dstrain.process_setup import log_if_slow, log_stderr
from dstrain.tasks.common.generation import PromptReader
from dstrain.tasks.common.task import EXPORT_RECIPE

if TYPE_CHECKING:
    from dstrain.tasks.common.text import TextTask
    from dstrain.training.generate import GenerationModel, SamplingParams

HELP = """\
/image PATH      show an image with the next message
/system TEXT     set the system prompt; without a text, remove it
/temperature X   set the sampling temperature; 0 decodes greedily
/reset           forget the conversation, but not the system prompt
/help            print this list
/exit            leave; Ctrl-D too. Ctrl-C ends an answer
\"""             begin a message of several lines, and end it"""
MULTILINE_MARK = '"""'


@dataclass
class Speaker:
    """A model, and the conversation as it has it."""

    name: str
    task: TextTask
    engine: GenerationModel
    max_prompt_tokens: int | None
    messages: list[dict[str, str]] = field(default_factory=list)
    """The turns of the user and its own answers, without the system prompt."""
    notes: list[str] = field(default_factory=list)
    """What was said about prompts that the model does not see as they are."""

    def answer(
        self, system: str | None, images: Sequence[str], sampling: SamplingParams, write: Callable[[str], None]
    ) -> str:
        """Return the answer to the conversation, and write its text as it is generated. Raises BadRecord.

        Ctrl-C ends the answer: what was generated until then is returned.
        """
        from transformers import TextStreamer

        from dstrain.training.generate import generate_answers

        tokenizer, written = self.task.tokenizer, list[str]()

        class Stream(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                written.append(text)
                write(text)

        start = [{"role": "system", "content": system}] if system else []
        reader = PromptReader(self.task, self.max_prompt_tokens)
        record = {"messages": [*start, *self.messages], **({"images": [*images]} if images else {})}
        (prompt,) = reader.encode([reader.parse(record)], [Path.cwd()])
        if isinstance(prompt, BadRecord):
            raise prompt
        for note in describe_changes([prompt], self.max_prompt_tokens):
            if note not in self.notes:
                self.notes.append(note)
                log_stderr(f"{self.name}: {note}")
        stream = Stream(tokenizer, skip_prompt=True, skip_special_tokens=True)
        processor = self.task.model_source.vision_processor
        try:
            (ids,) = generate_answers(self.engine, [prompt], sampling, tokenizer, processor, stream)
        except KeyboardInterrupt:
            return "".join(written)
        text: str = tokenizer.decode(ids, skip_special_tokens=True)
        return text


@dataclass
class Chat:
    """A conversation of the user with one or two models."""

    speakers: Sequence[Speaker]
    sampling: SamplingParams
    system: str | None = None
    images: list[str] = field(default_factory=list)
    """Paths of all images, in the order of their placeholders in the messages."""
    num_waiting: int = 0
    """Images at the end of `images` that the next message will show."""

    def send_message(
        self, text: str, write: Callable[[str], None], begin: Callable[[str], None] = lambda name: None
    ) -> None:
        """Add the user's message, and write the answer of each model. Raises BadRecord, without a change.

        `begin` is called with the model's name before its answer.
        """
        message = "\n".join([*[IMAGE_PLACEHOLDER] * self.num_waiting, text])
        turn = sum(one["role"] == "user" for one in self.speakers[0].messages)
        sampling = replace(self.sampling, seed=self.sampling.seed + turn)
        for number, speaker in enumerate(self.speakers):
            begin(speaker.name)
            speaker.messages.append({"role": "user", "content": message})
            try:
                answer = speaker.answer(self.system, self.images, sampling, write)
            except BadRecord:
                for one in self.speakers[: number + 1]:
                    del one.messages[2 * turn :]
                raise
            speaker.messages.append({"role": "assistant", "content": answer})
            write("\n")
        self.num_waiting = 0

    def reset(self) -> None:
        """Forget messages and images."""
        self.images.clear()
        self.num_waiting = 0
        for speaker in self.speakers:
            speaker.messages.clear()

    def run_command(self, line: str) -> str:
        """Run a line that begins with /, and return what to print. Raises UsageError, EOFError for /exit."""
        word, _, value = line.partition(" ")
        value = value.strip()
        if word == "/image":
            return self._add_image(value)
        if word == "/system":
            self.system = value or None
            return "system prompt set" if value else "system prompt removed"
        if word == "/temperature":
            return self._set_temperature(value)
        if word == "/reset":
            self.reset()
            return "conversation forgotten"
        if word == "/help":
            return HELP
        if word in ("/exit", "/quit"):
            raise EOFError
        raise UsageError(
            f"{word}: is not a command; /help lists the commands. To send a message, write a blank before the /"
        )

    def _set_temperature(self, value: str) -> str:
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0 <= number < float("inf"):
            raise UsageError(f"/temperature {value}: must be a number from 0; 0 decodes greedily")
        self.sampling = replace(self.sampling, temperature=number)
        return f"temperature {number:g}"

    def _add_image(self, path: str) -> str:
        if not path:
            raise UsageError("/image: names no file; write /image PATH")
        for speaker in self.speakers:
            if not speaker.task.model_source.is_multimodal:
                raise UsageError(f"/image: {speaker.name} is a text-only model; talk without images")
        place = os.path.realpath(Path(path.strip("'\"")).expanduser())
        try:
            width, height = read_image(resolve_image(place, Path.cwd())).size
        except BadRecord as fault:
            raise UsageError(f"/image: {fault.reason}") from None
        self.images.append(place)
        self.num_waiting += 1
        return f"{place}, {width} x {height}: shown with the next message"


def open_chat(
    folders: Sequence[Path],
    task: str | None,
    step: str,
    overrides: Sequence[str],
    system: str | None,
    sampling: Mapping[str, Any],
) -> Chat:
    """Load the models. Raises UsageError."""
    from dstrain.training.generate import SamplingParams

    quiet_libraries()
    found = [_find_model(folder, task, step, overrides) for folder in folders]
    names = [folder.resolve().name for folder in folders]
    if len({*names}) < len(names):
        names = [str(folder) for folder in folders]
    speakers = [
        _load_speaker(name, saved, int(sampling["max_new_tokens"])) for name, saved in zip(names, found, strict=True)
    ]
    return Chat(speakers, SamplingParams(**sampling), system)


def _find_model(folder: Path, task: str | None, step: str, overrides: Sequence[str]) -> SavedModel:
    is_plain = not any((folder / name).is_file() for name in (EXPORT_RECIPE, "recipe.yaml", ADAPTER_CONFIG))
    if task is None and is_plain and (folder / "config.json").is_file():
        task = "vlm" if "vision_config" in read_json_object(folder / "config.json") else "sft"
    saved = find_saved_model(folder, step, ["model.gradient_checkpointing=false", *overrides], task)
    get_text_task(saved)
    saved.check_loadable()
    return saved


def _load_speaker(name: str, saved: SavedModel, max_new_tokens: int) -> Speaker:
    import torch

    from dstrain.distributed.world import SingleProcessWorld
    from dstrain.models.params import unwrap_peft
    from dstrain.training.generate import GenerationModel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    world, task = SingleProcessWorld(device), get_text_task(saved)
    with log_if_slow(f"loading {name}"):
        model = unwrap_peft(load_saved_model(saved, REPLICATED_DS_CONFIG, world)).to(device).eval()
    return Speaker(name, task, GenerationModel(model, world, False), max_prompt_tokens(task, max_new_tokens))


def run_chat(chat: Chat) -> None:
    """Read messages and commands until the end of the input, and print the answers.

    A terminal has a prompt and the editing keys and history of readline; the lines of a pipe are read as they are.
    """
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        import readline  # noqa: F401  input() uses it

        click.echo(f"{', '.join(one.name for one in chat.speakers)}: /help lists the commands")

    def write(text: str) -> None:
        click.echo(escape_controls(text) if is_terminal else text, nl=False)

    def begin(name: str) -> None:
        if len(chat.speakers) > 1:
            click.secho(f"{name}:", bold=True)

    while True:
        try:
            line = _read_message("> " if is_terminal else "")
            if line.startswith("/"):
                click.echo(escape_controls(chat.run_command(line.strip())), err=not is_terminal)
            elif line.strip():
                chat.send_message(line, write, begin)
        except EOFError:
            return
        except KeyboardInterrupt:  # at the prompt: the line is dropped, as in a shell
            click.echo()
        except (BadRecord, DstrainError) as fault:
            if not is_terminal:
                raise fault if isinstance(fault, DstrainError) else UsageError(fault.reason) from None
            text = fault.reason if isinstance(fault, BadRecord) else str(fault)
            click.echo(click.style(f"error: {escape_controls(text)}", fg="red"), err=True)


def _read_message(prompt: str) -> str:
    """Return a line, or the lines between two marks. Raises EOFError at the end of the input."""
    line = input(prompt)
    if not line.startswith(MULTILINE_MARK):
        return line
    lines = [line.removeprefix(MULTILINE_MARK)]
    while not lines[-1].endswith(MULTILINE_MARK):
        lines.append(input("  " if prompt else ""))
    lines[-1] = lines[-1].removesuffix(MULTILINE_MARK)
    return "\n".join(lines).strip("\n")
