"""Bad images among the data: each named by file and line with its mend, and what is good is trained on."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dstrain.commands.data import NO_TOKENIZER_HINT
from dstrain.commands.recipe_args import TrainRequest, resolve_recipe
from dstrain.config.schema import RunConfig
from dstrain.data.token_store import TokenizedDataset
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import DataError, UsageError
from dstrain.launch.topology import Worker
from dstrain.tasks import make_task
from dstrain.training.plan import make_plan
from dstrain.training.precompute_outputs import OutputsJob, build_cache_key, iter_model_jobs
from dstrain.training.start import ResumeOptions
from tests.tiny import tiny_recipe
from tests.vision_recipes import picture
from tests.vocabulary import RUN, invoke, read_jsonl, write_recipe
from tests.workers import ROOT, Workers

Write = Callable[[Path], Any]


def saved(image: Image.Image, **settings: Any) -> Write:
    return lambda path: image.save(path, **settings)


def cut_off(form: str) -> Write:
    """The first two thirds of a file."""

    def write(path: Path) -> None:
        picture(3).save(path, form)
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])

    return write


def bomb(path: Path) -> None:
    """Forty bytes that say they are a gigapixel."""

    def part(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 40000, 25000, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IEND", b""))


def rotated(path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(4).save(path, exif=exif)


def animated(path: Path) -> None:
    picture(5).save(path, save_all=True, append_images=[picture(6)])


# The image's name, what is asked, how the file is written, and what must be said of it: nothing of a good one.
GOOD: dict[str, tuple[str, Write | None, str]] = {
    "good.png": ("<image>What is it?", saved(picture(1)), ""),
    "unmarked.png": ("What is it?", saved(picture(2)), ""),
}
UNUSUAL: dict[str, tuple[str, Write | None, str]] = {
    "cmyk.jpg": ("<image>?", saved(picture(7).convert("CMYK")), "note: cmyk.jpg: CMYK: it is converted to RGB"),
    "animated.gif": ("<image>?", animated, "note: animated.gif: animated, 2 frames: only the first is used"),
    "rotated.jpg": ("<image>?", rotated, "note: rotated.jpg: rotated by 90° according to EXIF: it is turned upright"),
}
BAD: dict[str, tuple[str, Write | None, str]] = {
    "missing.png": ("<image>?", None, "image not found: missing.png (paths are relative to the data file); check the path"),
    "short.jpg": ("<image>?", cut_off("JPEG"), "short.jpg is damaged or truncated (image file is truncated"),
    "short.png": ("<image>?", cut_off("PNG"), "short.png is damaged or truncated"),
    "bomb.png": ("<image>?", bomb, "bomb.png has 1000000000 pixels, more than the 89478485 that are decoded; make it"),
    "dot.png": ("<image>?", saved(picture(8, (1, 1))), "dot.png is 1x1 pixels; width and height must be two or more"),
    "text.png": ("<image>?", lambda path: path.write_text("hello"), "text.png is not an image in a known format (it is text; k"),
    "folder.png": ("<image>?", Path.mkdir, "folder.png is a folder, not an image; name a file in it"),
    "many.png": ("Is it?", saved(picture(9)), "1 placeholder (<image>) and 2 images: fewer placeholders than images; write one"),
    "few.png": ("<image>, <image>?", saved(picture(9)), "2 placeholders (<image>) and 1 image: more placeholders than images; write"),
    "answer.png": ("?", saved(picture(9)), "an answer contains an image placeholder, and only questions can contain images; move"),
    "https://example.org/x.png": ("<image>?", None, "an image is the URL https://example.org/x.png; download it first"),
}  # fmt: skip


def dialog(asked: str, name: str) -> dict[str, Any]:
    answer = "<image>" if name == "answer.png" else "A thing."
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


def pair(asked: str, name: str) -> dict[str, Any]:
    return {"prompt": asked, "chosen": "<image>" if name == "answer.png" else "A thing.", "rejected": "Nothing."}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Writes images and a file about them into the working folder, a record a line; what must be said, by line."""
    monkeypatch.chdir(tmp_path)

    def write(cases: dict[str, tuple[str, Write | None, str]], record: Callable[..., dict[str, Any]], name: str) -> Any:
        lines, said = [], []
        for number, (image, (asked, make, wanted)) in enumerate(cases.items(), 1):
            if make is not None:
                make(Path(image))
            images: Any = [image, "good.png"] if image == "many.png" else image
            asked = f"<image>{asked}" if image == "many.png" else asked
            lines.append(json.dumps({**record(asked, image), "image": images}))
            said += [f"{name}:{number}: {wanted}"] if wanted else []
        Path(name).write_text("\n".join(lines) + "\n")
        return said

    return write


