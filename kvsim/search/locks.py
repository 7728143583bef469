"""Locks single bytes of a file, on Unix and on Windows.

A lock belongs to the process that takes it, and ends with that process.
"""

from __future__ import annotations

import sys

if sys.platform == "win32":
    import msvcrt
    import os
    import time

    PLACES = 1 << 31
    """How many bytes can be locked, counted from the first; `msvcrt` takes no place beyond."""
    _POLL_S = 0.05

    def lock(file: int, place: int, *, wait: bool) -> bool:
        """Lock byte `place` of an open file; False if another holds it and `wait` is False."""
        while not _locked(file, place):
            if not wait:
                return False
            time.sleep(_POLL_S)
        return True

    def unlock(file: int, place: int) -> None:
        """End the lock on byte `place`."""
        os.lseek(file, place, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_UNLCK, 1)

    def _locked(file: int, place: int) -> bool:
        os.lseek(file, place, os.SEEK_SET)
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True

else:
    import fcntl

    PLACES = 1 << 60
    """How many bytes can be locked, counted from the first."""

    def lock(file: int, place: int, *, wait: bool) -> bool:
        """Lock byte `place` of an open file; False if another holds it and `wait` is False."""
        how = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
        try:
            fcntl.lockf(file, how, 1, place)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            return False
        return True

    def unlock(file: int, place: int) -> None:
        """End the lock on byte `place`."""
        fcntl.lockf(file, fcntl.LOCK_UN, 1, place)
