"""The fused update for Hopper (sm_90a) without the rule: main loop, hand-over of the gradient, slices of a tile.

A persistent kernel with one program (CTA) per multiprocessor and two kinds of warps. Those of the main loop issue TMA
loads, several stages ahead and across the borders of tiles, multiply with `wgmma`, and at a tile's end hand its
gradient over through shared memory. Those of the epilogue take the gradient slice by slice, and read, update and write
weight and states straight from and to global memory, 16 bytes a thread, while the others are in the main loop of the
next tile. That traffic is hidden there as long as the main loop lasts: below the crossover of docs/performance.md, near
1100 tokens for AdamW in bf16, memory takes longer than the matrix product.

*Wide and narrow tiles.* A wide tile has 128 rows (out) and 256 columns (in), eight warps that multiply and four that
update. A narrow one has 128 columns, four warps that multiply and eight that update: the operands come through L2
twice as often, and the tensor cores lose 6 to 10 %, but there is a second warp a scheduler for the epilogue, and room
for the gradients of two tiles. It is the better one where the epilogue takes longer than the main loop.

*Hand-over.* A tile in fp32 (128 KiB) beside enough operand stages does not fit into shared memory, so the gradient goes
over with 24 bits a number, or as many as are asked for; see `device_handover`. All 32 leave 96 KiB to the operands.
Of a wide tile each part is handed over as soon as the epilogue is done with that of the tile before.

*Loads.* What a slice needs is asked for while the slice before it is updated, the first one of a tile while the last
one of the tile before is. It is kept in words of 32 bits as it came, for a conversion would wait for it.

*Help.* The warps of the main loop take a share of the slices of a program's last tile, which has no main loop to hide
behind, and where the epilogue is what takes the time, of every tile. Their accumulator is free then, so they may start
the loads of two slices before they use the first.

*A warp that loads.* Where the main loop is the limit, its loads are started by a warp of its own: a step of the main
loop then has two barriers and 49 instructions instead of four and 69, and the epilogue's arithmetic beside it costs
less. With 16 warps a thread starts with 128 registers; the main loop's take 168 of them then, the epilogue's 152 (160
of a narrow tile), and products go over 128 columns at a time, which costs 1 % of a wide one. For few tokens, where a
long epilogue is the limit, and at borders, in exact arithmetic or with another hand-over, the warps of the main loop
start the loads.

*Decided against*, measured on an H200: two programs per multiprocessor (+50 %), the epilogue in the warps of the main
loop (+17 %), `evict_first` on weight and states (+11 %), eight warps in the epilogue of a wide tile, abreast or in two
groups, with 96 registers each (-2 to +44 %), asking L2 for the helping warps' slices before the main loop ends (-3 to
+5 %) or for a program's first tile during its first main loop (+5 %), slices across the columns first (-1 to +2 %), the
gradient out of shared memory before the next slice's loads (0 to +5 %); and, as the default, a hand-over of all 32 bits
with one operand stage less, which `gradient_bits=32` asks for (-1 to +7 %).

What depends on the rule comes in as functions, printed into each generated module (here with their arguments):

    table(pointer) -> s                 the scalars of this step
    keys(pointer, draws) -> keys        what the rounding of each tensor draws from
    fetch(at, *pointers, extras, *switches, formats, even)
                                        starts to load a slice of weight and states; returns it as stored
    apply(at, stored, grad, s, keys, *pointers, extras, *switches, exact, formats, draws, even)
                                        widens, updates, stores
    prefetch(at, *pointers, *switches)  asks for the lines of a later slice in L2

`extras`, `formats` and `draws` have an entry for the weight and one for each state; see `device_storage`.
`at` says where a slice is; see `device_epilogue`. One tensor's slice is read and written by `device_slices`,
and by nothing else.
"""

from __future__ import annotations