@pytest.mark.parametrize("task", ["vlm", "rm", "dpo"])
def test_every_image_that_is_bad_or_unusual_is_named_with_its_line(task: str, written: Any) -> None:
    record = dialog if task == "vlm" else pair
    said = written(GOOD | UNUSUAL | BAD, record, "x.jsonl")
    found = invoke("data", "check", "x.jsonl", "--task", task)
    assert found.exit_code == 2
    told = found.stdout.splitlines()
    assert len(told) == len(said) == len(BAD) + len(UNUSUAL)
    for wanted in said:
        assert [line for line in told if line.startswith(wanted)], f"{wanted}\n{found.stdout}"
    total, columns, hint = found.stderr.splitlines()
    assert total == f"{len(GOOD | UNUSUAL)} good records, {len(BAD)} bad, 3 notes on records that can be used"
    assert columns.startswith("x.jsonl: ")
    assert "image" in columns
    assert hint == NO_TOKENIZER_HINT

    said = written(GOOD | UNUSUAL, record, "good.jsonl")
    found = invoke("data", "check", "good.jsonl", "--task", task)
    assert found.exit_code == 0
    *notes, total, columns, hint = found.stdout.splitlines()
    assert notes == said
    assert total == f"{len(GOOD | UNUSUAL)} good records, 0 bad, 3 notes on records that can be used"
    count = len(GOOD | UNUSUAL)
    assert columns.startswith(f"good.jsonl: {count} records; {count} images, 0 records without one; read: image, ")
    assert hint == NO_TOKENIZER_HINT


def test_the_records_of_the_docs_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/data.md").read_text().split("\n## Images\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```json\n(.*?)```", page, flags=re.S)
    (command,) = re.findall(r"```bash\ndstrain (.*?)\n```", page, flags=re.S)
    Path("cats").mkdir()
    for number in (1, 2):
        picture(number).save(f"cats/{number}.jpg")
    Path("cats.jsonl").write_text("".join(blocks))
    found = invoke(*command.split())
    total, columns, hint = found.stdout.splitlines()
    assert (found.exit_code, total, hint) == (
        0,
        f"{len(''.join(blocks).splitlines())} good records, 0 bad",
        NO_TOKENIZER_HINT,
    )
    assert "8 images, 0 records without one" in columns
    assert columns.endswith("not used: rejected (1)")  # of a pair, vlm trains on the chosen answer
    Path("same.jsonl").write_text(blocks[0])
    values = recipe(tmp_path)
    values["data"] |= {"train": "same.jsonl", "max_length": 200}
    values["model"] = {**values["model"], "chat_template": "human_assistant"}
    first, *others = (examples(values)[row] for row in range(4))
    assert all(np.array_equal(first["input_ids"], other["input_ids"]) for other in others)
    assert [len(one["images"]) for one in (first, *others)] == [1] * 4


