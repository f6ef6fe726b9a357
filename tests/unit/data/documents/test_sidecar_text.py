from __future__ import annotations

from pathlib import Path

from dstrain.data.documents.pages import read_boxes, read_sidecar


def test_the_text_of_an_image_is_in_a_txt_or_csv_beside_it(tmp_path: Path) -> None:
    image = tmp_path / "a.jpg"
    assert read_sidecar(image) == ""
    (tmp_path / "a.csv").write_text("1,2,3,2,3,4,1,4,TOTAL, RM 8.20\n1,2,3,2,3,4,1,4,THANK YOU\n")
    assert read_sidecar(image) == "TOTAL, RM 8.20\nTHANK YOU"
    (tmp_path / "a.txt").write_text("﻿Total 8.20")
    assert read_sidecar(image) == "Total 8.20"


def test_a_csv_with_named_columns_gives_its_text_column() -> None:
    assert read_boxes('left,top,Text\n1,2,"Total, net"\n3,4,8.20\n5\n') == "Total, net\n8.20"


def test_a_csv_of_another_form_has_no_text() -> None:
    assert read_boxes("a,b\n1,2\n") == ""
    assert read_boxes("") == ""


def test_a_sidecar_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").mkdir()
    assert read_sidecar(tmp_path / "a.jpg") == ""
