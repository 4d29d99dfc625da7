"""Time of the Hopper kernel beside cuBLAS with torch's fused AdamW and the portable kernel. Needs an H100 or H200.

    python benchmarks/hopper_sweep.py                  # AdamW at two weights and three token counts; host cost
    python benchmarks/hopper_sweep.py --optimizers     # every optimizer at 4096 x 4096 and 2048 tokens
    python benchmarks/hopper_sweep.py --formats        # AdamW: stochastic rounding, 8-bit states, extra bits
    python benchmarks/hopper_sweep.py --formats --portable   # the same of the portable kernel
    python benchmarks/hopper_sweep.py --bits           # AdamW: 16, 20, 24 and 32 bits of the gradient, and its error
    python benchmarks/hopper_sweep.py --plans          # other configurations of the kernel than the chosen ones
    python benchmarks/hopper_sweep.py --plans --kept int8    # the same for one way to keep the tensors

As in kernel.py: CUDA graphs, replayed in turn, L2 flushed before each replay, medians in milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kernel import OPTIMIZERS, SHAPES, TOKENS, Update, captured, environment, interleaved, limit_ms


def hopper_step(update: Update, gradient_bits: int = 24, exact: bool = False) -> Callable[[], None]:
    """The Hopper kernel on a weight of the benchmark."""
    from forge_dsl.runtime import hopper

    def run() -> None:
        arguments = (update.rule, update.x, update.dy, update.weight, update.states, update.table, update.case.switches)
        hopper.linear_step_hopper(*arguments, exact=exact, gradient_bits=gradient_bits)

    return run


def portable_step(update: Update, exact: bool = False) -> Callable[[], None]:
    """The portable Triton kernel on the same weight."""
    from forge_dsl.runtime import launch

    def run() -> None:
        states, table, switches, _, *kept = update.arguments()
        arguments = update.rule, update.x, update.dy, update.weight, states, table, switches, exact, *kept
        launch.linear_step_portable(*arguments)

    return run


NEAREST = " to nearest"
KEPT = ("plain", "rounding W", "rounding", "int8", "fp8", f"int8{NEAREST}", f"fp8{NEAREST}", "bf16+8")


def keep(update: Update, how: str) -> tuple[list[Any], Any, Any]:
    """States, their storage, and the table with words to draw from, of one of KEPT; the weight is the update's."""
    import torch

    from forge_dsl.formats.extended import Extended
    from forge_dsl.runtime.storage import BLOCK_WISE, Storage, block_wise

    nearest, how = how.endswith(NEAREST) or how == "plain", how.removesuffix(NEAREST)
    states, formats, extras = list(update.states), ["plain"], [None]
    for index, (spec, state) in enumerate(zip(update.rule.spec.states, update.states, strict=True)):
        formats.append(how if how in BLOCK_WISE and state is not None else "plain")
        extras.append(None)
        if formats[-1] in BLOCK_WISE:
            encoded = block_wise(how, spec.nonnegative).encode(state.float())
            states[index], extras[-1] = encoded.codes, encoded.scales
    if how == "bf16+8":
        formats[0], extras[0] = how, Extended(8).encode(update.weight.float(), None)[1]
    draws = (not nearest, *(not nearest and how != "rounding W" and state is not None for state in states))
    words = torch.arange(1, 2 + len(states), dtype=torch.int32, device=update.table.device).view(torch.float32)
    return states, Storage(tuple(formats), draws, tuple(extras)), torch.cat([update.table, words])


def kept_step(update: Update, how: str, portable: bool = False) -> Callable[[], None]:
    """The kernel for Hopper, or the portable one, with the tensors kept in one of the ways KEPT."""
    from forge_dsl.runtime import hopper, launch

    states, storage, table = keep(update, how)

    def run() -> None:
        arguments = (update.rule, update.x, update.dy, update.weight, states, table, update.case.switches)
        if portable:
            launch.linear_step_portable(*arguments, False, storage)
        else:
            hopper.linear_step_hopper(*arguments, kept=storage)

    return run


def bytes_kept(update: Update, how: str) -> float:
    """Bytes a parameter of the weight, its states, and what lies beside them."""
    states, storage, _ = keep(update, how)
    tensors = [update.weight, *states, *storage.extras]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None) / update.weight.numel()


