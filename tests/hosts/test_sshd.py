"""A host is up when its sshd has written its process id completely."""

from pathlib import Path

from tests.hosts.host import read_process_id


def test_a_file_that_sshd_is_still_writing_is_no_process_id(tmp_path: Path) -> None:
    path, found = tmp_path / "sshd.pid", []
    for text in (None, "", "51", "513\n"):
        if text is not None:
            path.write_text(text)
        found.append(read_process_id(path))
    assert found == [None, None, None, 513]