def test_images_within_a_parquet_file_are_kept_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    held = []
    for seed in (1, 2, 1):
        picture(seed).save("x.png")
        held.append({"bytes": Path("x.png").read_bytes(), "path": None})
    Path("x.png").unlink()
    held.append({"bytes": held[0]["bytes"][:200], "path": "gone.png"})
    asked = [f"<image>What is {number}?" for number in range(4)]
    columns = {"image": held, "question": asked, "answer": ["A thing."] * 4}
    parquet.write_table(arrow.table(columns), "x.parquet")
    found = invoke("data", "check", "x.parquet", "--task", "vlm")
    assert (found.exit_code, found.stderr.splitlines()) == (
        2,
        [
            "3 good records, 1 bad",
            "x.parquet: 4 records; 4 images, 0 records without one; read: image, question, answer",
            NO_TOKENIZER_HINT,
        ],
    )
    assert found.stdout.startswith("x.parquet[3]: an image of 200 bytes is damaged or truncated")
    values = recipe(tmp_path, on_error="skip")
    values["data"] |= {"train": "x.parquet"}
    made = examples(values)
    shown = [made[row]["images"][0] for row in range(3)]
    assert shown[0] == shown[2] != shown[1]
    assert all(image.has_copy for image in shown)
    first, second, third = (image.load() for image in shown)
    assert first.tobytes() == third.tobytes() != second.tobytes()


def test_a_record_that_is_bad_twice_is_named_twice_and_counted_once(written: Any) -> None:
    written(GOOD, dialog, "x.jsonl")
    images = ["missing.png", "good.png", "gone.png"]
    Path("x.jsonl").write_text(json.dumps(dialog("<image>" * 3, "") | {"images": images}) + "\n[]\n")
    found = invoke("data", "check", "x.jsonl", "--task", "vlm")
    assert [line.split(";")[0] for line in found.stdout.splitlines()] == [
        "x.jsonl:1: image not found: missing.png (paths are relative to the data file)",
        "x.jsonl:1: image not found: gone.png (paths are relative to the data file)",
        "x.jsonl:2: an array, not an object",
    ]
    assert found.stderr.startswith("0 good records, 2 bad\nx.jsonl: 1 record; 3 images")


def recipe(folder: Path, task: str = "vlm", **data: Any) -> dict[str, Any]:
    """A recipe on x.jsonl, for a model that sees."""
    values = tiny_recipe("vlm", folder)
    values |= {"task": task, "steps": 2}
    values["data"] |= {"train": "x.jsonl", "eval": None, **data}
    return values


def examples(values: dict[str, Any]) -> TokenizedDataset:
    found = make_task(RunConfig.model_validate(values)).examples("train")
    assert isinstance(found, TokenizedDataset)
    return found


def plan(values: dict[str, Any], folder: Path) -> None:
    """Plan a run as a worker does before it joins the others."""
    write_recipe(folder, values)
    try:
        wish = resolve_recipe(TrainRequest(recipe=str(folder / "recipe.yaml")))
        make_plan(wish, folder / "run", ResumeOptions(), Worker(0, 0, 1, "tests", 1))
    finally:
        assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("task", ["vlm", "rm", "dpo"])
def test_a_run_on_bad_images_is_refused_before_any_process_group(task: str, written: Any, tmp_path: Path) -> None:
    said = written(GOOD | UNUSUAL | BAD, dialog if task == "vlm" else pair, "x.jsonl")
    with pytest.raises(UsageError) as refused:
        plan(recipe(tmp_path, task), tmp_path)
    told = str(refused.value)
    assert f"{len(BAD)} of {len(GOOD | UNUSUAL | BAD)} records" in told
    bad = [line for line in said if "note:" not in line]
    assert [wanted in told for wanted in bad] == [True] * 10 + [False]
    assert "… and 1 more" in told
    assert f"`dstrain data check x.jsonl --task {task}`" in told
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.parametrize("task", ["vlm", "rm", "dpo"])
def test_what_can_be_used_is_left_where_bad_ones_are_skipped(task: str, written: Any, tmp_path: Path) -> None:
    said = written(GOOD | UNUSUAL | BAD, dialog if task == "vlm" else pair, "x.jsonl")
    found = examples(recipe(tmp_path, task, on_error="skip"))
    assert len(found) == len(GOOD | UNUSUAL)
    bad = [line for line in said if "note:" not in line]
    assert [one.startswith(wanted) for one, wanted in zip(found.report["skipped_records"], bad, strict=True)] == [
        True
    ] * len(BAD)
    assert found.store.image_index is not None
    assert len(found.store.image_index) == len(GOOD | UNUSUAL), "images of skipped records are not in the album"
    loaded = [image.load() for row in range(len(found)) for image in found[row]["images"]]
    assert {image.mode for image in loaded} == {"RGB"}


