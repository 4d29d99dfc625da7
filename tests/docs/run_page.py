"""Run what a Markdown page shows, in order, in the current folder: `python run_page.py PAGE`.

- `console` blocks: each line after `$ ` is a command. If lines follow it, they are its output, errors included; a line
  `...` stands for any number of lines. Without them the command must succeed.
- `python` blocks share one namespace.
- A block with a title, `title="my.opt"`, is written to a file of that name.
- Commands of `make` are not run: they are the project's own, and tested elsewhere.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_TITLE = re.compile(r'title="([\w.]+)"')


def blocks(text: str) -> Iterator[tuple[str, str | None, str, int]]:
    """Language, title, body and first line of every fenced block."""
    for match in _BLOCK.finditer(text):
        title = _TITLE.search(match[2])
        yield match[1], title and title[1], match[3], text.count("\n", 0, match.start()) + 2


def commands(body: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a console block with the output lines shown below it."""
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        command, *output = part.rstrip("\n").split("\n")
        yield command, output


def matches(shown: list[str], printed: list[str]) -> bool:
    """Whether the printed lines are those shown; blank ends do not count."""
    pattern = "".join(r"(?:.*\n)*?" if line == "..." else re.escape(line.rstrip()) + r"\n" for line in shown)
    return re.fullmatch(pattern, "".join(line.rstrip() + "\n" for line in printed)) is not None


def run_command(command: str, shown: list[str]) -> None:
    done = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if shown:
        assert matches(shown, done.stdout.strip("\n").split("\n")), f"$ {command}\n{done.stdout}"
    else:
        assert done.returncode == 0, f"$ {command}\n{done.stdout}"


def main(page: Path) -> None:
    sys.path.insert(0, str(Path.cwd()))
    namespace: dict[str, object] = {"__name__": "page"}
    for language, title, body, line in blocks(page.read_text(encoding="utf-8")):
        if title:
            Path(title).write_text(body, encoding="utf-8")
        if language == "console":
            for command, shown in commands(body):
                if not command.startswith("make "):
                    run_command(command, shown)
        elif language == "python":
            exec(compile("\n" * (line - 1) + body, str(page), "exec"), namespace)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