from forge_dsl.runtime import device_epilogue, device_handover, device_slices
from forge_dsl.runtime.gluon_support import (
    barrier,
    gl,
    gluon,
    load_tile,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Numbers that no kernel is compiled for.
SIZES = ("tokens", "n_rows", "n_columns", "weight_row", "state_row")

# ------------------------------------------------------------------------------------------------------- main loop


@gluon.jit
def tile_position(tile, n_down, n_across, GROUP: gl.constexpr):
    """Row and column of a tile. GROUP rows of tiles are walked column by column, so that their operands stay in L2."""
    per_group = GROUP * n_across
    first = (tile // per_group) * GROUP
    height = gl.minimum(n_down - first, GROUP)
    within = tile % per_group
    return first + within % height, within // height


@gluon.jit
def issue(operands, slot, tile, step, down, across, n_down, n_across, steps, GROUP: gl.constexpr):
    """Start the TMA loads of one stage, unless no tile is left, and move on: next step, then next tile."""
    dy, x, dy_stages, x_stages, full = operands
    block_t: gl.constexpr = dy.block_type.shape[0]
    block_o: gl.constexpr = dy.block_type.shape[1]
    block_i: gl.constexpr = x.block_type.shape[1]
    left = tile < n_down * n_across
    arrived = full.index(slot)
    mbarrier.expect(arrived, dy.block_type.nbytes + x.block_type.nbytes, pred=left)
    load_tile(dy, [step * block_t, down * block_o], arrived, dy_stages.index(slot), pred=left)
    load_tile(x, [step * block_t, across * block_i], arrived, x_stages.index(slot), pred=left)
    step += 1
    if step == steps:
        step = step * 0
        tile += gl.num_programs(0)
        down, across = tile_position(tile, n_down, n_across, GROUP)
    slot = gl.where(slot + 1 == full.shape[0], 0, slot + 1)
    return slot, tile, step, down, across


@gluon.jit
def load_operands(dy, x, dy_stages, x_stages, full, spent, n_down, n_across, steps, GROUP: gl.constexpr):
    """Start the TMA loads of every stage of every tile, each as soon as the stage is free. For a warp of its own."""
    operands = (dy, x, dy_stages, x_stages, full)
    tiles = n_down * n_across
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    tile = gl.program_id(0)
    step = gl.to_tensor(0)
    down, across = tile_position(tile, n_down, n_across, GROUP)
    while tile < tiles:
        mbarrier.wait(spent.index(slot), phase)
        phase = gl.where(slot + 1 == full.shape[0], phase ^ 1, phase)
        slot, tile, step, down, across = issue(operands, slot, tile, step, down, across, n_down, n_across, steps, GROUP)


@gluon.jit
def hand_over(total, planes, part, filled, emptied, free, PARTS: gl.constexpr, bits: gl.constexpr):
    """Write a tile's gradient to the planes in PARTS parts, the first of them `part`, each as soon as its place is
    free."""
    if PARTS > 1:
        left, right = device_handover.halves(total)
        hand_over(left, planes, part, filled, emptied, free, PARTS // 2, bits)
        hand_over(right, planes, part + PARTS // 2, filled, emptied, free, PARTS // 2, bits)
    else:
        mbarrier.wait(emptied.index(part), free)
        groups: gl.constexpr = total.shape[1] // planes[0].shape[2]
        device_handover.put_gradient(total, planes, part * groups, bits)
        mbarrier.arrive(filled.index(part))


@gluon.jit
def next_place(place, phase, TILES: gl.constexpr):
    """Which of TILES tiles' planes comes next, and in which phase its barriers are then."""
    if TILES == 1:
        return place, phase ^ 1
    else:
        place ^= 1
        return place, gl.where(place == 0, phase ^ 1, phase)


@gluon.jit
def main_loop(
    dy,
    x,
    dy_stages,
    x_stages,
    full,
    spent,
    filled,
    emptied,
    tall_planes,
    help_planes,
    n_down,
    n_across,
    steps,
    shape,
    strides,
    table,
    pointers,
    extras,
    switches,
    functions: gl.constexpr,
    WARPS: gl.constexpr,
    TILES: gl.constexpr,
    LOADER: gl.constexpr,
    GROUP: gl.constexpr,
    EVERY: gl.constexpr,
    LAST: gl.constexpr,
    TOGETHER: gl.constexpr,
    exact: gl.constexpr,
    formats: gl.constexpr,
    draws: gl.constexpr,
    even: gl.constexpr,
    bits: gl.constexpr,
):
    """`dY^T X` of every tile of this program, handed over one by one; then help with it, see above.

    tall_planes: each column group of a tile as one slice; help_planes: slices of the helping warps. EVERY: the first of
    these slices that is theirs; LAST: likewise in the last tile.
    """
    stages: gl.constexpr = full.shape[0]
    height: gl.constexpr = dy_stages.shape[2]
    width: gl.constexpr = x_stages.shape[2]
    # Products of 256 columns need 154 registers when a thread starts, which it has among 12 warps and not among 16.
    columns: gl.constexpr = 128 if LOADER else width
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, columns, 16])
    slices: gl.constexpr = help_planes[0].shape[0] // TILES
    parts: gl.constexpr = filled.shape[0] // TILES
    tiles = n_down * n_across
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    free = gl.to_tensor(1)
    place = gl.to_tensor(0)
    operands = (dy, x, dy_stages, x_stages, full)
    if not LOADER:
        next_tile = gl.program_id(0)
        next_step = gl.to_tensor(0)
        next_slot = gl.to_tensor(0)
        down, across = tile_position(next_tile, n_down, n_across, GROUP)
        for _ in gl.static_range(stages - 1):
            next_slot, next_tile, next_step, down, across = issue(
                operands, next_slot, next_tile, next_step, down, across, n_down, n_across, steps, GROUP
            )
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        total = gl.zeros([height, width], gl.float32, layout)
        for step in range(steps):
            mbarrier.wait(full.index(slot), phase)
            upstream = dy_stages.index(slot).permute((1, 0))
            total = warpgroup_mma(upstream, x_stages.index(slot), total, use_acc=step > 0, is_async=True)
            # All but this product are done, so the stage of the last one is free for the next load.
            total = warpgroup_mma_wait(1, deps=(total,))
            barrier()
            if LOADER:
                mbarrier.arrive(spent.index(gl.where(slot == 0, stages - 1, slot - 1)), pred=step > 0)
            else:
                next_slot, next_tile, next_step, down, across = issue(
                    operands, next_slot, next_tile, next_step, down, across, n_down, n_across, steps, GROUP
                )
            roll = slot + 1 == stages
            slot = gl.where(roll, 0, slot + 1)
            phase = gl.where(roll, phase ^ 1, phase)
        total = warpgroup_mma_wait(0, deps=(total,))
        if LOADER:
            barrier()
            mbarrier.arrive(spent.index(gl.where(slot == 0, stages - 1, slot - 1)))
        before = place * slices
        hand_over(total, tall_planes, place * parts, filled, emptied, free, parts, bits)
        place, free = next_place(place, free, TILES)
        first = gl.where(tile + gl.num_programs(0) < tiles, EVERY, LAST)
        if first < slices:
            own_down, own_across = tile_position(tile, n_down, n_across, GROUP)
            # The planes are complete when all warps have written theirs.
            barrier()
            device_epilogue.help_slices(
                help_planes,
                own_down,
                own_across,
                first,
                before,
                shape,
                strides,
                table,
                pointers,
                extras,
                switches,
                functions,
                height,
                width,
                slices,
                WARPS,
                TOGETHER,
                exact,
                formats,
                draws,
                even,
                bits,
            )


@gluon.jit
def epilogue(
    filled,
    emptied,
    planes,
    n_down,
    n_across,
    shape,
    strides,
    table,
    pointers,
    extras,
    switches,
    functions: gl.constexpr,
    HEIGHT: gl.constexpr,
    WIDTH: gl.constexpr,
    WARPS: gl.constexpr,
    TILES: gl.constexpr,
    GROUP: gl.constexpr,
    EVERY: gl.constexpr,
    LAST: gl.constexpr,
    AHEAD: gl.constexpr,
    EAGER: gl.constexpr,
    PAIRS: gl.constexpr,
    ABREAST: gl.constexpr,
    exact: gl.constexpr,
    formats: gl.constexpr,
    draws: gl.constexpr,
    even: gl.constexpr,
    bits: gl.constexpr,
):
    """The update of every tile of this program, slice by slice: the first EVERY of a tile, of the last one LAST.

    EAGER: a slice's loads are issued before the one in front of it is updated, across the borders of tiles too. PAIRS:
    the loop has two slices in its body, so that what is loaded need not change registers, which would be a wait for it.
    """
    make_table: gl.constexpr = functions[3]
    make_keys: gl.constexpr = functions[4]
    s = make_table(table)
    keys = make_keys(table, draws)
    fetch_slice: gl.constexpr = functions[0]
    parts: gl.constexpr = filled.shape[0] // TILES
    slices: gl.constexpr = planes[0].shape[0] // TILES
    ROWS: gl.constexpr = planes[0].shape[1]
    COLUMNS: gl.constexpr = planes[0].shape[2]
    layout: gl.constexpr = device_epilogue.slice_layout(ROWS, COLUMNS, WARPS, bits)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    offsets = (
        rows[:, None] * strides[0] + columns[None, :],
        rows[:, None] * strides[1] + columns[None, :],
    )
    tiles = n_down * n_across
    place = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    down, across = tile_position(gl.program_id(0), n_down, n_across, GROUP)
    coming = 0
    if EAGER:
        tile = down * HEIGHT, across * WIDTH, shape, strides, offsets, rows, columns
        at = device_epilogue.slice_of(0, tile, HEIGHT, ROWS, COLUMNS, even)
        coming = fetch_slice(at, *pointers, extras, *switches, formats, even)
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        following = number + gl.num_programs(0)
        last = following >= tiles
        # The last tile has none after it, and its first slice is loaded once more, for nobody.
        next_down, next_across = tile_position(gl.where(last, number, following), n_down, n_across, GROUP)
        coming = device_epilogue.update_slices(
            coming,
            planes,
            place * parts,
            filled,
            emptied,
            phase,
            (down * HEIGHT, across * WIDTH, shape, strides, offsets, rows, columns),
            (next_down * HEIGHT, next_across * WIDTH),
            gl.where(last, LAST, EVERY),
            s,
            keys,
            pointers,
            extras,
            switches,
            functions,
            layout,
            HEIGHT,
            slices,
            parts,
            WARPS,
            AHEAD,
            EAGER,
            PAIRS,
            ABREAST,
            exact,
            formats,
            draws,
            even,
            bits,
        )
        down, across = next_down, next_across
        place, phase = next_place(place, phase, TILES)


# ------------------------------------------------------------------------------------------------------ the kernel


@gluon.jit
def run(
    dy,
    x,
    table,
    tokens,
    shape,
    strides,
    pointers,
    extras,
    switches,
    functions: gl.constexpr,
    exact: gl.constexpr,
    formats: gl.constexpr,
    draws: gl.constexpr,
    even: gl.constexpr,
    vectors: gl.constexpr,
    alike: gl.constexpr,
    bits: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    EVERY: gl.constexpr,
    LAST: gl.constexpr,
    TOGETHER: gl.constexpr,
    AHEAD: gl.constexpr,
    EAGER: gl.constexpr,
    PAIRS: gl.constexpr,
    LOADER: gl.constexpr,
    GROUP: gl.constexpr,
):
    """One fused step of a weight. dy [tokens, rows] and x [tokens, columns] are TMA descriptors.

    shape: rows and columns; strides: elements between rows, of the weight and of the states, multiples of 8.
    EVERY, LAST: how many eighths of a tile the epilogue keeps for itself; LAST is for a program's last tile. even: no
    tile reaches beyond the border. vectors: the number of columns is a multiple of 8 too. alike: the states' rows are
    as far apart as the weight's.
    """
    block_t: gl.constexpr = dy.block_type.shape[0]
    height: gl.constexpr = dy.block_type.shape[1]
    width: gl.constexpr = x.block_type.shape[1]
    dy_stages = gl.allocate_shared_memory(dy.dtype, [STAGES, block_t, height], dy.layout)
    x_stages = gl.allocate_shared_memory(x.dtype, [STAGES, block_t, width], x.layout)
    # See above: a wide tile is multiplied by eight warps and updated by four, a narrow one the other way round.
    narrow: gl.constexpr = width == 128
    main_warps: gl.constexpr = 4 if narrow else 8
    update_warps: gl.constexpr = 8 if narrow else 4
    tiles: gl.constexpr = 2 if narrow else 1
    parts: gl.constexpr = 1 if narrow else width // device_slices.COLUMNS // device_handover.sharing(bits)
    # An eighth of a tile, eight rows a warp, so that no row is in two of them.
    help_rows: gl.constexpr = 32 if narrow else 64
    tall_planes = device_handover.allocate_planes(height, width, device_slices.COLUMNS, tiles, bits)
    planes = device_handover.in_slices(tall_planes, ROWS, bits)
    help_planes = device_handover.in_slices(tall_planes, help_rows, bits)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    spent = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    filled = gl.allocate_shared_memory(gl.int64, [tiles * parts, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [tiles * parts, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(spent.index(stage), count=1)
    for part in gl.static_range(tiles * parts):
        mbarrier.init(filled.index(part), count=1)
        mbarrier.init(emptied.index(part), count=1)
    n_down = (shape[0] + height - 1) // height
    n_across = (shape[1] + width - 1) // width
    # Says to the compiler what the launcher has made sure of, so that a thread's 8 columns are one access.
    if alike:
        strides = (strides[0] // 8 * 8, strides[0] // 8 * 8)
    else:
        strides = (strides[0] // 8 * 8, strides[1] // 8 * 8)
    if vectors:
        shape = (shape[0], shape[1] // 8 * 8)
    steps = (tokens + block_t - 1) // block_t
    gl.warp_specialize(
        [
            (
                main_loop,
                (
                    dy,
                    x,
                    dy_stages,
                    x_stages,
                    full,
                    spent,
                    filled,
                    emptied,
                    tall_planes,
                    help_planes,
                    n_down,
                    n_across,
                    steps,
                    shape,
                    strides,
                    table,
                    pointers,
                    extras,
                    switches,
                    functions,
                    main_warps,
                    tiles,
                    LOADER,
                    GROUP,
                    EVERY,
                    LAST,
                    TOGETHER,
                    exact,
                    formats,
                    draws,
                    even,
                    bits,
                ),
            ),
            (
                epilogue,
                (
                    filled,
                    emptied,
                    planes,
                    n_down,
                    n_across,
                    shape,
                    strides,
                    table,
                    pointers,
                    extras,
                    switches,
                    functions,
                    height,
                    width,
                    update_warps,
                    tiles,
                    GROUP,
                    EVERY * help_rows // ROWS,
                    LAST * help_rows // ROWS,
                    AHEAD,
                    EAGER,
                    PAIRS,
                    LOADER,
                    exact,
                    formats,
                    draws,
                    even,
                    bits,
                ),
            ),
            (load_operands, (dy, x, dy_stages, x_stages, full, spent, n_down, n_across, steps, GROUP)),
        ][: 3 if LOADER else 2],
        # With a warp that loads, which takes the place of four, 168 registers are left for a thread of the main loop.
        [update_warps, 1] if LOADER else [update_warps],
        [160 if narrow else 152, 24] if LOADER else [168],
    )
