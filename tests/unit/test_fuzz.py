"""Files, records, variables and options that nobody thought of: read, or refused by an error of dstrain.

Each property runs with few inputs in `make test` and with many in the slow tests. What it found stands as a test of
its own where the mended code is tested.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dstrain.cli import main
from dstrain.commands.data import check_file
from dstrain.commands.plan import PlanRequest, make_report
from dstrain.errors import UsageError
from dstrain.launch.hostfile import read_hostfile, select_hosts
from dstrain.launch.plan import read_env_file
from dstrain.launch.topology import visible_devices, worker_from_env
from dstrain.planner.workload import parse_bytes
from tests.tiny import tiny_recipe
from tests.unit.test_hypothesis import JSON, RECORD, TEXT
from tests.vocabulary import write_recipe

SIZES = (30, pytest.param(1000, marks=pytest.mark.slow))
TASKS = ("sft", "rm", "dpo", "kto", "vlm", "docqa", "temporal")


def fuzz(count: int, strategy: st.SearchStrategy[Any], claim: Callable[[Any], None]) -> None:
    """Try the claim with `count` values of the strategy."""
    limits = settings(
        max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=[*HealthCheck]
    )
    limits(given(strategy)(claim))()


def is_sentence(error: UsageError) -> bool:
    """True if the error, and each of its faults, has a fix."""
    texts = [str(fault) for fault in error.faults] or [str(error)]
    return all(";" in text or "did you mean" in text for text in texts)


@contextmanager
def only_errors_of_dstrain() -> Iterator[None]:
    """Fail for any exception but a usage error with a fix."""
    found = None
    try:
        yield
    except UsageError as error:
        found = error
    assert found is None or is_sentence(found), found


NUMBERS = st.integers(-3, 10**25).map(str) | st.sampled_from(["", "x", "-1", "1e3", "0x1", "٣", " 1", "1\n"])
HOST_LINE = st.builds("{}{}{}".format, TEXT, st.sampled_from([" slots=", " ", "slots=", " max_slots=", "#"]), NUMBERS)


@pytest.mark.parametrize("count", SIZES)
def test_any_hostfile_is_hosts_or_refused(count: int, tmp_path: Path) -> None:
    file = tmp_path / "hosts"

    def claim(content: bytes) -> None:
        file.write_bytes(content)
        with only_errors_of_dstrain():
            assert read_hostfile(str(file))

    lines = st.lists(HOST_LINE, max_size=4).map(lambda lines: "\n".join(lines).encode("utf-8", "surrogatepass"))
    fuzz(count, lines | st.binary(max_size=40), claim)


@pytest.mark.parametrize("count", SIZES)
def test_any_selection_of_hosts_is_taken_or_refused(count: int, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=4\n")
    hosts = read_hostfile(str(tmp_path / "hosts"))
    part = st.builds(
        "{}{}{}".format, st.sampled_from(["a", "b", "c", ""]), st.sampled_from([":", "@", ",", ""]), NUMBERS
    )
    text = st.lists(part, max_size=3).map("@".join) | TEXT
    limit = st.none() | st.integers(-2, 9)

    def claim(words: tuple[str, str, int | None, int | None]) -> None:
        with only_errors_of_dstrain():
            assert select_hosts(hosts, *words)

    fuzz(count, st.tuples(text, text, limit, limit), claim)


VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR", "OMPI_COMM_WORLD_RANK"),
    *(
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "SLURM_STEP_ID",
        "SLURM_PROCID",
    ),
    *[
        "SLURM_LOCALID",
        "SLURM_NTASKS",
        "SLURM_STEP_NODELIST",
        "SLURM_JOB_ID",
        "SLURM_NODEID",
        "SLURM_STEP_TASKS_PER_NODE",
    ],
)


@pytest.mark.parametrize("count", SIZES)
def test_any_environment_has_a_rank_or_none_or_is_refused(count: int) -> None:
    value = NUMBERS | st.integers(0, 3).map(str) | TEXT | st.sampled_from(["a[01-03]", "a[", "2(x3),1", "2(x"])

    def claim(env: dict[str, str]) -> None:
        with only_errors_of_dstrain():
            worker = worker_from_env(env)
            assert worker is None or 0 <= worker.rank < worker.world_size

    fuzz(count, st.dictionaries(st.sampled_from(VARIABLES), value, max_size=8), claim)


@pytest.mark.parametrize("count", SIZES)
def test_any_list_of_gpus_size_and_variable_file_is_read_or_refused(count: int, tmp_path: Path) -> None:
    file = tmp_path / "env"

    def claim(text: str) -> None:
        devices = visible_devices(text, 2)
        assert all(device.startswith(("GPU-", "MIG-")) or int(device) in (0, 1) for device in devices), devices
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        with only_errors_of_dstrain():
            assert parse_bytes(text, "--gpu-memory") >= 2**20
        with only_errors_of_dstrain():
            found = read_env_file(file, {})
            assert all(name in text and "=" not in name for name in found), found

    sizes = st.builds("{}{}".format, NUMBERS | st.floats().map(str), st.sampled_from(["", "GiB", "T", "kb", "Q"]))
    fuzz(count, st.text(max_size=20) | sizes, claim)


SIZE = st.integers(-2, 10**20) | st.floats() | st.none() | TEXT | st.booleans() | st.lists(st.integers(), max_size=2)
KEYS = (
    *[
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ],
    *("vocab_size", "tie_word_embeddings", "n_layer", "vision_config", "text_config", "attention_bias", "image_size"),
    *("sliding_window", "layer_types", "architectures", "auto_map", "quantization_config", "max_position_embeddings"),
)
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "llava", "qwen2_5_vl")


@pytest.mark.parametrize("count", SIZES)
def test_any_config_of_a_model_is_planned_or_refused(count: int, tmp_path: Path) -> None:
    values = tiny_recipe("rm", tmp_path)
    (tmp_path / "m").mkdir()
    values["model"] = {"path": str(tmp_path / "m")}
    recipe = str(write_recipe(tmp_path, values))
    small = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 99,
    }

    def claim(given: tuple[str, dict[str, Any]]) -> None:
        text = json.dumps({"model_type": given[0], **small, **given[1]})
        (tmp_path / "m/config.json").write_text(text)
        with only_errors_of_dstrain():
            report = make_report(PlanRequest(recipe=recipe, gpu_memory="24GiB"))
            assert report.choice is not None or report.refusal
            assert all(plan if isinstance(plan, str) else plan.lines for plan in report.plans)

    family = st.sampled_from(FAMILIES)
    fuzz(count, st.tuples(family, st.dictionaries(st.sampled_from(KEYS), SIZE | JSON, max_size=3)), claim)


def check_bytes(path: Path, task: str, content: bytes) -> None:
    """The file is checked, or refused; a bad record has a reason with a fix."""
    path.write_bytes(content)
    with only_errors_of_dstrain():
        report, _ = check_file(str(path if path.suffix not in (".pdb", ".cif") else path.parent), task, ())
        for row in report.bad:
            assert "; " in row.reason, row
            assert row.reason.isprintable(), row


SERIES = st.lists(st.floats() | st.integers() | st.none() | TEXT, max_size=4)
MORE = st.fixed_dictionaries(
    {},
    optional={
        "image": TEXT | JSON, "images": st.lists(TEXT, max_size=2) | JSON, "question": TEXT | JSON, "answer": TEXT | JSON,
        "answers": JSON, "caption": TEXT | JSON, "captions": st.lists(TEXT, max_size=2) | JSON, "completion": TEXT | JSON,
        "document": TEXT | JSON, "evidence_pages": JSON, "series": SERIES | st.lists(SERIES, max_size=3) | JSON,
        "messages": JSON, "label": JSON, "prompt": TEXT | JSON, "response": TEXT,
    },
)  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("count", SIZES)
def test_any_record_of_any_task_is_good_or_bad(task: str, count: int, tmp_path: Path) -> None:
    def claim(record: dict[str, Any]) -> None:
        check_bytes(tmp_path / "x.jsonl", task, json.dumps(record).encode())

    fuzz(count, RECORD | MORE | st.builds(lambda a, b: {**a, **b}, RECORD, MORE), claim)


TS = "@problemName a\n@timeStamps false\n@univariate true\n@equalLength false\n@classLabel true a b\n@data\n1,2,3:a\n4,?,6:b\n"
CSV = "series,label,caption\n1 2 3,a,x\n4 5 6,b,y\n"
PDB = "".join(
    f"ATOM  {n:5d}  {atom:<3} ALA A{n // 3 + 1:4d}    {n:8.3f}{n * 2:8.3f}{n * 3:8.3f}  1.00  0.00           {atom[0]}\n"
    for n, atom in enumerate(["N", "CA", "C"] * 4, start=1)
)


@cache
def whole_files() -> dict[str, bytes]:
    """Name -> a good file."""
    from PIL import Image

    made = {"x.ts": TS.encode(), "x.csv": CSV.encode(), "p/a.pdb": PDB.encode()}
    for kind in ("png", "jpeg", "webp", "gif"):
        buffer = BytesIO()
        Image.new("RGB", (9, 7), (200, 30, 30)).save(buffer, kind)
        made[f"a.{kind}"] = buffer.getvalue()
    return made


def damage(content: bytes) -> st.SearchStrategy[bytes]:
    """The content with up to three of its bytes changed, cut, or doubled in part."""
    place = st.integers(0, len(content) - 1)

    def apply(changes: list[tuple[int, int, str]]) -> bytes:
        made = bytearray(content)
        for at, byte, how in changes:
            at %= max(1, len(made))
            if how == "cut":
                del made[at:]
            elif how == "insert":
                made[at:at] = bytes([byte]) * 3
            elif how == "double":
                made[at:at] = made[at : at + 20]
            elif made:
                made[at] = byte
        return bytes(made)

    return st.lists(
        st.tuples(place, st.integers(0, 255), st.sampled_from(["set", "cut", "insert", "double"])),
        min_size=1,
        max_size=3,
    ).map(apply)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "task"), [("x.ts", "temporal"), ("x.csv", "temporal"), ("p/a.pdb", "protein")])
@pytest.mark.parametrize("count", SIZES)
def test_a_damaged_file_is_checked_or_refused(name: str, task: str, count: int, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    fuzz(count, damage(whole_files()[name]), lambda content: check_bytes(tmp_path / name, task, content))


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "gif"])
@pytest.mark.parametrize("count", SIZES)
def test_a_damaged_image_is_good_or_bad(kind: str, count: int, tmp_path: Path) -> None:
    record = {"image": f"a.{kind}", "question": "q", "answer": "a"}

    def claim(content: bytes) -> None:
        (tmp_path / f"a.{kind}").write_bytes(content)
        check_bytes(tmp_path / "x.jsonl", "vlm", json.dumps(record).encode())

    fuzz(count, damage(whole_files()[f"a.{kind}"]) | st.binary(max_size=30), claim)


@cache
def document() -> bytes:
    from fpdf import FPDF

    pdf = FPDF(format=(60, 60))
    pdf.add_page()
    pdf.set_font("helvetica", size=9)
    pdf.cell(text="a page")
    return bytes(pdf.output())


@pytest.mark.parametrize("count", [10, pytest.param(300, marks=pytest.mark.slow)])
def test_a_damaged_document_is_good_or_bad(count: int, tmp_path: Path) -> None:
    (tmp_path / "documents").mkdir()
    record = {"question": "q", "answer": "a", "document": "a.pdf"}

    def claim(content: bytes) -> None:
        (tmp_path / "documents/a.pdf").write_bytes(content)
        check_bytes(tmp_path / "x.jsonl", "docqa", json.dumps(record).encode())

    fuzz(count, damage(document()), claim)


@pytest.mark.parametrize("count", SIZES)
def test_any_command_line_ends_with_0_or_2(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    monkeypatch.chdir(tmp_path)
    commands = ["plan", "tasks", "presets", "recipes", "init", "checkpoints", "data", "train", "check"]
    options = [
        "--task",
        "--set",
        "--gpu-memory",
        "--gpus",
        "--dry-run",
        "--json",
        "--ds-config",
        "--adopt",
        "--verify",
        "--to",
    ]
    words = st.sampled_from([*commands, *options, "rm", ".", "demo-rm", "zero2", "-", "--"]) | TEXT | NUMBERS
    before = sorted(tmp_path.rglob("*"))

    def claim(line: list[str]) -> None:
        if "--to" in line or ("train" in line and "--dry-run" not in line):
            return
        result = CliRunner().invoke(main, line)
        assert result.exit_code in (0, 2), (line, result.output)
        assert sorted(tmp_path.rglob("*")) == before

    fuzz(count, st.lists(words, max_size=5), claim)