def test_training_goes_on_without_bad_images_and_with_texts_among_the_good(
    written: Any, tmp_path: Path, one: Workers
) -> None:
    written(GOOD | UNUSUAL | BAD, dialog, "x.jsonl")
    text = json.dumps(dialog("What is the sky?", ""))
    Path("x.jsonl").write_text(Path("x.jsonl").read_text() + f"{text}\n" * 5)
    values = recipe(tmp_path, on_error="skip")
    values["data"]["train"] = str(tmp_path / "x.jsonl")
    made = {"recipe": str(write_recipe(tmp_path, values)), "run_dir": str(tmp_path / "run")}
    assert [result["code"] for result in one(RUN, **made)] == [0]
    rows = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows if row["split"] == "train"] == [1, 2]
    assert all(np.isfinite(row["loss"]) for row in rows)
    events = read_jsonl(tmp_path / "run/events.jsonl")
    (told,) = [event for event in events if event["event"] == "data"]
    assert (told["read"], told["kept"], told["skipped"]) == (21, 10, 11)
    assert f"x.jsonl:6: image not found: {tmp_path / 'missing.png'}" in told["skipped_records"][0]


def test_a_prompt_whose_images_are_cut_is_named(written: Any, tmp_path: Path) -> None:
    written(GOOD, dialog, "x.jsonl")
    early = {"messages": [*dialog("<image>What is it?", "")["messages"], *dialog("And now?", "")["messages"]]}
    early["messages"][1:2] = [{"role": "assistant", "content": "Say it well. " * 20, "weight": 0}]
    long = json.dumps(early | {"image": "good.png"})
    text = json.dumps(early | {"messages": [{"role": "user", "content": "What is it?"}, *early["messages"][1:]]})
    lone = json.dumps(dialog("What is it? " + "Say it well. " * 40, ""))
    Path("x.jsonl").write_text(Path("x.jsonl").read_text() + f"{long}\n{text}\n{lone}\n")
    found = examples(recipe(tmp_path, on_error="skip"))
    skipped, asked = found.report["skipped_records"]
    assert "x.jsonl:3: its images take 4 tokens, and data.max_length 48 cuts 4 of them off; raise" in skipped
    assert "x.jsonl:5: its last user turn" in asked
    assert len(found) == 3, "older turns of a text may be cut"
    written(GOOD, dialog, "x.jsonl")
    with pytest.raises(DataError, match=r"(?s)2 of 2 records .*its last user turn .* data.max_length 5 leaves none"):
        examples(recipe(tmp_path, max_length=5))


