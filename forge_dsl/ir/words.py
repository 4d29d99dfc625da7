"""What the functions of a generated module are made of besides the names of a spec, so that neither hides the other.

The front end reserves what stands everywhere (`torch`, `tl`, `state`, `s`, the helper modules); the words here are the
variables and parameters of single functions, and a name of a spec that meets one gets a number behind it there.
"""

from __future__ import annotations

from forge_dsl.analysis.builtins import words
from forge_dsl.ir.names import distinct

_SHARED = words(
    "s tl device_math device_operands device_tiles grad weight weight_ptr rows columns n_rows n_columns",
    "weight_row weight_column state_row state_column exact",
)
# `<stem>_tile`, whose variables the states are.
TILE = _SHARED | words(
    "inside part weight_at state_at first_column extras keys place formats draws flat device_storage"
)
# `<stem>_hopper_fetch`, `_apply` and `_prefetch`: likewise.
SLICE = TILE | words("device_slices at stored even weight_base state_base weight_rows state_rows")
# `<stem>_linear_kernel`, `_hopper_kernel`, `_elementwise_kernel` and `_many_kernel`.
KERNELS = SLICE | words(
    "x dy scaled table tokens x_token x_column dy_token dy_row even wide upcast precision operands",
    "BLOCK_O BLOCK_I BLOCK_T SLICES_O SLICES_I GROUP",
    "tiles width tile down across first_row gradient slices",
    "grad_ptr grad_row grad_column grad_at base row_length block_stride",
    "pointers sizes places which size grad_type weight_type aligned BLOCK",
    "vectors alike gradient_bits STAGES ROWS EVERY LAST TOGETHER AHEAD EAGER PAIRS LOADER device_hopper",
)
# Keywords of a launch: a parameter of a kernel cannot be called so.
LAUNCH = words(
    "grid warmup debug device stream options num_warps num_stages num_ctas maxnreg enable_fp_fusion",
    "instrumentation_mode",
)
# Variables of `<stem>_update` and `<stem>_reference`.
UPDATE = words("s state grad weight tl torch device_math reference_math")
# `<stem>_scalars_kernel`.
SCALARS = LAUNCH | words(
    "hypers counters tables pending bases table_stride n_counters row table counter next_counter tl device_math",
    "device_storage base key update",
)
# What a switch is a parameter beside.
BESIDE_SWITCHES = KERNELS | LAUNCH | UPDATE
# Names at the top level of every module.
MODULE = words(
    "annotations inf torch tl triton Tensor ParamsT SPEC RULE Spec HyperSpec FlagSpec StateSpec ScalarSpec SwitchSpec",
    "Range Rule Hyper StateDtype FusedOptimizer Switches SGDSwitches Unpack device_math device_tiles device_operands",
    "device_hopper gluon device_slices device_storage ieee linear reference_math",
    "check_arguments switches present initial_state step_scalars",
)


def functions(stem: str) -> frozenset[str]:
    """The functions of a module, which its kernels call too."""
    tails = words(
        "update update_exact table keys tile linear reference linear_kernel elementwise_kernel many_kernel",
        "scalars_kernel hopper_fetch hopper_apply hopper_prefetch hopper_kernel",
    )
    return frozenset(f"{stem}_{tail}" for tail in tails)


def renamed(names: list[str], words: frozenset[str], others: frozenset[str] = frozenset()) -> dict[str, str]:
    """Each name as it is called beside `words`: itself, or with a number behind it that makes it distinct from all."""
    taken = words | others | set(names)
    found: dict[str, str] = {}
    for name in names:
        found[name] = distinct(name, taken) if name in words else name
        taken |= {found[name]}
    return found
