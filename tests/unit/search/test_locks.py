"""Locks on bytes of a file, by Unix's calls and by a stand-in for those of Windows."""

import fcntl
import importlib.util
import multiprocessing
import os
import sys
from types import ModuleType

import pytest

from kvsim.search import store as locks


class _Msvcrt(ModuleType):
    """What `msvcrt.locking` does, kept in memory: the range begins where the file is at."""

    LK_UNLCK, LK_NBLCK = 0, 2

    def __init__(self) -> None:
        super().__init__("msvcrt")
        self.held: set[int] = set()

    def locking(self, file: int, mode: int, number: int) -> None:
        assert number == 1
        place = os.lseek(file, 0, os.SEEK_CUR)
        if mode == self.LK_UNLCK:
            self.held.remove(place)
        elif place in self.held:
            raise PermissionError(13, "Permission denied")
        else:
            self.held.add(place)


@pytest.fixture
def file(tmp_path):
    opened = os.open(tmp_path / "locks", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


@pytest.fixture
def windows(monkeypatch):
    """The module as Windows imports it, and its `msvcrt`."""
    runtime = _Msvcrt()
    spec = importlib.util.spec_from_file_location("locks_on_windows", locks.__file__)
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "win32")
        patch.setitem(sys.modules, "msvcrt", runtime)
        patch.setitem(sys.modules, "fcntl", None)
        spec.loader.exec_module(module)
    return module, runtime


def _held_elsewhere(path, place):
    file = os.open(path, os.O_RDWR)
    assert not locks.lock(file, place, wait=False)
    assert locks.lock(file, place + 1, wait=False)


def test_a_byte_is_locked_for_other_processes_alone(tmp_path, file):
    place = locks.PLACES - 2
    assert locks.lock(file, place, wait=True)
    other = multiprocessing.get_context("spawn").Process(
        target=_held_elsewhere, args=(tmp_path / "locks", place)
    )
    other.start()
    other.join()
    assert other.exitcode == 0
    locks.unlock(file, place)


def test_on_windows_a_byte_is_locked_until_it_is_unlocked(windows, file):
    module, runtime = windows
    for place in (0, 7, module.PLACES - 1):
        assert module.lock(file, place, wait=False)
        assert not module.lock(file, place, wait=False)
        assert runtime.held == {place}
        module.unlock(file, place)
    assert runtime.held == set()


def test_on_windows_a_lock_is_waited_for(windows, file, monkeypatch):
    module, runtime = windows
    runtime.held.add(3)
    monkeypatch.setattr(module.time, "sleep", lambda _: runtime.held.clear())
    assert module.lock(file, 3, wait=True)


def test_unix_reports_a_held_lock_in_either_of_two_ways(monkeypatch, file):
    for error in (BlockingIOError, PermissionError):

        def refuse(*_: object, error: type[OSError] = error) -> None:
            raise error

        monkeypatch.setattr(fcntl, "lockf", refuse)
        assert not locks.lock(file, 1, wait=False)
