import gzip
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from full_disk import full_disk

from kvsim.errors import OutputError
from kvsim.writing import replacing, write_bytes, write_lines, write_text, write_together

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


@pytest.mark.parametrize("write", WAYS)
def test_a_link_stays_and_the_file_behind_it_is_replaced(tmp_path: Path, write: Write) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/second")
    (tmp_path / "there" / "second").symlink_to("file")
    for _ in range(2):  # where there is no file behind it yet, too
        assert write(tmp_path / "link") == tmp_path / "link"
        assert [path.is_symlink() for path in (tmp_path / "link", tmp_path / "there/second")]
        assert not (tmp_path / "there/file").is_symlink()
        assert (tmp_path / "there/file").read_bytes() == b"\xc3\xa9\n" * 500
        (tmp_path / "there/file").write_text("old")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "link", "second", "there"]


@pytest.mark.parametrize("write", WAYS)
@pytest.mark.parametrize("behind_a_link", [False, True])
def test_a_pipe_takes_what_is_written(tmp_path: Path, write: Write, behind_a_link: bool) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    path = tmp_path / "link" if behind_a_link else pipe
    if behind_a_link:
        path.symlink_to(pipe)
    before = pipe.stat()
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert write(path) == path
    assert (pipe.stat().st_mode, pipe.stat().st_ino) == (before.st_mode, before.st_ino)
    reader.join(10)
    assert read == [b"\xc3\xa9\n" * 500]
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted({"pipe", path.name})


def test_a_device_takes_what_is_written(tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        device.write_bytes(b"")
    except PermissionError:
        pytest.skip("only root makes devices, and not everywhere")
    for write in WAYS:
        write(device)
    assert stat.S_ISCHR(device.stat().st_mode)
    assert list(tmp_path.iterdir()) == [device]


def test_an_open_file_takes_what_is_written() -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader:
        with os.fdopen(write, "wb"):
            write_text(f"/dev/fd/{write}", "whole")
        assert reader.read() == b"whole"


def test_a_folder_of_results_keeps_its_links_and_takes_no_pipe(tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    (out / "a").symlink_to(elsewhere)
    write_together(out, {"a": "1", "b": "2"})
    assert (out / "a").is_symlink() and elsewhere.read_text() == "1"
    os.mkfifo(out / "c")
    with pytest.raises(OutputError, match="out: cannot be written: c is no regular file there"):
        write_together(out, {"a": "3", "b": "4", "c": "5"})
    assert stat.S_ISFIFO((out / "c").stat().st_mode)
    assert [(out / name).read_text() for name in "ab"] == ["1", "2"]
    assert len(list(out.iterdir())) == 3


def test_a_link_that_leads_to_itself_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OutputError, match="loop: cannot be written"):
        write_text(tmp_path / "loop", "x")
    assert (tmp_path / "loop").is_symlink()
