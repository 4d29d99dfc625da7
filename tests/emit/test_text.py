"""Text of a spec (comments, messages, titles, the file's name) is only ever text in what is generated from it."""

from __future__ import annotations

import ast
import re
import unicodedata

import pytest

from forge_dsl.compile import Compiled, compile_source
from forge_dsl.diagnostics import DiagnosticError
from forge_dsl.emit.folder import render, render_page
from forge_dsl.emit.literals import quoted
from forge_dsl.loading import load, module_of
from tests.fuzz.spec_writer import NASTY

SPEC = """\
# {title}
# {title}
optimizer Plain  # {title}

# {title}
hyper lr = 1e-2  in [0, inf)  # {title}
state kept  # {title}

require lr < 100, "{message}"

update:  # {title}
  # {title}
  kept = kept + grad  # {title}
  weight = weight - lr * kept  # {title}
"""
TEXTS = (
    *NASTY,
    *(
        '""" + evil() + """',
        "'''\nevil()\n'''".replace("\n", ";"),
        '"""\\',
        'ends in a quote"',
        "ends in a backslash\\",
    ),
    *(
        "{{ evil() }}",
        "{% import os %}",
        "{# #}",
        "#}",
        "<script>evil()</script>",
        "```",
        "````",
        "--> evil",
        "$$ x $$",
    ),
    *(
        "$$ x $$",
        "[x](javascript:evil())",
        "{: onclick=evil() }",
        "&lt;",
        "| a | b |",
        "\u200b\u2060invisible",
        "\ufeffmark",
    ),
    *("\U000e0041tag", "\u0301combining", "😀", "\U0001d54f", "a" * 498),
)
REFUSED = ("\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x00", "\x1b[31m", "\u202e", "\u2066", "\ud800")


def compiled(text: str, filename: str = "plain.opt") -> Compiled:
    message = text.replace("\\", "\\\\").replace('"', '\\"')
    return compile_source(SPEC.format(title=text, message=message), filename, stem="plain")


def shape(source: str) -> str:
    """The syntax of a module without what its literals say."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = "text"
    return ast.dump(tree)


@pytest.mark.parametrize("text", TEXTS)
def test_generated_python_has_the_same_syntax_whatever_the_text(text: str) -> None:
    plain, nasty = render([compiled("words")]), render([compiled(text)])
    assert plain.keys() == nasty.keys()
    for name in plain:
        assert shape(nasty[name]) == shape(plain[name]), name
        assert "evil" not in {token.id for token in ast.walk(ast.parse(nasty[name])) if isinstance(token, ast.Name)}


@pytest.mark.parametrize("text", TEXTS)
def test_generated_files_hold_no_invisible_characters(text: str) -> None:
    for name, content in render([compiled(text)]).items():
        odd = {char for char in content if char != "\n" and not char.isprintable()}
        assert not odd, (name, odd)
        assert not {char for char in content if unicodedata.bidirectional(char) in {"RLO", "LRO", "RLI", "LRI", "FSI"}}


@pytest.mark.parametrize("text", ['say "no"', "it's", "back\\slash", "😀", "\u0301"])
def test_messages_arrive_as_they_were_written(text: str) -> None:
    module = module_of(compiled(text))
    with pytest.raises(ValueError) as raised:
        module.check_arguments(lr=1000.0)
    assert str(raised.value) == text
    assert module.SPEC.title == module.SPEC.title.encode("utf-8").decode("utf-8")


@pytest.mark.parametrize("text", [*TEXTS, *REFUSED, "a\nb\tc\r", "'\"", "\x7f"])
def test_a_literal_reads_back_as_its_text(text: str) -> None:
    literal = quoted(text)
    assert literal.isascii() and literal.isprintable()
    assert ast.literal_eval(literal) == text


@pytest.mark.parametrize("char", REFUSED)
@pytest.mark.parametrize("place", ["title", "message"])
def test_characters_that_reorder_or_break_lines_are_refused(char: str, place: str) -> None:
    texts = {"title": "words", "message": "words"} | {place: f"a{char}b"}
    with pytest.raises(DiagnosticError, match="E0002"):
        compile_source(SPEC.format(**texts), "plain.opt")


@pytest.mark.parametrize(
    "filename", ['a"""b.opt', "a\nb.opt", "a{{ 1 }}.opt", "a-->b.opt", "a\\b\u202e.opt", "a'b\".opt", "..opt"]
)
def test_the_name_of_the_file_is_text_too(filename: str) -> None:
    one, plain = compiled("words", filename), compiled("words")
    for name, content in render([one]).items():
        assert shape(content) == shape(render([plain])[name])
        assert "{{" not in content.replace("a{{ 1 }}.opt", "")
    assert render_page(one).splitlines()[0].count("-->") == 1


@pytest.mark.parametrize("name", ["my-rule.opt", "class.opt", "1st.opt", "größe.opt", "a b.opt"])
def test_a_file_whose_name_makes_no_function_is_refused(name: str, tmp_path) -> None:
    path = tmp_path / name
    path.write_text(SPEC.format(title="t", message="m"))
    with pytest.raises(DiagnosticError, match=r"E0903[\s\S]*rename"):
        load(path)


@pytest.mark.parametrize("text", TEXTS)
def test_a_page_shows_text_and_runs_nothing(text: str) -> None:
    one = compiled(text)
    page = render_page(one)
    fenced = re.search(r"## Spec\n\n(`+)\n(.*?)\n\1\n", page, flags=re.S)
    assert fenced is not None and fenced[2] == one.checked.source.strip("\n")
    prose = page.replace(fenced[0], "").split("-->", 1)[1]  # the comment at the top names the file
    assert prose.count("$$") == 2 and prose.count("```") == 2
    assert not re.search(r"<\w|<!|</|\[[^\]\n]*\]\(|^.*\{:|&(?!#|\\leftarrow)", prose)