@pytest.mark.parametrize("harm", ["deleted", "replaced", "spoilt"])
def test_an_image_that_changed_since_the_data_were_prepared_is_noticed(
    harm: str, written: Any, tmp_path: Path, one: Workers, capfd: pytest.CaptureFixture[str]
) -> None:
    """Images of the tower's own size have no smaller copy, so that training reads the files themselves."""
    written(GOOD, dialog, "x.jsonl")
    for name in GOOD:
        picture(1, (16, 16)).save(name)
    write_recipe(tmp_path, recipe(tmp_path))
    prepared = invoke("prepare", "recipe.yaml", "--json")
    row = json.loads(prepared.stdout)["splits"]["train"]
    assert (row["samples"], row["images"], row["copies"], row["longest"] < 48) == (2, 2, 0, True)
    if harm == "deleted":
        Path("good.png").unlink()
    elif harm == "replaced":
        picture(9, (40, 30)).save("good.png")
    else:
        Path("good.png").write_bytes(b"nothing")
    run = {"recipe": str(tmp_path / "recipe.yaml"), "run_dir": str(tmp_path / "run")}
    if harm == "replaced":
        one(RUN, **run)
        assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
        again = json.loads(invoke("prepare", "recipe.yaml", "--json").stdout)["splits"]["train"]
        assert (again["images"], again["copies"]) == (2, 1)
        return
    with pytest.raises(UsageError, match=r"(?s)1 of 2 records .*x\.jsonl:1: .*good\.png"):
        plan(recipe(tmp_path), tmp_path)
    told = capfd.readouterr().err
    assert "is built again" in told
    assert f"good.png {'is gone' if harm == 'deleted' else 'has changed'}" in told
    picture(1, (16, 16)).save("good.png")
    plan(recipe(tmp_path), tmp_path)  # mended, it is used, though no data file changed


def test_a_model_that_sees_nothing_refuses_records_with_images(written: Any, tmp_path: Path) -> None:
    written(GOOD, pair, "x.jsonl")
    values = tiny_recipe("rm", tmp_path)
    values["data"] |= {"train": "x.jsonl", "eval": None}
    wanted = r"x\.jsonl:1: the record has an image, and the model is text-only; name a vision-language model, or remove the record"
    with pytest.raises(UsageError, match=wanted):
        plan(values, tmp_path)
    vlm = recipe(tmp_path) | {"model": values["model"]}
    with pytest.raises(UsageError, match=r"model\.config.*llama is a text-only model; task vlm needs"):
        plan(vlm, tmp_path)


def test_what_a_reference_said_is_kept_apart_by_what_the_images_show(written: Any, tmp_path: Path) -> None:
    written(GOOD, pair, "x.jsonl")

    def key(values: dict[str, Any]) -> dict[str, Any]:
        task = make_task(RunConfig.model_validate(values | {"options": {"precompute_ref_log_probs": True}}))
        found = task.examples("train")
        assert isinstance(found, TokenizedDataset)
        asking = OutputsJob(
            task=task, ds_config={"zero_optimization": {"stage": 0}}, micro_batch_size=2, world=SingleProcessWorld()
        )
        return build_cache_key(*iter_model_jobs(asking), found.store, "weights")

    values = recipe(tmp_path, "dpo")
    before = key(values)
    assert key(values) == before
    picture(77).save("good.png")
    after = key(values)
    assert {name for name in before if before[name] != after[name]} == {"images"}
    plain = tiny_recipe("dpo", tmp_path)
    assert key(plain)["images"] is None
    Path("x.jsonl").write_text("".join(json.dumps(pair(f"{number}?", "")) + "\n" for number in range(3)))
    assert key(values)["images"] is None


def test_prepare_tells_how_many_images_there_are(written: Any, tmp_path: Path) -> None:
    written(GOOD | UNUSUAL, dialog, "x.jsonl")
    write_recipe(tmp_path, recipe(tmp_path))
    told = invoke("prepare", "recipe.yaml").stdout
    assert "train: 5 samples" in told
    assert "5 images, 5 of them as copies in the cache" in told
    row = json.loads(invoke("prepare", "recipe.yaml", "--json").stdout)["splits"]["train"]
    assert (row["images"], row["copies"]) == (5, 5)
    store = examples(recipe(tmp_path)).store
    assert row["tokens"] == store.column_lengths("input_ids").sum()
    parts = json.loads(invoke("prepare", "recipe.yaml", "--json", "--set", "data.eval_fraction=0.4").stdout)["splits"]
    assert [parts[name]["images"] for name in ("train", "eval")] == [3, 2]
