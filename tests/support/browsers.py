"""Waits in a browser."""

from typing import Any


def eventually(page: Any, expression: str) -> None:
    """Wait until it holds; the page's security policy rules out a wait inside the page."""
    for _ in range(200):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never true: {expression}")
