"""Update rules written by hand against the seam `Rule`, independent of the compiler: what a generated module offers.

Each mirrors torch's single-tensor path. AdamW has a flag and an optional state; SGD's momentum uses `first`; NAdam
carries a scalar; Adagrad's state begins at construction; Lookahead's slow copy starts from the weight.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from forge_dsl.runtime import ieee
from forge_dsl.runtime.linear import fused_linear
from forge_dsl.runtime.optimizer import FusedOptimizer
from forge_dsl.runtime.rule import Rule
from forge_dsl.spec import FlagSpec, HyperSpec, Range, ScalarSpec, Spec, StateSpec, SwitchSpec

NON_NEGATIVE = Range(low=0, high_open=True)
UNIT = Range(low=0, high=1, high_open=True)


def spec(name: str, **parts: Any) -> Spec:
    empty: dict[str, Any] = dict.fromkeys(("hypers", "flags", "states", "scalars", "switches", "first", "table"), ())
    facts = {"title": name, "source": "", "sha256": "", "uses_step": False, **empty, **parts}
    return Spec(name=name, stem=name.lower(), **facts)


def hyper(name: str, default: Any, *ranges: Range | None) -> HyperSpec:
    return HyperSpec(name=name, default=default, ranges=ranges or (NON_NEGATIVE,))


def rule(spec: Spec, **functions: Any) -> Rule:
    missing = {"linear_kernel": None, "elementwise_kernel": None, "many_kernel": None, "scalars_kernel": None}
    defaults = {
        "check_arguments": lambda **_: None,
        "initial_state": lambda name, weight, **_: torch.zeros_like(weight),
    }
    return Rule(spec=spec, **{**missing, **defaults, **functions})


# -- AdamW ------------------------------------------------------------------------------------------------------------


def adamw_scalars(*, step, lr, betas, eps, weight_decay, amsgrad, maximize):
    beta1, beta2 = betas
    bias1, bias2 = 1 - beta1**step, 1 - beta2**step
    sign = -1.0 if maximize else 1.0
    return (1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, lr / bias1, ieee.sqrt(bias2), eps, sign), ()


def adamw_reference(weight, grad, state, s, amsgrad, maximize):
    decay, beta1, rest1, beta2, rest2, size, root, eps, sign = s
    g = grad * sign
    weight = weight * decay
    m = beta1 * state["exp_avg"] + rest1 * g
    v = beta2 * state["exp_avg_sq"] + rest2 * g * g
    out = {"exp_avg": m, "exp_avg_sq": v}
    if amsgrad:
        v = torch.maximum(state["max_exp_avg_sq"], v)
        out["max_exp_avg_sq"] = v
    return weight - size * m / (torch.sqrt(v) / root + eps), out


ADAMW = rule(
    spec(
        "AdamW",
        hypers=(
            hyper("lr", 1e-3),
            hyper("betas", (0.9, 0.999), UNIT, UNIT),
            hyper("eps", 1e-8),
            hyper("weight_decay", 1e-2),
        ),
        flags=(FlagSpec(name="amsgrad", default=False), FlagSpec(name="maximize", default=False)),
        states=(
            StateSpec(name="exp_avg"),
            StateSpec(name="exp_avg_sq", domain=NON_NEGATIVE),
            StateSpec(name="max_exp_avg_sq", domain=NON_NEGATIVE, when="amsgrad"),
        ),
        switches=(
            SwitchSpec(name="amsgrad", text="amsgrad", is_flag=True),
            SwitchSpec(name="maximize", text="maximize", is_flag=True),
        ),
        uses_step=True,
        table=("decay", "beta1", "rest1", "beta2", "rest2", "size", "root", "eps", "sign"),
    ),
    step_scalars=adamw_scalars,
    switches=lambda *, amsgrad, maximize, **_: (amsgrad, maximize),
    present=lambda amsgrad, maximize: (True, True, amsgrad),
    reference=adamw_reference,
)


class AdamW(FusedOptimizer):
    rule = ADAMW

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        *,
        amsgrad=False,
        maximize=False,
        **options,
    ):
        hypers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        flags = {"amsgrad": amsgrad, "maximize": maximize}
        super().__init__(params, hypers, flags, **options)


# -- SGD with momentum ------------------------------------------------------------------------------------------------


def sgd_scalars(*, first_momentum_buffer, lr, momentum, dampening, weight_decay, nesterov):
    return (lr, momentum, 1.0 if first_momentum_buffer else 1 - dampening, weight_decay), ()


def sgd_reference(weight, grad, state, s, nesterov, with_momentum):
    lr, momentum, taken, weight_decay = s
    g = grad + weight_decay * weight
    if not with_momentum:
        return weight - lr * g, {}
    buffer = momentum * state["momentum_buffer"] + taken * g
    return weight - lr * (g + momentum * buffer if nesterov else buffer), {"momentum_buffer": buffer}


def sgd_check(*, lr, momentum, dampening, weight_decay, nesterov):
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening")


SGD_RULE = rule(
    spec(
        "SGD",
        hypers=(
            hyper("lr", 1e-3),
            hyper("momentum", 0.0),
            hyper("dampening", 0.0, None),
            hyper("weight_decay", 0.0),
        ),
        flags=(FlagSpec(name="nesterov", default=False),),
        states=(StateSpec(name="momentum_buffer", when="momentum != 0"),),
        switches=(
            SwitchSpec(name="nesterov", text="nesterov", is_flag=True),
            SwitchSpec(name="with_momentum", text="momentum != 0", is_flag=False),
        ),
        first=("momentum_buffer",),
        table=("lr", "momentum", "taken", "weight_decay"),
    ),
    step_scalars=sgd_scalars,
    check_arguments=sgd_check,
    switches=lambda *, momentum, nesterov, **_: (nesterov, momentum != 0),
    present=lambda nesterov, with_momentum: (with_momentum,),
    reference=sgd_reference,
)


class SGD(FusedOptimizer):
    rule = SGD_RULE

    def __init__(self, params, lr=1e-3, momentum=0.0, dampening=0.0, weight_decay=0.0, *, nesterov=False, **knobs):
        hypers = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, hypers, {"nesterov": nesterov}, **knobs)


# -- NAdam ------------------------------------------------------------------------------------------------------------


def nadam_scalars(*, step, mu_product, lr, betas, eps, weight_decay, momentum_decay):
    beta1, beta2 = betas
    mu = beta1 * (1 - 0.5 * 0.96 ** (step * momentum_decay))
    mu_next = beta1 * (1 - 0.5 * 0.96 ** ((step + 1) * momentum_decay))
    mu_product = mu_product * mu
    now, then = lr * (1 - mu) / (1 - mu_product), lr * mu_next / (1 - mu_product * mu_next)
    return (weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, ieee.sqrt(1 - beta2**step), eps, now, then), (mu_product,)


def nadam_reference(weight, grad, state, s):
    weight_decay, beta1, rest1, beta2, rest2, root, eps, now, then = s
    g = grad + weight_decay * weight
    m = beta1 * state["exp_avg"] + rest1 * g
    v = beta2 * state["exp_avg_sq"] + rest2 * g * g
    root_v = torch.sqrt(v) / root + eps
    return weight - now * g / root_v - then * m / root_v, {"exp_avg": m, "exp_avg_sq": v}


NADAM = rule(
    spec(
        "NAdam",
        hypers=(
            hyper("lr", 2e-3),
            hyper("betas", (0.9, 0.999), UNIT, UNIT),
            hyper("eps", 1e-8),
            hyper("weight_decay", 0.0),
            hyper("momentum_decay", 4e-3),
        ),
        states=(StateSpec(name="exp_avg"), StateSpec(name="exp_avg_sq", domain=NON_NEGATIVE)),
        scalars=(ScalarSpec(name="mu_product", initial=1.0),),
        uses_step=True,
        table=("weight_decay", "beta1", "rest1", "beta2", "rest2", "root", "eps", "now", "then"),
    ),
    step_scalars=nadam_scalars,
    switches=lambda **_: (),
    present=lambda: (True, True),
    reference=nadam_reference,
)


class NAdam(FusedOptimizer):
    rule = NADAM

    def __init__(self, params, lr=2e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, momentum_decay=4e-3, **knobs):
        hypers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "momentum_decay": momentum_decay}
        super().__init__(params, hypers, {}, **knobs)


# -- Adagrad ----------------------------------------------------------------------------------------------------------


def adagrad_scalars(*, step, lr, lr_decay, weight_decay, initial_accumulator_value, eps):
    return (weight_decay, lr / (1 + (step - 1) * lr_decay), eps), ()


def adagrad_reference(weight, grad, state, s):
    weight_decay, size, eps = s
    g = grad + weight_decay * weight
    total = state["sum"] + g * g
    return weight - size * g / (torch.sqrt(total) + eps), {"sum": total}


ADAGRAD = rule(
    spec(
        "Adagrad",
        hypers=(
            hyper("lr", 1e-2),
            hyper("lr_decay", 0.0),
            hyper("weight_decay", 0.0),
            hyper("initial_accumulator_value", 0.0),
            hyper("eps", 1e-10),
        ),
        states=(StateSpec(name="sum", begins="construction", zero=False, domain=NON_NEGATIVE),),
        uses_step=True,
        table=("weight_decay", "size", "eps"),
    ),
    step_scalars=adagrad_scalars,
    switches=lambda **_: (),
    present=lambda: (True,),
    initial_state=lambda name, weight, *, initial_accumulator_value, **_: torch.full_like(
        weight, initial_accumulator_value, dtype=torch.float32
    ),
    reference=adagrad_reference,
)


class Adagrad(FusedOptimizer):
    rule = ADAGRAD

    def __init__(
        self, params, lr=1e-2, lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10, **knobs
    ):
        hypers = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        super().__init__(params, hypers, {}, **knobs)


# -- SGD with a slow copy of the weight -------------------------------------------------------------------------------


def slow_scalars(*, step, lr, alpha, every):
    return (lr, alpha, 1.0 if step % every == 0 else 0.0), ()


def slow_reference(weight, grad, state, s):
    lr, alpha, sync = s
    fast = weight - lr * grad
    slow = torch.where(sync > 0, state["slow"] + alpha * (fast - state["slow"]), state["slow"])
    return torch.where(sync > 0, slow, fast), {"slow": slow}


SLOW = rule(
    spec(
        "SlowSGD",
        hypers=(hyper("lr", 1e-2), hyper("alpha", 0.5), hyper("every", 2.0)),
        states=(StateSpec(name="slow", zero=False),),
        uses_step=True,
        table=("lr", "alpha", "sync"),
    ),
    step_scalars=slow_scalars,
    switches=lambda **_: (),
    present=lambda: (True,),
    initial_state=lambda name, weight, **_: weight.float().clone(),
    reference=slow_reference,
)


class SlowSGD(FusedOptimizer):
    rule = SLOW

    def __init__(self, params, lr=1e-2, alpha=0.5, every=2.0, **knobs):
        super().__init__(params, {"lr": lr, "alpha": alpha, "every": every}, {}, **knobs)


# -- what tests share -------------------------------------------------------------------------------------------------


class Linear(torch.nn.Linear):
    """`nn.Linear` through the fused linear function of `optimizer_class`."""

    optimizer_class: type = AdamW

    def forward(self, x: Tensor) -> Tensor:
        return fused_linear(x, self.weight, self.bias, self.optimizer_class)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, optimizer_class: type = AdamW) -> Tensor:
    return fused_linear(x, weight, bias, optimizer_class)


def linear_for(optimizer_class: type) -> type[Linear]:
    return type("Linear", (Linear,), {"optimizer_class": optimizer_class})


def integers(*shape: int, high: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers: every product and partial sum of a few hundred of them is exact in fp32, in any order."""
    generator = torch.Generator().manual_seed(seed + math.prod(shape))
    return torch.randint(-high, high + 1, shape, generator=generator).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit: dtype, shape, signs of zeros, NaN where NaN."""

    def raw(t: Tensor) -> Tensor:
        return torch.empty(t.numel(), dtype=t.dtype).copy_(t.detach().reshape(-1)).view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def snapshot(optimizer: FusedOptimizer) -> list[Tensor]:
    """Copies of every parameter, state and count, in a fixed order."""
    tensors = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            tensors += [parameter.detach().clone(), *(state[name].clone() for name in sorted(state))]
    return tensors


def unchanged(optimizer: FusedOptimizer, before: list[Tensor]) -> bool:
    now = snapshot(optimizer)
    return len(now) == len(before) and all(same_bits(a, b) for a, b in zip(now, before, strict=True))


def exact_step(
    optimizer_rule: Rule, weight: Tensor, grad: Tensor, state: dict[str, Tensor], hypers, flags, step=1, **more
):
    """One step of the reference on a given gradient, each result rounded once to its tensor's dtype: the oracle."""
    arguments = dict(hypers) | dict(flags) | more
    if optimizer_rule.spec.uses_step:
        arguments["step"] = ieee.Real(step)
    table, scalars = optimizer_rule.step_scalars(**arguments)
    switches = optimizer_rule.switches(**hypers, **flags)
    s = torch.tensor([float(v) for v in table])
    wide = {name: tensor.float() for name, tensor in state.items()}
    new, states = optimizer_rule.reference(weight.float(), grad.float(), wide, s, *switches)
    return new.to(weight.dtype), {name: states[name].to(tensor.dtype) for name, tensor in state.items()}, scalars