def measure_formats(portable: bool) -> None:
    """AdamW at every shape, in each of KEPT, over the time of plain bf16; codes also over bf16 rounded alike."""
    import torch

    for tokens in TOKENS:
        for rows, columns in SHAPES:
            update = Update("adamw", rows, columns, tokens)
            wide = Update("adamw", rows, columns, tokens)
            wide.states = [None if state is None else state.float() for state in wide.states]
            systems = {how: captured(kept_step(update, how, portable)) for how in KEPT}
            sizes = {how: bytes_kept(update, how) for how in KEPT}
            for how in ("plain", "rounding W"):
                systems[f"fp32 states, {how}"] = captured(kept_step(wide, how, portable))
                sizes[f"fp32 states, {how}"] = bytes_kept(wide, how)
            ms = interleaved(systems)
            for name, value in ms.items():
                base = ms["fp32 states, plain" if name.startswith("fp32") else "plain"]
                about = f"{value:.4f}, {value / base:.3f} of plain, {sizes[name]:.3f} bytes"
                if name in ("int8", "fp8"):
                    about += f", {value / ms['rounding']:.3f} of bf16 rounded alike"
                print(f"{rows} x {columns}, T={tokens}: {name} {about}", flush=True)
            torch.cuda.empty_cache()


def measure_bits() -> None:
    """AdamW at every shape, the gradient handed over with each choice of bits, beside the peer; errors of the gradient.

    The last columns are exact arithmetic, in this kernel with 32 bits and in the portable one.
    """
    import torch

    from forge_dsl.runtime import gradient_bits

    for rows, columns in SHAPES:
        for tokens in TOKENS:
            update = Update("adamw", rows, columns, tokens)
            systems = {"peer": captured(update.peer())}
            systems |= {f"{bits} bits": captured(hopper_step(update, bits)) for bits in gradient_bits.CHOICES}
            systems |= {"portable": captured(portable_step(update))}
            systems |= {"exact": captured(hopper_step(update, 32, True))}
            systems |= {"exact, portable": captured(portable_step(update, True))}
            ms = interleaved(systems, 20)
            times = ", ".join(f"{name} {value:.4f}" for name, value in ms.items())
            ratios = ", ".join(f"{ms[f'{bits} bits'] / ms['24 bits']:.3f}" for bits in gradient_bits.CHOICES)
            print(f"{rows} x {columns}, T={tokens}: {times}; over 24 bits: {ratios}", flush=True)
            del systems, update
            torch.cuda.empty_cache()
    for tokens in TOKENS:
        errors = ", ".join(f"{bits} bits {error:.2e}" for bits, error in handed_over_errors(tokens).items())
        print(f"relative error of the gradient, T={tokens}: {errors}", flush=True)


def handed_over_errors(tokens: int, rows: int = 2048, columns: int = 4096) -> dict[int, float]:
    """Norm of the error of the gradient, over its norm, by bits: plain descent with step 1 from a weight of zero."""
    import torch

    from forge_dsl import optim, testing
    from forge_dsl.runtime import gradient_bits, hopper

    rule = optim.SGD.rule
    case = testing.Case({"lr": 1.0, "weight_decay": 0.0}, dict.fromkeys(rule.spec.flag_names, False), (False,))
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16, generator=generator)
    dy = torch.randn(tokens, rows, device="cuda", dtype=torch.bfloat16, generator=generator) * 0.1
    want = dy.double().T @ x.double()
    errors = {}
    for bits in gradient_bits.CHOICES:
        problem = testing.Problem(torch.zeros(rows, columns, device="cuda"), [], {"_updates": 0.0})
        table = testing.next_table(rule, case, problem)
        hopper.linear_step_hopper(rule, x, dy, problem.weight, [], table, case.switches, True, bits)
        errors[bits] = ((problem.weight.double() + want).norm() / want.norm()).item()
    return errors


def measure_adamw() -> None:
    """AdamW, bf16 weight and states, at every shape; fp32 states too."""
    import torch

    for rows, columns in SHAPES:
        for tokens in TOKENS:
            update = Update("adamw", rows, columns, tokens)
            wide = Update("adamw", rows, columns, tokens)
            wide.states = [None if state is None else state.float() for state in wide.states]
            systems = {
                "cuBLAS": update.product,
                "peer": update.peer(),
                "hopper": hopper_step(update),
                "hopper 16 bits": hopper_step(update, 16),
                "portable": portable_step(update),
                "hopper fp32 states": hopper_step(wide),
                "banded fp32 states": wide.banded,
            }
            ms = interleaved({name: captured(run) for name, run in systems.items()})
            limit = limit_ms(tokens, rows, columns, update.bytes)
            times = ", ".join(f"{name} {value:.4f}" for name, value in ms.items())
            ratios = f"peer / hopper {ms['peer'] / ms['hopper']:.2f}, hopper / L {ms['hopper'] / limit:.2f}"
            print(f"{rows} x {columns}, T={tokens}: L {limit:.4f}, {times}; {ratios}", flush=True)
            torch.cuda.empty_cache()


