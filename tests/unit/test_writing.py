import gzip
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from full_disk import full_disk

from kvsim.errors import OutputError
from kvsim.writing import replacing, write_bytes, write_lines, write_text

Write = Callable[[Path], Path]
WAYS: list[Write] = [
    lambda path: write_text(path, "é\n" * 500),
    lambda path: write_bytes(path, b"\xc3\xa9\n" * 500),
    lambda path: write_lines(path, ["é"] * 500),
]


@pytest.mark.parametrize("write", WAYS)
def test_a_file_is_written_whole_into_a_folder_that_is_made(tmp_path: Path, write: Write) -> None:
    path = write(tmp_path / "deep" / "er" / "page.html")
    assert path.read_bytes() == b"\xc3\xa9\n" * 500
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("write", WAYS)
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, write: Write) -> None:
    (tmp_path / "old").write_text("old")
    for path in (tmp_path / "old", tmp_path / "new" / "page"):
        with pytest.raises(OutputError, match=f"{path}: cannot be written: .*; free"), full_disk():
            write(path)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "old"


@pytest.mark.parametrize("write", WAYS)
def test_a_file_in_the_place_of_a_folder_is_one_clear_error(tmp_path: Path, write: Write) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="page: cannot be written"):
        write(tmp_path / "file" / "page")


def test_any_other_error_passes_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), replacing(tmp_path / "new" / "page") as place:
        place.write_text("half")
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_written_file_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    rights = {
        stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "plain", WAYS[0](tmp_path / "x"))
    }
    assert len(rights) == 1


def test_a_name_in_gz_is_written_gzipped_and_without_a_time(tmp_path: Path) -> None:
    packed = write_lines(tmp_path / "a.gz", ["a", "b"]).read_bytes()
    assert gzip.decompress(packed) == b"a\nb\n"
    assert packed[4:8] == b"\0\0\0\0"
