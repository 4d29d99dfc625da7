"""Random specs: whole ones that should pass, and the ways to spoil them."""

from __future__ import annotations

import random
import re

# Names that a careless generator would trip over: functions of the language, of torch, of Python.
POOL = (
    *(
        "lr",
        "eps",
        "decay",
        "mu",
        "exp_avg",
        "sum",
        "max",
        "min",
        "abs",
        "first",
        "sqrt",
        "mean",
        "norm",
        "x",
        "dy",
        "out",
    ),
    *("bias", "g", "v", "t", "id", "input", "max_", "e", "E", "inf_", "s0", "step_", "where", "sign", "key", "value"),
    *(
        "l",
        "O",
        "I",
        "beta1",
        "values",
        "items",
        "index",
        "row",
        "tile",
        "acc",
        "mask",
        "table",
        "rule",
        "spec",
        "hyper_",
    ),
)
NUMBERS = ("0", "1", "2", "0.5", "1e-8", "3", "0.999", "1e30", "1e-30", "7.", ".25", "1E2", "4", "0.1", "1e-3")
# Text that tries to leave the comment, string or docstring that it is copied into.
NASTY = (
    '"""',
    "'''",
    "\\",
    '\\"',
    "{{ 7 * 7 }}",
    "{% raw %}",
    "#}",
    "{#",
    "${x}",
    "%s %(a)s",
    "\\n\\r\\0",
    "\\u0041",
    "\\N{BELL}",
    "é漢字😀",
    "e\u0301",
    '"; import os #',
    "*/",
    "</script>",
    "$\\alpha$",
    "`x`",
    "[a](b)",
    "<!-- -->",
    "\\end{document}",
    "# type: ignore",
    "-*- coding: latin-1 -*-",
)
RAW = ("\x00", "\x0c", "\x1b[31m", "\u2028", "\u202e", "\r", "\t", "\ufeff", "\ud800", "\x85", "\u200b", "²", "β", "−")
INSERTED = (
    *(
        "(",
        ")",
        "[",
        "]",
        ",",
        "+",
        "-",
        "*",
        "/",
        "**",
        "%",
        "@",
        "//",
        "==",
        "<",
        "=",
        "+=",
        ":",
        ".",
        "not",
        "and",
        "or",
    ),
    *(
        "if",
        "else",
        "when",
        "in",
        "for",
        "while",
        "hyper",
        "state",
        "update:",
        "optimizer X",
        "true",
        "inf",
        "first(",
        "x.T",
    ),
    *(
        "norm(g)",
        "sum(g, dim=0)",
        "g[0]",
        "torch.sqrt(g)",
        "lambda x: x",
        "9**9**9",
        "1e999",
        '"text"',
        "a.b()",
        "True",
    ),
    *(
        "\n",
        "\n  ",
        "#",
        "weight",
        "grad",
        "step",
        "let a = 1\n",
        "((((",
        "----",
        "not not not ",
        "a if b else ",
        "1_0",
        "0x1f",
    ),
)


