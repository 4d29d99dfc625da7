"""The words of the language: element-wise functions, functions that are refused with the reason, reserved names."""

from __future__ import annotations

import keyword
from dataclasses import dataclass


def words(*lines: str) -> frozenset[str]:
    """The blank-separated words of all lines."""
    return frozenset(word for line in lines for word in line.split())


@dataclass(frozen=True, slots=True)
class Builtin:
    """An element-wise function. `result` is the kind of its value; every argument is a number unless said otherwise.

    `where` takes a condition and two values of one kind; `first` takes the name of a state.
    """

    name: str
    min_args: int
    max_args: int
    doc: str
    result: str = "number"
    signature: str = "x"


_TABLE = (
    Builtin("sqrt", 1, 1, "square root"),
    Builtin("rsqrt", 1, 1, "1 / sqrt(x)"),
    Builtin("exp", 1, 1, "e to the power x"),
    Builtin("log", 1, 1, "natural logarithm"),
    Builtin("log1p", 1, 1, "log(1 + x), exact for small x"),
    Builtin("expm1", 1, 1, "exp(x) - 1, exact for small x"),
    Builtin("tanh", 1, 1, "hyperbolic tangent"),
    Builtin("abs", 1, 1, "absolute value"),
    Builtin("sign", 1, 1, "-1, 0 or 1; 0 for NaN, as in torch"),
    Builtin("min", 2, 8, "the smallest argument; NaN if any is NaN", signature="a, b"),
    Builtin("max", 2, 8, "the largest argument; NaN if any is NaN", signature="a, b"),
    Builtin("clamp", 3, 3, "x brought into [low, high]; NaN if any argument is NaN", signature="x, low, high"),
    Builtin("lerp", 3, 3, "a + t * (b - a)", signature="a, b, t"),
    Builtin("isfinite", 1, 1, "whether x is neither infinite nor NaN", result="boolean"),
    Builtin(
        "where", 3, 3, "a where c holds, else b; the same as `a if c else b`", result="branches", signature="c, a, b"
    ),
    Builtin(
        "first", 1, 1, "whether this state of this weight was never written yet", result="boolean", signature="state"
    ),
)
BUILTINS: dict[str, Builtin] = {builtin.name: builtin for builtin in _TABLE}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a function cannot be part of an element-wise rule: the code, and the reason as a sentence."""

    code: str
    reason: str


_ALL_OTHERS = "so the new value of one coordinate would depend on all others"
_REDUCTION = f"it combines all coordinates of a tensor into one number, {_ALL_OTHERS}"
_MATRIX = f"it mixes whole rows and columns, {_ALL_OTHERS}"
_PLACE = (
    "it moves coordinates or asks for their places or their number, and the update of one coordinate knows none of "
    "these"
)
_ORDER = f"it ranks or scans coordinates against each other, {_ALL_OTHERS}"
_RANDOM = "it is random, and a step must give the same result on every tile and in every run"

_REFUSED_WORDS = (
    (
        Refusal("E0501", _REDUCTION),
        words(
            "sum mean norm std var prod nansum nanmean amax amin aminmax logsumexp vector_norm frobenius_norm rms",
            "rms_norm layer_norm group_norm batch_norm softmax log_softmax softmin normalize count_nonzero all any",
            "l1_norm l2_norm dist cosine_similarity dot inner vdot mse_loss average std_mean var_mean",
            "clip_grad_norm_ clip_grad_norm trust_ratio all_reduce reduce argmax argmin nuclear_norm global_norm",
            "total_norm",
        ),
    ),
    (
        Refusal("E0502", _MATRIX),
        words(
            "matmul mm bmm addmm baddbmm mv einsum tensordot outer ger kron matrix_norm matrix_power matrix_exp",
            "matrix_root matrix_inverse_root inverse_root inv_root inverse inv pinv det logdet slogdet trace svd "
            "svdvals",
            "svd_lowrank eig eigh eigvals eigvalsh qr cholesky lu lstsq solve solve_triangular cholesky_inverse",
            "newton_schulz newton_schulz5 newtonschulz newtonschulz5 zeropower_via_newtonschulz5 zeropower",
            "zeropower_via_svd orthogonalize orthogonalise orthogonalized msign polar polar_express matrix_sign linear",
            "bilinear conv conv1d conv2d conv3d convolve fft ifft rfft irfft dct hadamard chain_matmul multi_dot",
        ),
    ),
    (
        Refusal("E0503", _PLACE),
        words(
            "transpose t swapaxes permute reshape view flatten unflatten squeeze unsqueeze expand expand_as repeat"
            " tile",
            "roll flip rot90 shift gather scatter scatter_add index_select index_add take masked_select masked_fill",
            "nonzero cat concat concatenate stack split chunk narrow unbind unfold pad tril triu diag diagonal",
            "diag_embed size numel shape dim ndim len arange linspace meshgrid one_hot eye range rows columns row",
            "column index contiguous as_strided movedim",
        ),
    ),
    (
        Refusal("E0504", _ORDER),
        words(
            "sort argsort msort topk kthvalue median nanmedian mode quantile nanquantile percentile cumsum cumprod",
            "cummax cummin logcumsumexp diff unique histc histogram bincount searchsorted bucketize rank",
            "rank_normalize",
        ),
    ),
    (
        Refusal("E0505", _RANDOM),
        words(
            "rand randn randint random rand_like randn_like randint_like randperm bernoulli dropout multinomial normal",
            "uniform uniform_ normal_ poisson noise seed manual_seed gumbel stochastic_round",
        ),
    ),
)
REFUSED: dict[str, Refusal] = {name: refusal for refusal, names in _REFUSED_WORDS for name in names}

# Functions that people try and that have a spelling here.
SPELLED_OTHERWISE: dict[str, str] = {
    "pow": "x ** n",
    "power": "x ** n",
    "square": "x * x",
    "reciprocal": "1 / x",
    "maximum": "max(a, b)",
    "minimum": "min(a, b)",
    "fmax": "max(a, b)",
    "fmin": "min(a, b)",
    "clip": "clamp(x, low, high)",
    "clamp_min": "max(x, low)",
    "clamp_max": "min(x, high)",
    "relu": "max(x, 0)",
    "sgn": "sign(x)",
    "signum": "sign(x)",
    "fabs": "abs(x)",
    "absolute": "abs(x)",
    "neg": "-x",
    "negative": "-x",
    "add": "a + b",
    "sub": "a - b",
    "subtract": "a - b",
    "mul": "a * b",
    "multiply": "a * b",
    "div": "a / b",
    "divide": "a / b",
    "true_divide": "a / b",
    "mod": "a % b",
    "fmod": "a % b",
    "remainder": "a % b",
    "addcmul": "x + value * a * b",
    "addcdiv": "x + value * a / b",
    "ln": "log(x)",
    "log2": "log(x) / log(2)",
    "log10": "log(x) / log(10)",
    "exp2": "2 ** x",
    "sigmoid": "1 / (1 + exp(-x))",
    "softsign": "x / (1 + abs(x))",
    "softplus": "log1p(exp(x))",
    "hypot": "sqrt(a * a + b * b)",
    "isnan": "x != x",
    "isinf": "not isfinite(x) and x == x",
    "logical_and": "a and b",
    "logical_or": "a or b",
    "logical_not": "not a",
    "eq": "a == b",
    "ne": "a != b",
    "lt": "a < b",
    "le": "a <= b",
    "gt": "a > b",
    "ge": "a >= b",
    "iif": "a if c else b",
    "select": "a if c else b",
    "cond": "a if c else b",
    "clone": "x",
    "detach": "x",
    "float": "x",
    "to": "x",
    "item": "x",
    "type_as": "x",
    "zeros_like": "0",
    "ones_like": "1",
    "zeros": "0",
    "ones": "1",
    "full_like": "value",
}

# Modules whose functions people call with a dot.
MODULES = words("torch math tl np numpy jnp jax F nn linalg cmath scipy triton libdevice special functional self")

# Words of the language itself; the lexer knows them, so that they reach a declaration only through other tools.
KEYWORDS = words(
    "optimizer hyper flag state scalar let require update in when if elif else for while and or not true false inf"
)

# Names that a spec may not declare: the generated Python uses them, or a reader would take them for something else.
# Entries of a parameter in `state_dict` that are not states: of its rounding and of the bits beside a bf16 weight.
# Beside each state kept in 8 bits there is also one called `<state>_scale`.
STATE_ENTRIES = ("rounding", "weight_low", "weight_fingerprint")

# Entries of a param group in which schedulers of torch keep numbers of their own.
SCHEDULER_ENTRIES = ("initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum", "swa_lr")

RESERVED: dict[str, str] = {
    **dict.fromkeys(keyword.kwlist, "a keyword of Python, in which the optimizer is generated"),
    **dict.fromkeys(KEYWORDS, "a word of the language"),
    **dict.fromkeys(
        words(
            "print range len float int bool str bytes tuple list dict set frozenset object type super property",
            "staticmethod classmethod isinstance issubclass getattr setattr hasattr zip map enumerate sorted reversed",
            "repr exec eval compile open globals locals vars callable complex memoryview NotImplemented Ellipsis",
            "ValueError TypeError RuntimeError Exception KeyError",
        ),
        "a built-in name of Python, in which the optimizer is generated",
    ),
    **dict.fromkeys(
        words(
            "tl torch triton math params param_names self state states s state_dtype arithmetic schedule",
            "stochastic_rounding seed extra_bits saved_activations gradient_bits weight_dtype model optimizer_class",
            "closure Tensor nn libdevice jit constexpr",
            "annotations device_math device_tiles device_hopper device_slices device_storage gluon reference_math ieee",
        ),
        "a name that the generated optimizer uses itself",
    ),
    **dict.fromkeys(SCHEDULER_ENTRIES, "an entry of a param group that torch's schedulers write"),
    "step": "the number of this weight's updates, counted from 1",
    "grad": "the gradient at this coordinate",
    "weight": "the weight at this coordinate",
    "nan": "not a number one can write",
    "pi": "a constant people expect, which the language does not have",
}

# Class names that the generated module imports or defines, or that a parameter would hide.
RESERVED_CLASSES = words(
    "x bias",
    "Tensor FusedOptimizer StateDtype Optimizer Rule Range Spec HyperSpec FlagSpec StateSpec ScalarSpec SwitchSpec",
    "SPEC RULE Any Module Linear Parameter Callable Sequence Mapping Iterable Final ClassVar",
)


def nearest(name: str, candidates: list[str]) -> str | None:
    """The candidate that `name` is probably a misspelling of."""
    import difflib

    found = difflib.get_close_matches(name, candidates, n=1, cutoff=0.7)
    # `rl` for `lr`: too short for a ratio of common letters.
    found += [candidate for candidate in candidates if sorted(candidate) == sorted(name)]
    return found[0] if found else None
