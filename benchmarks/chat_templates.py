"""What public chat templates keep of a record: `python -m benchmarks.chat_templates FOLDER… [--to docs/…/FILE.md]`.

Each FOLDER has *.jinja files; its name is the source in the table. Files of equal content count once.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, meta

from benchmarks.common import write_table
from dstrain.data.encoding.chat_template import set_template_kwargs
from dstrain.data.encoding.conversations import encode_conversations
from dstrain.data.encoding.preferences import encode_preferences
from dstrain.data.encoding.rendering import EncodingConfig
from dstrain.data.encoding.template_check import LOST_COLUMNS
from dstrain.data.formats.conversations import read_conversation
from dstrain.data.formats.preferences import read_preference
from dstrain.errors import BadRecord

TURN = {"role": "user", "content": "Questionone?"}
ANSWER = {"role": "assistant", "content": "Answerone."}
SECOND = [{"role": "user", "content": "Questiontwo?"}, {"role": "assistant", "content": "Answertwo."}]
SYSTEM = {"role": "system", "content": "Systemtext."}
THOUGHT = {"reasoning_content": "Thoughtone."}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city.", "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "City."}}, "required": ["city"]}}}  # fmt: skip
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "abcdefghi", "function": {"name": "get_weather", "arguments": {"city": "Cityone"}}}]}  # fmt: skip
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": "Resultone"}

CONVERSATIONS: dict[str, Mapping[str, Any]] = {
    "answers": {"messages": [TURN, ANSWER, *SECOND]},
    "system": {"messages": [SYSTEM, TURN, ANSWER]},
    "thought, last answer": {"messages": [TURN, {**ANSWER, **THOUGHT}]},
    "thought, earlier answer": {"messages": [TURN, {**ANSWER, **THOUGHT}, *SECOND]},
    "thought in the text": {"messages": [TURN, {**ANSWER, "content": "<think>Thoughtone.</think>Answerone."}]},
    "tools": {"messages": [TURN, CALL, RESULT, ANSWER], "tools": [TOOL]},
}
"""Column -> record. The words are in no template."""
PAIR = {"prompt": [SYSTEM, TURN], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "Badanswer."}]}
GIVEN = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "unk_token", "pad_token", "documents"}
"""Variables that transformers sets; further ones are keys of `model.chat_template_kwargs`."""
THINKING = {"enable_thinking": True, "thinking": True, "preserve_thinking": True, "clear_thinking": False, "truncate_history_thinking": False}  # fmt: skip
"""Values of usual variables with which a template keeps thoughts."""
SHOWN = {*THINKING, "reasoning_effort"}
_ADDED = re.compile(r"<[^<>\s{}'\"]{2,40}>|\[/?[A-Z_]{3,24}\]")
"""Special tokens as templates write them."""


def make_tokenizer(template: str) -> Any:
    """Return a tokenizer on bytes that has the special tokens which the template writes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bare.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))  # fmt: skip
    added = sorted({*_ADDED.findall(template), "<s>", "</s>"})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, bos_token="<s>", eos_token="</s>")
    tokenizer.add_tokens(added, special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def try_template(template: str) -> dict[str, str]:
    """Return what happens to each record: `yes`, what is lost, or `refused: reason`."""
    tokenizer = make_tokenizer(template)
    found = {name: _try_conversation(tokenizer, record) for name, record in CONVERSATIONS.items()}
    set_template_kwargs(
        tokenizer, {name: value for name, value in THINKING.items() if name in read_variables(template)}
    )
    for name, value in found.items():
        if value == "without thoughts" and _try_conversation(tokenizer, CONVERSATIONS[name]) == "yes":
            found[name] = "by variables"
    tokenizer.chat_template = template
    (pair,) = _attempt(lambda: encode_preferences(tokenizer, [read_preference(PAIR)], 100_000))
    if not isinstance(pair, BadRecord):
        chosen = tokenizer.decode(list(pair["chosen"])[int(pair["prompt_length"]) :])
        prompt = tokenizer.decode(list(pair["chosen"])[: int(pair["prompt_length"])])
        assert "Answerone." in chosen
        assert "Questionone?" not in chosen
        assert "Questionone?" in prompt
    found["pairs"] = _describe(pair)
    return found


def read_variables(template: str) -> set[str]:
    """Return the names that a template reads and transformers does not set."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    tree = environment.parse(re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template))
    return meta.find_undeclared_variables(tree) - GIVEN


def _try_conversation(tokenizer: Any, record: Mapping[str, Any]) -> str:
    config = EncodingConfig(max_length=100_000)
    (example,) = _attempt(lambda: encode_conversations(tokenizer, [read_conversation(record)], config))
    if isinstance(example, BadRecord):
        return _describe(example)
    learnt = "".join(_decode_learnt(tokenizer, example))
    answers = [message for message in record["messages"] if message["role"] == "assistant"]
    texts = [message["content"].rpartition("</think>")[2] for message in answers]
    assert all(text in learnt for text in texts), "an answer is not learnt"
    assert not any(text in learnt for text in ("Questionone?", "Systemtext.", "Resultone")), "a context is learnt"
    if "tools" in record:
        assert "Cityone" in learnt
    return _describe(example)


def _attempt(encode: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """Call an encoder, with an error of the template as a bad record."""
    try:
        return encode()
    except BadRecord as fault:
        return [fault]


def _decode_learnt(tokenizer: Any, example: Mapping[str, Any]) -> Iterator[str]:
    ids = [token for token, learnt in zip(example["input_ids"], example["loss_mask"], strict=True) if learnt]
    yield tokenizer.decode(ids)


def _describe(example: Mapping[str, Any] | BadRecord) -> str:
    if isinstance(example, BadRecord):
        return f"refused: {example.reason}"
    lost = [name.removesuffix("_lost") for name in LOST_COLUMNS if example.get(name)]
    return f"without {', '.join(lost)}" if lost else "yes"


def make_table(folders: Sequence[Path]) -> str:
    """Return the table of all templates and a summary, as Markdown."""
    columns = [*CONVERSATIONS, "pairs"]
    lines = [f"| template | {' | '.join(columns)} | variables |", "|---" * (len(columns) + 2) + "|"]
    reasons: dict[str, int] = {}
    counts: dict[str, Counter[str]] = {name: Counter() for name in columns}
    seen: dict[str, str] = {}
    for path in sorted(path for folder in folders for path in folder.rglob("*.jinja")):
        template = path.read_text(encoding="utf-8")
        name = f"{path.parent.name}: {path.stem}"
        if template in seen:
            continue
        seen[template] = name
        found = try_template(template)
        cells = []
        for column, value in found.items():
            kind, _, reason = value.partition(": ")
            counts[column][kind] += 1
            if reason:
                kind += f" ({reasons.setdefault(_shorten(reason), len(reasons) + 1)})"
            cells.append(kind)
        variables = ", ".join(f"`{word}`" for word in sorted(read_variables(template) & SHOWN))
        lines.append(f"| {name} | {' | '.join(cells)} | {variables} |")
    total = [f"{len(seen)} templates of different content."]
    total += [f"{column}: {', '.join(f'{number} {kind}' for kind, number in counts[column].most_common())}." for column in columns]  # fmt: skip
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(["\n".join(f"- {line}" for line in total), "", *lines, "", "Reasons:", "", *notes])


def _shorten(reason: str) -> str:
    """Return a reason without its fix, and without what differs from template to template."""
    problem = (reason.partition("; ")[0]).replace("|", "\\|")
    return re.sub(r" \(turn \d+[^)]*\)", "", " ".join(problem.split()))


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="folder with *.jinja files")
    parser.add_argument("--to", type=Path, help="Markdown file whose table is replaced")
    arguments = parser.parse_args()
    write_table(make_table(arguments.folders), "benchmarks.chat_templates", arguments.to)


if __name__ == "__main__":
    main()