class SpecWriter:
    """Writes one random spec with `write()`; names are declared before use, kinds fit, everything is read."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.names = list(POOL)
        rng.shuffle(self.names)
        self.hypers: list[str] = []
        self.flags: list[str] = []
        self.scalars: list[str] = []
        self.states: dict[str, str | None] = {}
        self.locals: list[str] = []
        self.in_update = False

    def name(self) -> str:
        return self.names.pop() if self.rng.random() < 0.8 else f"n{self.rng.randrange(10**6)}"

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def comment(self) -> str:
        if not self.chance(0.2):
            return ""
        words = [self.rng.choice(NASTY) if self.chance(0.5) else "words" for _ in range(self.rng.randrange(1, 5))]
        return "  # " + " ".join(words)

    def write(self) -> str:
        rng = self.rng
        lines = [f"# {self.rng.choice(NASTY)} {i}" for i in range(rng.randrange(3))]
        lines += ["optimizer " + rng.choice(["Sgdx", "AdamX", "Max", "sum_rule", "X1"]) + self.comment()]
        lines += self.declarations()
        if self.chance(0.5):
            lines.append("")
        lines.append("update:" + self.comment())
        self.in_update = True
        lines += ["  " + line + self.comment() for line in self.body()]
        return "\n".join(lines) + ("\n" if self.chance(0.9) else "")

    # ---------------------------------------------------------- declarations

    def declarations(self) -> list[str]:
        rng, lines = self.rng, []
        for _ in range(rng.randrange(1, 4)):
            name = self.name()
            self.hypers.append(name)
            lines.append(f"hyper {name} = {rng.choice(NUMBERS)}" + rng.choice(["", " in [0, inf)"]) + self.comment())
        for _ in range(rng.randrange(3)):
            name = self.name()
            self.flags.append(name)
            lines.append(f"flag {name}" + rng.choice(["", " = true", " = false"]) + self.comment())
        lines += [self.state() for _ in range(rng.randrange(4))]
        if self.chance(0.4):
            pair, a, b = self.name(), self.name(), self.name()
            lines += [f"hyper {pair} = (0.9, 0.99) in [0, 1)", f"let {a}, {b} = {pair}"]
            self.scalars += [a, b]
        recurrent = [self.name() for _ in range(rng.randrange(2))]
        for name in recurrent:
            lines.append(f"scalar {name}" + rng.choice(["", " = 1", " = 0.5 in [0, 1]"]))
            self.scalars.append(name)
        for _ in range(rng.randrange(4)):
            name = self.name()
            lines.append(f"let {name} = {self.scalar(3)}" + self.comment())
            self.scalars.append(name)
        lines += [f"{name} = {self.scalar(2)}" for name in recurrent]
        if self.chance(0.3):
            words = "".join(rng.choice(NASTY) for _ in range(3)).replace("\\", "\\\\").replace('"', '\\"')
            lines.append(f'require {self.hypers[0]} >= 0 or true, "{words}"')
        return lines

    def state(self) -> str:
        name, when = self.name(), None
        if self.chance(0.3):
            when = self.rng.choice([*self.flags, f"{self.hypers[0]} != 0", f"not {self.hypers[0]} > 1"])
        initial = self.rng.choice(["", "", " = weight", f" = {self.hypers[0]}", " = 0"])
        domain = " in [0, inf)" if "weight" not in initial and self.chance(0.3) else ""
        self.states[name] = when
        return f"state {name}{initial}{domain}" + (f" when {when}" if when else "")

    # ---------------------------------------------------------- expressions

    def scalar(self, depth: int) -> str:
        rng = self.rng
        if depth == 0 or self.chance(0.25):
            names = [*self.hypers, *self.scalars, "step"]
            return rng.choice(NUMBERS) if self.chance(0.3) else rng.choice(names)
        return self.operation(depth, self.scalar, lambda d: self.condition(d, self.scalar), "%")

    def tensor(self, depth: int) -> str:
        if depth == 0 or self.chance(0.2):
            choices = ["grad", "weight", *self.locals]
            choices += [name if when is None else f"({name} if {when} else grad)" for name, when in self.states.items()]
            return self.rng.choice(choices)
        if self.chance(0.3):
            return self.scalar(depth - 1)
        return self.operation(depth, self.tensor, lambda d: self.condition(d, self.tensor), "+")

    def operation(self, depth: int, value, condition, extra: str) -> str:  # type: ignore[no-untyped-def]
        rng, d = self.rng, depth - 1
        match rng.randrange(9):
            case 0 | 1 | 2 | 3:
                op = rng.choice(["+", "-", "*", "/", "**", extra])
                return f"({value(d)} {op} {value(d)})"
            case 4:
                return f"{rng.choice(['-', '+', '-'])}{value(d)}" if self.chance(0.5) else f"({value(d)}) ** 2"
            case 5:
                one = ["sqrt", "rsqrt", "exp", "log", "log1p", "expm1", "tanh", "abs", "sign"]
                return f"{rng.choice(one)}({value(d)})"
            case 6:
                many = {"min": 2, "max": 2, "clamp": 3, "lerp": 3}
                name = rng.choice(list(many))
                return f"{name}({', '.join(value(d) for _ in range(many[name]))})"
            case 7:
                return f"({value(d)} if {condition(d)} else {value(d)})"
            case _:
                return f"where({condition(d)}, {value(d)}, {value(d)})"

    def condition(self, depth: int, value) -> str:  # type: ignore[no-untyped-def]
        rng = self.rng
        if depth <= 0 or self.chance(0.5):
            first = [
                f"first({name})" if when is None else f"(first({name}) if {when} else {rng.choice(['true', 'false'])})"
                for name, when in self.states.items()
            ]
            plain = [*self.flags, f"{value(0)} {rng.choice(['<', '<=', '>', '>=', '==', '!='])} {value(0)}", *first]
            return rng.choice([*plain, f"0 < {value(0)} <= 1", f"isfinite({value(0)})"])
        inner = [self.condition(depth - 1, value) for _ in range(2)]
        return rng.choice([f"({inner[0]} and {inner[1]})", f"({inner[0]} or {inner[1]})", f"not {inner[0]}"])

    # ---------------------------------------------------------- body

    def body(self) -> list[str]:
        lines = []
        fresh: list[str] = []
        for _ in range(self.rng.randrange(3)):
            name = self.name()
            lines.append(f"{name} = {self.tensor(4)}")
            self.locals.append(name)
            fresh.append(name)
        for name, when in self.states.items():
            lines.append(f"{name} = {name} + {self.tensor(3)}" + (f"  when {when}" if when else ""))
        everything = [*fresh, *self.hypers, *self.scalars, *(f"(1 if {flag} else 0)" for flag in self.flags)]
        lines.append(f"weight = weight - {self.tensor(4)} * ({' + '.join(everything)})")
        return lines


def spoil(text: str, rng: random.Random) -> str:
    """`text` with one to four random faults."""
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(text) + 1)
        match rng.randrange(9):
            case 0:
                text = text[:at] + rng.choice(INSERTED) + text[at:]
            case 1:
                text = text[:at] + text[at + rng.randrange(1, 8) :]
            case 2:
                text = text[:at] + rng.choice(NASTY) + text[at:]
            case 3:
                tokens = re.split(r"(\W)", text)
                i, j = rng.randrange(len(tokens)), rng.randrange(len(tokens))
                tokens[i], tokens[j] = tokens[j], tokens[i]
                text = "".join(tokens)
            case 4:
                lines = text.split("\n")
                i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
                lines[i], lines[j] = lines[j], lines[i]
                text = "\n".join(lines)
            case 5:
                lines = text.split("\n")
                lines.insert(rng.randrange(len(lines)), rng.choice(lines))
                text = "\n".join(lines)
            case 6:
                text = text[:at] + rng.choice(RAW) + text[at:]
            case 7:
                words = re.findall(r"\w+", text) or ["x"]
                text = re.sub(rf"\b{re.escape(rng.choice(words))}\b", rng.choice(words), text, count=rng.randrange(3))
            case _:
                piece = text[at : at + rng.randrange(1, 20)]
                text = text[:at] + piece * rng.choice([2, 3, 200]) + text[at:]
    return text
