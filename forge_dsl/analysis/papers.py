"""What the refused optimizers do that no element-wise rule can: notes in the words of their papers."""

from __future__ import annotations

from dataclasses import dataclass

from forge_dsl.analysis.builtins import words
from forge_dsl.language import syntax

FUSION = (
    "the update is fused into the matrix product that makes the gradient: a coordinate is updated as soon as its "
    "own gradient is complete, while others do not exist yet"
)
COORDINATE_ONLY = (
    "the update of one coordinate sees that coordinate of the weight, the gradient and the states, and has no position"
)
TRUST_RATIO = (
    "LARS and LAMB scale each layer's step by a trust ratio, the norm of its weights over the norm of its update: "
    "one number that needs the whole layer before its first coordinate can move"
)
FACTORED = (
    "Adafactor factors the second moment into the means of its rows and columns: each mean combines a whole row or"
    " column of the squared gradient"
)
CENTRALISED = (
    "gradient centralisation subtracts from each coordinate the mean of its row, which combines the whole row of the "
    "gradient"
)
RMS_CLIPPING = (
    "Adafactor clips an update by its root mean square over the layer, which needs all coordinates of the update"
)
ORTHOGONAL = (
    "Muon orthogonalises the momentum matrix (Newton-Schulz iteration): every entry of the result depends on all "
    "entries, through the singular vectors"
)
KRONECKER = (
    "Shampoo and SOAP precondition with Kronecker factors, L = G G^T over the rows and R = G^T G over the columns,"
    " and with roots of these matrices: each entry combines whole rows or columns of the gradient"
)
GRAM = (
    "a matrix times its own transpose compares all of its rows with each other: a Kronecker factor in Shampoo, a "
    "step of the Newton-Schulz orthogonalisation in Muon"
)
CLIPPING = (
    "clipping by a global norm is not part of a rule: it scales the gradient of every parameter before the rule sees it"
)
ROUNDING = "weights and states are rounded to nearest where they are stored, whatever the rule"

_NORMS = words(
    "norm sum mean vector_norm frobenius_norm l2_norm l1_norm rms matrix_norm trust_ratio total_norm",
)
_ROOTS = words(
    "inverse_root inv_root matrix_root matrix_inverse_root matrix_power matrix_exp inverse inv pinv eigh eig",
    "cholesky kron lstsq solve cholesky_inverse solve_triangular eigvalsh eigvals",
)
_ORTHOGONALISERS = words(
    "newton_schulz newton_schulz5 newtonschulz newtonschulz5 zeropower_via_newtonschulz5 zeropower",
    "zeropower_via_svd orthogonalize orthogonalise orthogonalized msign polar polar_express matrix_sign svd",
    "svd_lowrank qr",
)
_PRODUCTS = words(
    "matmul mm bmm einsum tensordot",
)
_MEANS = words("sum mean rms nansum nanmean average")
_AXES = frozenset({"dim", "axis", "keepdim", "keepdims", "dims"})


@dataclass(frozen=True, slots=True)
class Hints:
    """Facts about a whole spec that tell which paper it is after.

    trust_ratio     some norm reads the weight orthogonal      an orthogonalisation is called, or a product of a
    matrix with its transpose that does not read the gradient
    """

    trust_ratio: bool
    orthogonal: bool

    @classmethod
    def of(cls, tree: syntax.Spec) -> Hints:
        """Looks for the marks of known optimizers."""
        trust_ratio = orthogonal = False
        for node in syntax.walk(tree):
            name = _called(node)
            if name in _NORMS and _reads(node, "weight"):
                trust_ratio = True
            if name in _ORTHOGONALISERS or (_is_gram(node) and not _reads(node, "grad")):
                orthogonal = True
        return cls(trust_ratio, orthogonal)

    def call_notes(self, name: str, node: syntax.Call | syntax.MethodCall) -> tuple[str, ...]:
        """Notes for a refused call."""
        if name in _ORTHOGONALISERS:
            return (ORTHOGONAL,)
        if name in _ROOTS:
            return (KRONECKER,)
        if name in _PRODUCTS:
            return (GRAM,)
        if name.startswith("clip_grad"):
            return (CLIPPING,)
        if name == "stochastic_round":
            return (ROUNDING,)
        axes = any(word in _AXES for word, _ in node.keywords)
        positional = node.args[1:] if isinstance(node, syntax.Call) else node.args
        if name in _MEANS and (axes or any(_is_integer(arg) for arg in positional)):
            operands = node.args if isinstance(node, syntax.Call) else (node.base, *node.args)
            return (CENTRALISED if name == "mean" and syntax.Name("grad") in operands else FACTORED,)
        if self.trust_ratio and name in _NORMS:
            return (TRUST_RATIO,)
        return (RMS_CLIPPING,) if name in {"rms", "rms_norm"} else ()

    def product_notes(self, node: syntax.Binary) -> tuple[str, ...]:
        """Notes for a refused `@`."""
        if _is_gram(node):
            return (KRONECKER,) if _reads(node, "grad") else (GRAM,)
        return (ORTHOGONAL,) if self.orthogonal else ()

    def loop_notes(self) -> tuple[str, ...]:
        """Notes for a refused loop."""
        return (ORTHOGONAL,) if self.orthogonal else ()


def _called(node: syntax.Node) -> str:
    match node:
        case syntax.Call(function=name) | syntax.MethodCall(name=name):
            return name
    return ""


def _reads(node: syntax.Node, name: str) -> bool:
    return any(isinstance(inner, syntax.Name) and inner.id == name for inner in syntax.walk(node))


def _is_integer(expr: syntax.Expr) -> bool:
    if isinstance(expr, syntax.Unary):
        expr = expr.operand
    return isinstance(expr, syntax.Number) and expr.text.isdigit()


def _is_gram(node: syntax.Node) -> bool:
    """Whether `node` is `a @ a.T` or `a.T @ a`, or the like with a method."""
    if not (isinstance(node, syntax.Binary) and node.op == "@"):
        return False
    return _transposed(node.right) == node.left or _transposed(node.left) == node.right


def _transposed(node: syntax.Expr) -> syntax.Expr | None:
    match node:
        case syntax.Attribute(base=base, name="T" | "mT" | "H" | "mH"):
            return base
        case syntax.MethodCall(base=base, name="t" | "transpose"):
            return base
        case syntax.Call(function="transpose" | "t", args=(base, *_)):
            return base
    return None
