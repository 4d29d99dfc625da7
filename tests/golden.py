"""A pytest plugin: the `golden` fixture compares a text with a file beside the tests, and `--update-golden` renews
the file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Golden = Callable[[str, Path], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--update-golden`."""
    parser.addoption("--update-golden", action="store_true", help="rewrite expected outputs instead of comparing them")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden(text, path)`: fails unless the file at `path` holds `text`."""
    update = bool(request.config.getoption("--update-golden"))

    def compare(text: str, path: Path) -> None:
        expected = path.read_text(encoding="utf-8") if path.exists() else None
        if text == expected:
            return
        if update:
            path.write_text(text, encoding="utf-8")
            return
        assert expected is not None, f"{path} does not exist; run pytest --update-golden and look at what it writes"
        assert text == expected, f"{path} differs; run pytest --update-golden and look at the difference"

    return compare