def measure_optimizers() -> None:
    """Every optimizer, against the time of AdamW scaled by the limits."""
    updates = {stem: Update(stem, 4096, 4096, 2048) for stem in OPTIMIZERS}
    systems = {f"{kind} {stem}": captured(step(u)) for stem, u in updates.items() for kind, step in _KINDS.items()}
    ms = interleaved(systems)
    for stem, update in updates.items():
        limit = limit_ms(2048, 4096, 4096, update.bytes)
        hopper, portable = ms[f"hopper {stem}"], ms[f"portable {stem}"]
        print(f"{stem}: L {limit:.4f}, hopper {hopper:.4f}, portable {portable:.4f}, {update.bytes} bytes", flush=True)


_KINDS: dict[str, Callable[[Update], Callable[[], None]]] = {"hopper": hopper_step, "portable": portable_step}


def plans(chosen: Any) -> Iterator[Any]:
    """The chosen configuration and its neighbours, as far as there are such."""
    changes: list[dict[str, Any]] = [{}]
    changes += [{"every": n, "last": n, "together": together} for n in (2, 4, 5, 6) for together in (1, 2)]
    changes += [{"last": n, "together": together} for n in (2, 3, 4, 6, 8) for together in (1, 2)]
    changes += [{"ahead": n} for n in range(5)]
    changes += [{"rows": rows} for rows in (32, 64)]
    changes += [{name: not getattr(chosen, name)} for name in ("eager", "pairs", "loader")]
    changes += [{**_tiles(not chosen.narrow), "rows": rows, "last": 4, "together": 1} for rows in (32, 64)]
    found = []
    for change in changes:
        # Some would cut a slice in two.
        with contextlib.suppress(AssertionError):
            found.append(replace(chosen, **change))
    yield from dict.fromkeys(found)


def _tiles(narrow: bool) -> dict[str, Any]:
    """What belongs to narrow tiles, or to wide ones, where gradients have 24 bits."""
    from forge_dsl.runtime import hopper_plan

    block_t, stages = (hopper_plan.NARROW_STAGES if narrow else hopper_plan.WIDE_STAGES)[24]
    return {"narrow": narrow, "block_t": block_t, "stages": stages, "every": 8}


def measure_plans(how: str) -> None:
    """Neighbours of the chosen configuration for AdamW at 4096 x 4096, its tensors kept in one of the ways KEPT."""
    from forge_dsl.runtime import hopper

    choose = hopper.plan
    for tokens in TOKENS:
        update = Update("adamw", 4096, 4096, tokens)
        systems = {}
        states, storage, _ = keep(update, how)
        stored = [tensor for tensor in (update.weight, *states) if tensor is not None]
        for plan in plans(choose(tokens, stored, storage, False, False, 24)):
            hopper._FOUND.clear()
            hopper.plan = lambda *_, plan=plan: plan
            systems[str(plan)] = captured(kept_step(update, how))
        hopper._FOUND.clear()
        hopper.plan = choose
        for name, value in sorted(interleaved(systems).items(), key=lambda item: item[1]):
            print(f"T={tokens} {value:.4f} {name}", flush=True)


def measure_host(launches: int = 2000) -> None:
    """Microseconds of Python per launch, the device being busy with little."""
    import torch

    update = Update("adamw", 256, 512, 64)
    for name, run in (("hopper", hopper_step(update)), ("portable", portable_step(update))):
        for _ in range(10):
            run()
        torch.cuda.synchronize()
        best = float("inf")
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(launches // 5):
                run()
            best = min(best, (time.perf_counter() - begin) / (launches // 5))
            torch.cuda.synchronize()
        print(f"host, {name}: {best * 1e6:.1f} us a launch", flush=True)


def main() -> None:
    """Measure what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", action="store_true")
    parser.add_argument("--formats", action="store_true")
    parser.add_argument("--portable", action="store_true", help="with --formats: the portable kernel")
    parser.add_argument("--bits", action="store_true")
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--kept", choices=KEPT, default="plain", help="with --plans")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("benchmarks/hopper_sweep.py needs a GPU of compute capability 9.0; there is none here")
    print(environment())
    if arguments.optimizers:
        measure_optimizers()
    elif arguments.formats:
        measure_formats(arguments.portable)
    elif arguments.bits:
        measure_bits()
    elif arguments.plans:
        measure_plans(arguments.kept)
    else:
        measure_host()
        measure_adamw()


if __name__ == "__main__":
    main()
