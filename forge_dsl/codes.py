"""Every code of the compiler: its name, what it means, a spec that gets it and the same spec repaired.

E00 files and bounds, E01 form, E02 names, E03 kinds, E04 values, E05 separability, E06 statements, E07 definedness,
E09 what a run writes; W07 values that nothing needs, W08 domains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CodeInfo:
    """A code of a diagnostic. `failing` and `fixed` are specs; where they begin with `$`, commands."""

    code: str
    slug: str
    severity: Literal["error", "warning"]
    explanation: str
    failing: str
    fixed: str


STEP = "weight = weight - lr * grad"
RATE = "hyper lr = 1e-3 in [0, inf)"


def spec(*update: str, declare: tuple[str, ...] = ()) -> str:
    """A small whole spec: `declare` below the learning rate, `update` indented; plain SGD where there is none."""
    above = ["optimizer Example", RATE, *declare, "update:"]
    return "\n".join(above + [f"  {line}" for line in update or (STEP,)])


def _error(code: str, slug: str, explanation: str, failing: str, fixed: str) -> CodeInfo:
    return CodeInfo(code, slug, "error", explanation, failing, fixed)


def _warning(code: str, slug: str, explanation: str, failing: str, fixed: str) -> CodeInfo:
    return CodeInfo(code, slug, "warning", explanation, failing, fixed)


_SUM = spec("total = " + " + ".join(["grad"] * 70), "weight = weight - lr * total")
_PAIR = ("hyper betas = (0.9, 0.999) in [0, 1)", "let beta1, beta2 = betas")

_FILES = (
    _error(
        "E0001",
        "unreadable",
        "The file or folder cannot be read: it does not exist, is not a regular file, or may not be opened.",
        "$ forge-gen no_such_file.opt -o generated",
        "$ forge-gen adamw.opt -o generated",
    ),
    _error(
        "E0002",
        "not-text",
        "A spec is UTF-8 text. Control characters, and marks that hide or reorder text, are not allowed anywhere "
        "in it: what a reader sees must be what is compiled.",
        spec(STEP + "  # \x07"),
        spec(STEP + "  # bell"),
    ),
    _error(
        "E0003",
        "too-large",
        "A spec has at most 64 KiB, 400 statements, and 8,000 numbers, names and operations. A published rule "
        "takes less than a tenth of that.",
        spec(*["weight = weight - lr * grad"] * 401),
        spec(),
    ),
    _error(
        "E0004",
        "too-deep",
        "An expression is nested at most 64 deep, not counting parentheses: name its parts. A sum of 70 terms is "
        "70 deep.",
        _SUM,
        spec(),
    ),
    _error(
        "E0005",
        "too-many-switches",
        "Every combination of the flags, and of the comparisons that a `when` uses, is a compiled variant; 8 of "
        "them make 256 variants already. A flag that only chooses between two numbers can be a hyper.",
        spec(
            *[f"weight = weight - {i} * lr  when f{i}" for i in range(9)], declare=tuple(f"flag f{i}" for i in range(9))
        ),
        spec("weight = weight - lr * grad * (2 if f0 else 1)", declare=("flag f0",)),
    ),
    _error(
        "E0006",
        "too-long",
        "Names have at most 64 characters, numbers 40, messages 500.",
        spec("g = grad * 1." + "0" * 60, "weight = weight - lr * g"),
        spec("g = grad * 1.0", "weight = weight - lr * g"),
    ),
)

_FORM = (
    _error(
        "E0101",
        "unexpected",
        "The line does not read as a statement; the message says what was expected at the caret.",
        spec("weight = weight - lr *"),
        spec(),
    ),
    _error(
        "E0102",
        "unknown-character",
        "A character that no statement contains, often one that a word processor or a paper put in place of an "
        "ASCII sign.",
        spec("weight = weight \u2212 lr * grad"),
        spec(),
    ),
    _error(
        "E0103",
        "bracket",
        "A bracket is not closed, closes nothing, or closes one of another kind. Inside brackets a line may break "
        "freely, so an open one swallows the lines below it.",
        spec("weight = weight - lr * (grad + 1"),
        spec("weight = weight - lr * (grad + 1)"),
    ),
    _error(
        "E0104",
        "message-text",
        'The message of a `require` stands in double quotes on one line; `\\"` and `\\\\` are its only escapes.',
        spec(declare=('require lr < 1, "lr is below 1',)),
        spec(declare=('require lr < 1, "lr is below 1"',)),
    ),
    _error(
        "E0105",
        "indentation",
        "Declarations are not indented; the body of `update:` is, all of it by the same number of blanks, on lines"
        " of its own. Tabs do not indent.",
        spec("g = grad", "  weight = weight - lr * g"),
        spec("g = grad", "weight = weight - lr * g"),
    ),
    _error("E0106", "missing-colon", "`update:` has a colon.", spec().replace("update:", "update"), spec()),
    _error(
        "E0107",
        "no-optimizer",
        "A spec begins with `optimizer` and the name of the class to be generated.",
        spec().replace("optimizer Example\n", ""),
        spec(),
    ),
    _error("E0108", "no-update", "A spec ends with `update:`, the rule itself.", "optimizer Example\n" + RATE, spec()),
    _error(
        "E0109", "empty-update", "Nothing stands under `update:`.", "optimizer Example\n" + RATE + "\nupdate:", spec()
    ),
    _error(
        "E0110",
        "out-of-place",
        "A spec is `optimizer`, the declarations, and `update:` with the rule, in this order, one optimizer a file.",
        spec("state m", "m = 0.9 * m + grad", "weight = weight - lr * m"),
        spec("m = 0.9 * m + grad", "weight = weight - lr * m", declare=("state m",)),
    ),
    _error(
        "E0111",
        "foreign-sign",
        "A sign of another language: `and`, `or`, `not` are words here, a power is `**`, a comparison `==`.",
        spec("weight = weight - lr * grad ^ 3"),
        spec("weight = weight - lr * grad ** 3"),
    ),
    _error(
        "E0112",
        "declaration-form",
        "Declarations have the form `kind name [= initial] [in range] [when condition]`, but a flag has no range, "
        "only a state has a `when`, and only a hyper may have several ranges or a tuple for its default. `require`"
        " takes a condition and a message.",
        spec(declare=("flag nesterov = false in [0, 1]",)),
        spec("weight = weight - lr * (2 * grad if nesterov else grad)", declare=("flag nesterov = false",)),
    ),
    _error(
        "E0113",
        "assignment-target",
        "An assignment gives one name one value. There is nothing to index, and `a = b = c` is two statements.",
        spec("weight[0] = weight[0] - lr * grad"),
        spec(),
    ),
    _error(
        "E0114",
        "number",
        "Numbers are written like `2`, `0.9`, `1e-8` or `inf`.",
        spec("weight = weight - 1_000 * lr * grad"),
        spec("weight = weight - 1000 * lr * grad"),
    ),
    _error(
        "E0115",
        "text",
        "Text is the message of a `require` and nothing else; states and hypers are names, not entries of a dict.",
        spec('weight = weight - group["lr"] * grad'),
        spec(),
    ),
)

_NAMES = (
    _error(
        "E0201",
        "undefined-name",
        "Nothing of this name is declared, and `update:` assigns no local of this name. A rule reads one "
        "coordinate of one weight: other tensors do not exist for it.",
        spec("weight = weight - rl * grad"),
        spec(),
    ),
    _error("E0202", "declared-twice", "Every name is declared once.", spec(declare=("hyper lr = 1",)), spec()),
    _error(
        "E0203",
        "reserved-name",
        "The name is a word of the language or of Python, or the generated module uses it. `step`, `grad` and "
        "`weight` are given and cannot be declared.",
        spec("weight = weight - lr * lambda", declare=("hyper lambda = 0",)),
        spec("weight = weight - lr * (grad + decay * weight)", declare=("hyper decay = 0",)),
    ),
    _error(
        "E0204",
        "unfit-name",
        "Names are ASCII letters, digits and underscores, and begin with a letter.",
        spec("weight = weight - lr * (1 - \u03b2) * grad", declare=("hyper \u03b2 = 0.9",)),
        spec("weight = weight - lr * (1 - beta) * grad", declare=("hyper beta = 0.9",)),
    ),
    _error(
        "E0205",
        "read-only",
        "`update:` assigns the weight, states and locals; the declarations assign recurrent scalars. Hypers and "
        "flags belong to the user, `step` and `grad` are given, and a `let` is computed once per step, before any "
        "coordinate.",
        spec("lr = lr * 0.5", STEP),
        spec("weight = weight - rate * grad", declare=("let rate = lr * 0.5",)),
    ),
    _error(
        "E0206",
        "unused",
        "Nothing reads this hyper, flag, state, scalar or `let`. To read it in an initial value, a `when` or a "
        "`require` is enough.",
        spec(declare=("hyper momentum = 0.9",)),
        spec("weight = weight - lr * momentum * grad", declare=("hyper momentum = 0.9",)),
    ),
    _error(
        "E0207",
        "unknown-function",
        "No element-wise function has this name. A name followed by `(` is a function, whatever is declared.",
        spec("weight = weight - lr * sqr(grad)"),
        spec("weight = weight - lr * grad * grad"),
    ),
    _error(
        "E0208",
        "python",
        "The language is smaller than Python: `true` and `false` are lower case, functions need no module, and "
        "there is no `return`, `pass`, `lambda`, `is` or `self`.",
        spec("weight = weight - lr * torch.tanh(grad)"),
        spec("weight = weight - lr * tanh(grad)"),
    ),
)

_KINDS = (
    _error(
        "E0301",
        "condition-expected",
        "A condition is a flag, a comparison, `first(state)`, `isfinite(x)`, or these joined by `and`, `or`, "
        "`not`. Numbers are not true or false.",
        spec("weight = weight - lr * (grad if grad else 1)"),
        spec("weight = weight - lr * (grad if grad != 0 else 1)"),
    ),
    _error(
        "E0302",
        "number-expected",
        "Conditions are not numbers: `1 if c else 0` makes one of it.",
        spec("weight = weight - lr * (grad > 0)"),
        spec("weight = weight - lr * (1 if grad > 0 else 0)"),
    ),
    _error(
        "E0303",
        "scalar-expected",
        "A tensor stands where a scalar of the step is needed: a `let` and a `scalar` are computed once per step, "
        "before any coordinate, and `%` counts steps.",
        spec("weight = weight - rate * grad", declare=("let rate = lr * abs(grad)",)),
        spec("rate = lr * abs(grad)", "weight = weight - rate * grad"),
    ),
    _error(
        "E0304",
        "argument-count",
        "The function takes another number of arguments.",
        spec("weight = weight - lr * clamp(grad, 1)"),
        spec("weight = weight - lr * clamp(grad, -1, 1)"),
    ),
    _error(
        "E0305",
        "keyword-argument",
        "Functions take their arguments by place.",
        spec("weight = weight - lr * clamp(grad, -1, high=1)"),
        spec("weight = weight - lr * clamp(grad, -1, 1)"),
    ),
    _error(
        "E0306",
        "tuple",
        "A tuple of 2 to 16 numbers can be the default of a hyper; `let a, b = betas` takes it apart. It is not a "
        "value.",
        spec("weight = weight - lr * betas[0] * grad", declare=("hyper betas = (0.9, 0.999)",)),
        spec("weight = weight - lr * (beta1 - beta2) * grad", declare=_PAIR),
    ),
    _error(
        "E0307",
        "unpacking",
        "The names on the left are as many as the elements of the tuple, and only a tuple hyper is taken apart.",
        spec("weight = weight - lr * beta * grad", declare=("hyper betas = (0.9, 0.999)", "let beta = betas")),
        spec("weight = weight - lr * (beta1 - beta2) * grad", declare=_PAIR),
    ),
    _error(
        "E0308",
        "mixed-kinds",
        "Both branches of a choice are numbers, or both are conditions; and a local keeps its kind.",
        spec("weight = weight - lr * (grad if grad > 0 else grad < 1)"),
        spec("weight = weight - lr * (grad if grad > 0 else 1)"),
    ),
    _error(
        "E0309",
        "not-allowed-here",
        "Defaults, ranges and the initial value of a scalar are made of numbers alone; the initial value of a "
        "state may read hypers and `weight`.",
        spec("weight = weight - lr * decay * grad", declare=("hyper decay = lr * 2",)),
        spec("weight = weight - lr * decay * grad", declare=("hyper decay = 2e-3",)),
    ),
    _error(
        "E0310",
        "when",
        "A `when` picks the compiled variant before a step begins, so it is made of flags and of comparisons of "
        "hypers with numbers or hypers. Every other choice is written `a if c else b`.",
        spec("weight = weight - lr * grad  when step > 10"),
        spec("weight = weight - lr * (grad if step > 10 else 0)"),
    ),
    _error(
        "E0311",
        "first",
        "`first(name)` asks about a state: it is true until that state of that weight has once been written.",
        spec("weight = weight - lr * (0 if first(grad) else grad)"),
        spec("weight = weight - lr * (0 if first(m) else m)", "m = grad", declare=("state m",)),
    ),
    _error(
        "E0312",
        "require",
        "`require` is checked when the optimizer is constructed, so its condition reads hypers and flags.",
        spec(declare=('require step > 0, "never"',)),
        spec(declare=('require lr < 10, "lr is too large"',)),
    ),
)

_VALUES = (
    _error(
        "E0401",
        "not-finite",
        "Defaults and initial values are finite numbers; the ends of a range are numbers or `inf`. A number that is "
        "written with digits is finite everywhere.",
        spec("weight = weight - lr * grad / big", declare=("hyper big = 9 ** 9 ** 9",)),
        spec("weight = weight - lr * grad / big", declare=("hyper big = 9 ** 9",)),
    ),
    _error(
        "E0402",
        "out-of-range",
        "A default or an initial value lies outside the range that is declared with it.",
        spec("weight = weight - lr * beta * grad", declare=("hyper beta = 1 in [0, 1)",)),
        spec("weight = weight - lr * beta * grad", declare=("hyper beta = 0.9 in [0, 1)",)),
    ),
    _error(
        "E0403",
        "empty-range",
        "No number lies in this range.",
        spec("weight = weight - lr * beta * grad", declare=("hyper beta = 1 in [1, 0]",)),
        spec("weight = weight - lr * beta * grad", declare=("hyper beta = 1 in [0, 1]",)),
    ),
    _error(
        "E0404",
        "range-count",
        "A hyper has one range for all of its elements, or one for each.",
        spec("weight = weight - lr * beta * grad", declare=("hyper beta = 0.9 in [0, 1), [0, 2)",)),
        spec("weight = weight - lr * beta * grad", declare=("hyper beta = 0.9 in [0, 1)",)),
    ),
    _error(
        "E0405",
        "defaults-refused",
        "With every hyper and flag at its default, this `require` would raise: nobody could construct the optimizer.",
        spec(declare=('require lr > 1, "lr is above 1"',)),
        spec(declare=('require lr < 1, "lr is below 1"',)),
    ),
    _error(
        "E0406",
        "no-default",
        "Every hyper has a default.",
        spec("weight = weight - lr * beta * grad", declare=("hyper beta in [0, 1)",)),
        spec("weight = weight - lr * beta * grad", declare=("hyper beta = 0.9 in [0, 1)",)),
    ),
    _error(
        "E0407",
        "constant-not-finite",
        "Numbers alone make infinity or no number, as in `1 / 0`, `log(0)`, `exp(1000)` or `sqrt(-1)`, and it meets a "
        "tensor; or a tensor is divided by 0. No coordinate would be a number any more. Infinity that is meant, as a "
        "bound, is written `inf`.",
        spec("weight = weight - lr * grad / (1 - 1)"),
        spec("weight = weight - lr * clamp(grad, -inf, 1)"),
    ),
)

_COUPLED = (
    "The update is fused into the matrix product that makes the gradient: a tile of the weight is updated as soon "
    "as its own gradient is complete, when the rest does not exist yet. So the new value of a coordinate may "
    "depend on that coordinate alone. "
)
_SEPARABILITY = (
    _error(
        "E0501",
        "reduction",
        _COUPLED
        + "Sums, means, norms and the largest element combine all coordinates: the trust ratio of LARS and LAMB, the "
        "row and column means of Adafactor, clipping by root mean square.",
        spec("weight = weight - lr * grad * norm(weight) / norm(grad)"),
        spec(),
    ),
    _error(
        "E0502",
        "matrix",
        _COUPLED
        + "Products, roots and decompositions of matrices mix rows and columns: the orthogonalisation of Muon, the "
        "Kronecker factors of Shampoo and SOAP.",
        spec("weight = weight - lr * grad @ grad.T @ grad"),
        spec("weight = weight - lr * grad * grad * grad"),
    ),
    _error(
        "E0503",
        "position",
        _COUPLED + "It has no index, no neighbours and no shape, and cannot be moved.",
        spec("weight = weight - lr * grad[0]"),
        spec(),
    ),
    _error(
        "E0504",
        "order",
        _COUPLED + "Sorting, ranks, quantiles and running sums compare or scan coordinates.",
        spec("weight = weight - lr * clamp(grad, -1, quantile(grad, 0.9))"),
        spec("weight = weight - lr * clamp(grad, -1, 1)"),
    ),
    _error(
        "E0505",
        "random",
        "A step gives the same result on every tile and in every run, so a rule draws no random numbers. Those that "
        "weights and states may be rounded with are drawn where they are stored.",
        spec("weight = weight - lr * (grad + randn(weight))"),
        spec(),
    ),
    _error(
        "E0506",
        "method",
        "Values are numbers and conditions: they have no methods and no attributes. Functions are called by name, "
        "and nothing is changed in place.",
        spec("weight = weight - lr * grad.clamp_(-1, 1)"),
        spec("weight = weight - lr * clamp(grad, -1, 1)"),
    ),
)

_STATEMENTS = (
    _error(
        "E0601",
        "block",
        "Every coordinate goes through the same operations, so there are no `if`, `for` and `while` statements. A "
        "choice is written `a if c else b`; one that flags make may also be a `when` at the end of an assignment.",
        spec("g = grad", "if lr > 1:", "  g = g / 2", "weight = weight - lr * g"),
        spec("g = grad / 2 if lr > 1 else grad", "weight = weight - lr * g"),
    ),
    _error("E0602", "augmented", "Write `x = x + y`.", spec("weight -= lr * grad"), spec()),
    _error(
        "E0603",
        "no-effect",
        "A line of `update:` assigns something; a bare expression changes nothing.",
        spec("sqrt(abs(grad))", STEP),
        spec("g = sqrt(abs(grad))", "weight = weight - lr * g"),
    ),
)

_DEFINEDNESS = (
    _error(
        "E0701",
        "no-value-yet",
        "The name is read before it has a value, for every choice of the flags or for some.",
        spec("weight = weight - lr * u", "u = grad"),
        spec("u = grad", "weight = weight - lr * u"),
    ),
    _error(
        "E0702",
        "absent-state",
        "A state with a `when` does not exist in the other variants: what reads or assigns it needs the same "
        "condition.",
        spec("m = 0.9 * m + grad", "weight = weight - lr * m", declare=("flag heavy", "state m when heavy")),
        spec(
            "m = 0.9 * m + grad  when heavy",
            "weight = weight - lr * (m if heavy else grad)",
            declare=("flag heavy", "state m when heavy"),
        ),
    ),
    _error(
        "E0703",
        "never-read",
        "A value is assigned and nothing reads it before the name is assigned again, for every choice of the flags"
        " or for some; or nothing ever reads the local. An assignment with a `when` replaces the value only where its "
        "condition holds: elsewhere the name keeps the value it has, which counts as read if the name is read later.",
        spec("u = grad", "u = 2 * grad", "weight = weight - lr * u"),
        spec("u = 2 * grad", "weight = weight - lr * u"),
    ),
    _error(
        "E0704",
        "weight-unchanged",
        "An optimizer that leaves the weight as it is, for every choice of the flags or for some.",
        spec("m = 0.9 * m + lr * grad", declare=("state m",)),
        spec("m = 0.9 * m + lr * grad", "weight = weight - m", declare=("state m",)),
    ),
    _error(
        "E0705",
        "never-assigned",
        "A state or scalar that keeps the number it starts from is a constant. A state that starts from the weight"
        " or a hyper may stay as it is: an anchor.",
        spec("weight = weight - lr * (grad + m)", declare=("state m",)),
        spec("weight = weight - lr * (grad + weight - m)", declare=("state m = weight",)),
    ),
    _warning(
        "W0706",
        "never-reaches-weight",
        "No value of the state reaches the weight, in this step or in a later one, for any choice of the flags: its "
        "buffer costs memory and traffic for nothing. Often the rule reads `grad` where it was to read the state. A "
        "state that starts from `weight` is an average or a copy of it, to be read from outside, and may stay without "
        "effect.",
        spec("m = 0.9 * m + 0.1 * grad", STEP, declare=("state m",)),
        spec("m = 0.9 * m + 0.1 * grad", "weight = weight - lr * m", declare=("state m",)),
    ),
    _warning(
        "W0707",
        "overwritten-state",
        "Every step assigns the state before anything reads it, for every choice of the flags, so no step sees what "
        "the one before has stored: its buffer costs memory and traffic for nothing. A state that starts from "
        "`weight` may be there to be read from outside.",
        spec("m = sign(grad)", "weight = weight - lr * m", declare=("state m",)),
        spec("m = sign(grad)", "weight = weight - lr * m"),
    ),
    _warning(
        "W0708",
        "gradient-unused",
        "Nothing on the way to the weight reads `grad`, for any choice of the flags: whatever the loss is, each step "
        "does the same.",
        spec("weight = weight * (1 - lr)"),
        spec("weight = weight * (1 - lr) - lr * grad"),
    ),
)

_RUNS = (
    _error(
        "E0901",
        "name-taken",
        "Two specs of one run would define the same class, module or function.",
        "$ forge-gen adam.opt old/adam.opt -o generated",
        "$ forge-gen adam.opt old/adam_classic.opt -o generated",
    ),
    _error(
        "E0902",
        "output",
        "The output folder holds files that the generator did not write, or cannot be written. Nothing is "
        "overwritten that is not ours, and nothing is written at all.",
        "$ forge-gen adamw.opt -o src",
        "$ forge-gen adamw.opt -o generated",
    ),
    _error(
        "E0903",
        "module-name",
        "A spec is a file called `name.opt`. The name becomes that of the generated module, which Python must be able "
        "to import.",
        "$ forge-gen my-rule.opt -o generated",
        "$ forge-gen my_rule.opt -o generated",
    ),
    _error(
        "E0904",
        "package-name",
        "The last part of the output folder's path names the generated package, which Python must be able to import, "
        "and which must not hide a library: a folder `torch` beside a script is what its `import torch` finds.",
        "$ forge-gen adamw.opt -o torch",
        "$ forge-gen adamw.opt -o generated",
    ),
)

_DOMAINS = (
    _warning(
        "W0801",
        "may-be-negative",
        "The argument of a root, a logarithm or a fractional power may be negative as far as the declared ranges "
        "tell, and the result would be NaN. A product with equal factors counts as a square; a state is what its "
        "domain says.",
        spec("v = 0.9 * v + 0.1 * grad * grad", "weight = weight - lr * grad / (sqrt(v) + 1e-8)", declare=("state v",)),
        spec(
            "v = 0.9 * v + 0.1 * grad * grad",
            "weight = weight - lr * grad / (sqrt(v) + 1e-8)",
            declare=("state v in [0, inf)",),
        ),
    ),
    _warning(
        "W0802",
        "may-be-zero",
        "The divisor may be zero with every hyper at its default, and the result would be infinite or NaN.",
        spec("weight = weight - lr * grad / abs(grad)"),
        spec("weight = weight - lr * grad / (abs(grad) + 1e-8)"),
    ),
    _warning(
        "W0803",
        "zero-to-zero",
        "Base and exponent of a power may both be zero; the result is 1, as in torch.",
        spec("weight = weight - lr * abs(grad) ** p", declare=("hyper p = 0 in [0, 1]",)),
        spec("weight = weight - lr * abs(grad) ** p", declare=("hyper p = 0.5 in [0, 1]",)),
    ),
    _warning(
        "W0804",
        "may-leave-domain",
        "What is assigned to a state or scalar may lie outside its declared domain, which the checks of roots and "
        "quotients take for granted. Yogi's second moment is such a case.",
        spec(
            "v = v - 0.1 * sign(v - grad * grad) * grad * grad",
            "weight = weight - lr * grad / (sqrt(v) + 1e-8)",
            declare=("state v in [0, inf)",),
        ),
        spec(
            "v = max(v - 0.1 * sign(v - grad * grad) * grad * grad, 0)",
            "weight = weight - lr * grad / (sqrt(v) + 1e-8)",
            declare=("state v in [0, inf)",),
        ),
    ),
    _warning(
        "W0805",
        "scalar-not-finite",
        "A scalar is infinite or not a number: numbers alone make it so (E0407 where it meets a tensor), or the hypers "
        "and flags at their defaults do, at the first step where `step` is in it, and it meets a tensor. What a choice "
        "leaves out then is not counted, nor what `min`, `max`, `clamp` or a comparison takes. A tensor over a hyper "
        "that is 0 by default is W0802.",
        spec("weight = weight - rate * grad", declare=("hyper decay = 0 in [0, inf)", "let rate = lr / decay")),
        spec(
            "weight = weight - rate * grad",
            declare=("hyper decay = 0 in [0, inf)", "let rate = lr / decay if decay > 0 else lr"),
        ),
    ),
    _warning(
        "W0806",
        "beyond-fp32",
        "A scalar is computed in float64 and rounded to fp32 where it meets a tensor. This one is larger there than "
        "any fp32 number, 3.4e38, and so becomes infinite, or smaller than the smallest, 1.4e-45, and so becomes 0. "
        "Its product with another scalar may be fine: write that first.",
        spec("weight = weight - 1e39 * grad * 1e-39 * lr"),
        spec("weight = weight - 1e39 * 1e-39 * lr * grad"),
    ),
    _warning(
        "W0807",
        "clamp-bounds",
        "The lower bound of a `clamp` is above the upper one, as written or with every hyper and flag at its default. "
        "The result is then the upper bound, whatever is clamped, as in torch.",
        spec("weight = weight - lr * clamp(grad, 1, -1)"),
        spec("weight = weight - lr * clamp(grad, -1, 1)"),
    ),
)

_ALL = (
    *_FILES,
    *_FORM,
    *_NAMES,
    *_KINDS,
    *_VALUES,
    *_SEPARABILITY,
    *_STATEMENTS,
    *_DEFINEDNESS,
    *_RUNS,
    *_DOMAINS,
)
CODES: dict[str, CodeInfo] = {info.code: info for info in _ALL}
