"""Addresses of results, and the folder that keeps them."""

import json
import multiprocessing
import time
from dataclasses import replace

import msgspec
import pytest

from kvsim.errors import OutputError
from kvsim.search import store as module
from kvsim.search.store import Store, address
from kvsim.settings.config import make_config

CONFIG = make_config({"request_rate": 50.0, "max_model_len": 256})
KEY = "0123456789abcdef" * 2
RECORD = {
    "key": KEY,
    "kvsim_version": "1",
    "config": {},
    "outcome": {"kind": "refused"},
    "figures": {"a": 0.1, "b": None},
}


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path)
    made.make()
    return made


def test_an_address_depends_on_everything_that_decides_a_run(load, monkeypatch):
    keys = {address(CONFIG, load)}
    for setting in ({"seed": 1}, {"watermark": 0.02}, {"cost": {"model": "constant"}}):
        keys.add(address(msgspec.structs.replace(CONFIG, **setting), load))
    keys.add(address(CONFIG, replace(load, sha256="0" * 64)))
    monkeypatch.setattr(module, "__version__", "another")
    keys.add(address(CONFIG, load))
    assert len(keys) == 6


def test_an_address_depends_on_nothing_else(load):
    same = make_config({"max_model_len": 256, "request_rate": 50, "seed": 0, "watermark": None})
    assert address(CONFIG, load) == address(same, replace(load, path="/elsewhere"))


def test_an_address_depends_on_the_files_that_settings_name(load, tmp_path):
    hardware = tmp_path / "gpu.toml"
    config = make_config({"hardware": str(hardware)})
    keys = set()
    for content in ("", "a = 1", "a = 2"):
        hardware.write_text(content)
        keys.add(address(config, load))
    assert len(keys) == 3


def test_an_address_depends_on_the_code_of_a_policy(load, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    config = make_config({"cost": {"model": "my_policy_of_cost:Mine"}})
    keys = {address(config, load)}
    for text in ("class Mine: pass\n", "class Mine: x = 1\n"):
        (tmp_path / "my_policy_of_cost.py").write_text(text)
        keys.add(address(config, load))
    assert len(keys) == 3


def test_what_is_saved_is_loaded(store):
    record = {**RECORD, "outcome": {"kind": "refused", "explanation": "é"}}
    assert store.load(KEY) is None
    store.save(record)
    assert store.load(KEY) == record


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"key": "other"}', b"\xff"])
def test_a_damaged_file_is_no_result(store, tmp_path, damage):
    (tmp_path / "points" / f"{KEY}.json").write_bytes(damage)
    assert store.load(KEY) is None
    assert store.fetch(KEY, lambda: {**RECORD, "new": True})["new"]
    assert store.load(KEY)["new"]


def test_a_result_is_run_once_and_a_failed_run_leaves_nothing(store, tmp_path):
    def fails():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.fetch(KEY, fails)
    assert store.load(KEY) is None
    runs = []
    for _ in range(3):
        store.fetch(KEY, lambda: runs.append(1) or RECORD)
    assert len(runs) == 1
    assert {path.name for path in (tmp_path / "points").iterdir()} == {f"{KEY}.json", "locks"}


def _run_slowly(store, log):
    def run():
        with log.open("a") as file:
            file.write("run\n")
        time.sleep(0.3)
        return RECORD

    store.fetch(KEY, run)


def test_processes_that_want_the_same_result_run_it_once(store, tmp_path):
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    workers = [context.Process(target=_run_slowly, args=(store, log)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert log.read_text() == "run\n"


def test_a_claim_ends_with_its_process(store):
    context = multiprocessing.get_context("spawn")
    worker = context.Process(target=store.claim, args=(KEY,))
    worker.start()
    worker.join()
    assert store.claim(KEY, wait=False)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be made"):
        Store(tmp_path / "file").make()


def test_records_are_plain_json(store, tmp_path):
    store.save({"key": KEY, "b": 1, "a": 2})
    text = (tmp_path / "points" / f"{KEY}.json").read_text()
    assert list(json.loads(text)) == ["key", "b", "a"]
    assert text.endswith("}\n")
