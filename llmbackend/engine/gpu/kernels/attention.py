"""Attention of a ragged batch to keys and values in KV blocks: the Triton kernels.

Launched by paged_attention.py. The positions of a sequence are divided into fixed splits of SPLIT keys. A split is
computed tile by tile with an online softmax that starts from zero; the results of the splits are merged in ascending
order. For sequences with one query (decode), each split is an item of work, so a single long sequence occupies the
whole device; for others (prefill), an item is a tile of queries with all its splits. A launch has as many programs as
the device runs concurrently, which share the items; results do not depend on which program computes an item. Both use
the same helpers (_attend_tile, _merge, _finish).

Invariants. The result of a query depends only on its own position, keys and values, not on other sequences, the bounds
in the layout, the number of programs, or the size of the workspace. Tiles that a query does not attend to leave its
sums unchanged, bit by bit: they add zeros and multiply by ones. Keys and values at or beyond the length of a sequence
are not read, nor those before the window of its first query, whose blocks may already be another sequence's.

Decode and prefill agree bit by bit as well, as far as the tensor cores do: operands and the order over keys and over
the head dimension are the same; elementwise steps are written with explicit fma and compiled without further fusion;
every sum, including that of the softmax's weights, is a matrix product, whose order over the keys does not depend on
how warps share a tile. It is not documented that wgmma (Hopper; tiles of 64 rows and more) rounds as mma.sync does (16
rows, as in decode). With exact_chunks prefill uses the tile and the instruction of decode, and the agreement is
certain, at a cost in prefill; before Hopper there is only one instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_split(length, window, HAS_WINDOW: tl.constexpr, SPLIT: tl.constexpr):
    """The first split that the last query of a sequence of this length attends to."""
    if HAS_WINDOW:
        return tl.maximum(length - window, 0) // SPLIT
    return length * 0


@triton.jit
def decode_splits(
    query_start, seq_lens, num_sequences, window, HAS_WINDOW: tl.constexpr, SPLIT: tl.constexpr, SEQUENCES: tl.constexpr
):
    """[SEQUENCES]: how many splits the query of each sequence attends to, at least one; 0 if it does not have exactly
    one query."""
    sequence = tl.arange(0, SEQUENCES)
    there = sequence < num_sequences
    begin = tl.load(query_start + sequence, mask=there, other=0)
    queries = tl.load(query_start + sequence + 1, mask=there, other=0) - begin
    length = tl.load(seq_lens + sequence, mask=there, other=0)
    splits = tl.cdiv(length, SPLIT) - first_split(length, window, HAS_WINDOW, SPLIT)
    return tl.where(queries == 1, tl.maximum(splits, 1), 0)


@triton.jit
def stored_before(splits, sequence):
    """How many places in the workspace the splits of the preceding sequences take: a single split takes none."""
    return tl.sum(tl.where((tl.arange(0, splits.shape[0]) < sequence) & (splits > 1), splits, 0), 0)


@triton.jit
def decode_ends(splits, capacity):
    """[SEQUENCES]: where the items of each sequence end in the list for one tile of heads; and how many items are one
    split each. The sequences behind those do not fit in the workspace: each is one item."""
    fits = tl.cumsum(tl.where(splits > 1, splits, 0), 0) <= capacity
    return tl.cumsum(tl.where(fits, splits, tl.minimum(splits, 1)), 0), tl.sum(tl.where(fits, splits, 0), 0)


@triton.jit
def prefill_ends(query_start, num_sequences, QUERIES: tl.constexpr, SEQUENCES: tl.constexpr):
    """[SEQUENCES]: where the tiles of queries of each sequence end."""
    sequence = tl.arange(0, SEQUENCES)
    there = sequence < num_sequences
    begin = tl.load(query_start + sequence, mask=there, other=0)
    queries = tl.load(query_start + sequence + 1, mask=there, other=0) - begin
    return tl.cumsum(tl.where(queries > 1, tl.cdiv(queries, QUERIES), 0), 0)


@triton.jit
def owner_of(ends, item):
    """The sequence of an item, and the number of items before the sequence."""
    before = ends <= item
    return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, ends, 0), 0)


@triton.jit
def own_share(num_splits, num_items):
    """The items of this program, as evenly as possible. The first num_splits items are one split each: its own are
    consecutive and share keys and queries. Each of the others is a whole sequence: programs take them in turn. Returns
    begin, end and stop: items begin … end - 1, and stop - end of the whole sequences."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    begin = (num_splits.to(tl.int64) * program // programs).to(tl.int32)
    end = (num_splits.to(tl.int64) * (program + 1) // programs).to(tl.int32)
    return begin, end, end + (num_items - num_splits + programs - 1 - program) // programs


@triton.jit
def own_item(i, end, num_splits):
    """The item for each i from begin to stop - 1, as own_share returned them."""
    return tl.where(i < end, i, num_splits + tl.program_id(0) + (i - end) * tl.num_programs(0))


# ---------------------------------------------------------------------------------------------- shared by both kernels


@triton.jit
def _tanh(x):
    shrunk = tl.exp2(tl.abs(x) * -2.8853900817779268)  # exp(-2|x|): never overflows
    size = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(x < 0, -size, size)


@triton.jit
def _shift_for(top):
    """What to subtract before exp2: the largest score, or 0 where there is none yet."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _attend_tile(
    q, positions, first_key, begin_key, end_key, total, top, sums, keys, values, table, block_stride, key_scale,
    softcap, window,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds keys first_key … first_key + TILE - 1, below end_key, to the sums of each query row. Those before begin_key,
    which no row's window reaches, are not read.

    total [rows, PADDED]: weighted values; top [rows]: the largest score, in bits (scores are exponents of two); sums
    [rows, 16, 32 or 64]: the sum of weights, in every column, since it is a product with ones (of 16 columns for tall
    tiles; of twice the rows for 16 and 32, so that every product is wider than high and the warps share its columns).
    key_scale turns q·k into bits; with a soft cap, into the argument of tanh, and softcap turns the tanh into bits.
    """
    at = first_key + tl.arange(0, TILE)
    dims = tl.arange(0, PADDED)
    held = at < end_key
    if HAS_WINDOW:
        held = held & (at >= begin_key)
    block = tl.load(table + at // BLOCK_SIZE, mask=held, other=0).to(tl.int64)
    offsets = (block * block_stride + (at % BLOCK_SIZE) * HEAD_DIM)[:, None] + dims[None, :]
    inside = held[:, None] & (dims[None, :] < HEAD_DIM)
    k = tl.load(keys + offsets, mask=inside, other=0.0).to(DOT)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if HAS_SOFTCAP:
        scores = _tanh(scores * key_scale) * softcap
        factor = 1.0
    else:
        factor = key_scale
    seen = held[None, :] & (at[None, :] <= positions[:, None])
    if HAS_WINDOW:
        seen = seen & (at[None, :] > positions[:, None] - window)
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    shift = _shift_for(new_top)
    factors = tl.full(scores.shape, 1.0, tl.float32) * factor
    weights = tl.exp2(tl.fma(scores, factors, tl.broadcast_to(-shift[:, None], scores.shape)))
    kept = tl.exp2(top - shift)[:, None]
    v = tl.load(values + offsets, mask=inside, other=0.0).to(DOT)
    weights = weights.to(DOT)
    total = tl.dot(weights, v, total * kept, input_precision=PRECISION)
    sums = tl.dot(weights, tl.full([TILE, sums.shape[1]], 1.0, DOT), sums * kept, input_precision=PRECISION)
    return total, new_top, sums


@triton.jit
def _merge(total, top, weight, split_total, split_top, split_weight):
    """The sums of a longer stretch: those merged so far, then one more split. Shapes as in _attend_tile, or of one row:
    [PADDED] and scalars."""
    new_top = tl.maximum(top, split_top)
    shift = _shift_for(new_top)
    kept, added = tl.exp2(top - shift), tl.exp2(split_top - shift)
    weight = tl.fma(weight, kept, split_weight * added)
    if len(total.shape) == 2:
        kept, added = kept[:, None], added[:, None]
    return tl.fma(total, tl.broadcast_to(kept, total.shape), split_total * added), new_top, weight


@triton.jit
def _merge_stored(totals, tops, real, real_heads, total, top, weight):
    """As _merge, with the sums merged so far in memory: totals, and pairs of top and weight."""
    so_far = tl.load(totals, mask=real, other=0.0)
    so_far_top = tl.load(tops, mask=real_heads, other=0.0)
    so_far_weight = tl.load(tops + 1, mask=real_heads, other=0.0)
    return _merge(so_far, so_far_top, so_far_weight, total, top, weight)


@triton.jit
def _finish(total, top, weight, sinks, heads, real_heads, HAS_SINKS: tl.constexpr):
    """The output: weighted values over the sum of weights, including the sink's; zeros for a query without keys. heads,
    real_heads: the query head of each row, and whether there is one."""
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=real_heads, other=0.0) * 1.4426950408889634
        new_top = tl.maximum(top, sink)
        kept, added = tl.exp2(top - new_top), tl.exp2(sink - new_top)
        weight = tl.fma(weight, kept, added)
        total = total * (kept[:, None] if len(total.shape) == 2 else kept)
    divisor = tl.where(weight > 0, weight, 1.0)
    return total / (divisor[:, None] if len(total.shape) == 2 else divisor)


# -------------------------------------------------------------------------------------------------------------- decode


@triton.jit
def _attend_split(
    query, split, length, keys, values, table, block_stride, key_scale, softcap, window,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """total, top and weight of one split, for the last query of a sequence of this length, by up to 16 heads."""
    positions = tl.zeros([16], tl.int32) + (length - 1)
    total = tl.zeros([16, PADDED], tl.float32)
    top = tl.full([16], float("-inf"), tl.float32)
    weights = tl.zeros([16, 32], tl.float32)
    start = split * SPLIT
    begin_key = length * 0
    if HAS_WINDOW:
        begin_key = tl.maximum(length - window, 0)
        start = tl.maximum(start, begin_key // TILE * TILE)
    for first_key in range(start, tl.minimum(split * SPLIT + SPLIT, length), TILE):
        total, top, weights = _attend_tile(
            query, positions, first_key, begin_key, length, total, top, weights, keys, values, table, block_stride,
            key_scale, softcap, window, HEAD_DIM, PADDED, BLOCK_SIZE, TILE, HAS_WINDOW, HAS_SOFTCAP, DOT, PRECISION,
        )  # fmt: skip
    return total, top, tl.max(weights, 1)


_LAYOUT = ["rows", "query_start", "seq_lens", "table"]
"""Tensors whose alignment may change from step to step."""


@triton.jit(
    do_not_specialize=["num_sequences", "capacity", "places", "window", "table_stride", "key_scale", "softcap"],
    do_not_specialize_on_alignment=_LAYOUT,
)
def decode_kernel(
    q, keys, values, table, rows, query_start, seq_lens, sinks, workspace, out, q_stride, block_stride,
    head_stride, out_stride, table_stride, num_sequences, capacity, places, key_scale, softcap, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, SEQUENCES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Any number of programs, for sequences with one query. Their list is in the order of sequences, tiles of up to 16
    query heads of one group, splits.

    workspace: totals [places, HEADS, HEAD_DIM], then top and weight [places, HEADS, 2], float32. The first `capacity`
    places receive the sums of splits, for combine_kernel. A sequence with one split, or whose splits do not fit, is one
    item; its program keeps the merged sums in the sequence's own place after those (not in registers, because they are
    needed only once per split).
    """
    HEAD_TILES: tl.constexpr = (GROUP + 15) // 16
    splits = decode_splits(query_start, seq_lens, num_sequences, window, HAS_WINDOW, SPLIT, SEQUENCES)
    ends, num_splits = decode_ends(splits, capacity)
    ends *= HEADS // GROUP * HEAD_TILES
    num_splits *= HEADS // GROUP * HEAD_TILES
    begin, end, stop = own_share(num_splits, tl.max(ends, 0))
    for i in range(begin, stop):
        item = own_item(i, end, num_splits)
        sequence, before = owner_of(ends, item)
        _decode_item(
            sequence, item - before, stored_before(splits, sequence), q, keys, values, table, rows, query_start,
            seq_lens, sinks, workspace, out, q_stride, block_stride, head_stride, out_stride, table_stride, capacity,
            places, key_scale, softcap, window, HEADS, GROUP, HEAD_DIM, PADDED, BLOCK_SIZE, TILE, SPLIT, HAS_WINDOW,
            HAS_SOFTCAP, HAS_SINKS, DOT, PRECISION,
        )  # fmt: skip


@triton.jit
def _decode_item(
    sequence, index, stored, q, keys, values, table, rows, query_start, seq_lens, sinks, workspace, out,
    q_stride, block_stride, head_stride, out_stride, table_stride, capacity, places, key_scale, softcap, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """index: of the sequence's items; stored: where its places begin."""
    token = tl.load(query_start + sequence)
    length = tl.load(seq_lens + sequence)
    first = first_split(length, window, HAS_WINDOW, SPLIT)
    end = tl.cdiv(length, SPLIT)
    alone = (end - first <= 1) | (stored + end - first > capacity)
    num_items = tl.where(alone, 1, end - first)
    tile_of_heads = index // num_items
    own = first + index % num_items

    HEAD_TILES: tl.constexpr = (GROUP + 15) // 16
    kv_head = tile_of_heads // HEAD_TILES
    in_group = (tile_of_heads % HEAD_TILES) * 16 + tl.arange(0, 16)
    heads = kv_head * GROUP + in_group
    dims = tl.arange(0, PADDED)
    real = (in_group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    within = heads[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(q + token.to(tl.int64) * q_stride + within, mask=real, other=0.0).to(DOT)
    keys += kv_head.to(tl.int64) * head_stride
    values += kv_head.to(tl.int64) * head_stride
    table += tl.load(rows + sequence).to(tl.int64) * table_stride

    total = tl.zeros([16, PADDED], tl.float32)
    top = tl.full([16], float("-inf"), tl.float32)
    weight = tl.zeros([16], tl.float32)
    for split in range(own, tl.where(alone, end, own + 1)):
        total, top, weight = _attend_split(
            query, split, length, keys, values, table, block_stride, key_scale, softcap, window,
            HEAD_DIM, PADDED, BLOCK_SIZE, TILE, SPLIT, HAS_WINDOW, HAS_SOFTCAP, DOT, PRECISION,
        )  # fmt: skip
        place = tl.where(alone, capacity + sequence, stored + split - first).to(tl.int64) * HEADS
        totals = workspace + place * HEAD_DIM + within
        tops = workspace + places.to(tl.int64) * HEADS * HEAD_DIM + (place + heads) * 2
        if alone & (split > first):
            tl.debug_barrier()  # other threads of this program stored them
            total, top, weight = _merge_stored(totals, tops, real, in_group < GROUP, total, top, weight)
            tl.debug_barrier()  # other threads of this program may still read them
        if (alone == 0) | (split + 1 < end):
            tl.store(totals, total, mask=real)
            tl.store(tops, top, mask=in_group < GROUP)
            tl.store(tops + 1, weight, mask=in_group < GROUP)
    if alone:
        result = _finish(total, top, weight, sinks, heads, in_group < GROUP, HAS_SINKS)
        result = tl.where(length > 0, result, 0.0)
        tl.store(out + token.to(tl.int64) * out_stride + within, result.to(out.dtype.element_ty), mask=real)


@triton.jit(
    do_not_specialize=["capacity", "places", "window"],
    do_not_specialize_on_alignment=_LAYOUT,
)
def combine_kernel(
    workspace, query_start, seq_lens, sinks, out, out_stride, capacity, places, window,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, SPLIT: tl.constexpr,
    SEQUENCES: tl.constexpr, UNROLL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Program (sequence, query head): merges the splits that decode_kernel stored, in ascending order."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start + sequence)
    length = tl.load(seq_lens + sequence)
    if tl.load(query_start + sequence + 1) - token != 1:
        return
    count = tl.cdiv(length, SPLIT) - first_split(length, window, HAS_WINDOW, SPLIT)
    if count <= 1:
        return
    splits = decode_splits(query_start, seq_lens, tl.num_programs(0), window, HAS_WINDOW, SPLIT, SEQUENCES)
    stored = stored_before(splits, sequence)
    if stored + count > capacity:
        return

    dims = tl.arange(0, PADDED)
    pairs = workspace + places.to(tl.int64) * HEADS * HEAD_DIM
    total = tl.zeros([PADDED], tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    weight = tl.zeros([1], tl.float32)
    one = tl.arange(0, 1)
    for start in range(0, count, UNROLL):
        for i in tl.static_range(UNROLL):
            there = start + i < count
            place = (stored + start + i).to(tl.int64) * HEADS + head
            split_total = tl.load(workspace + place * HEAD_DIM + dims, mask=there & (dims < HEAD_DIM), other=0.0)
            split_top = tl.load(pairs + place * 2 + one, mask=there & (one < 1), other=float("-inf"))
            split_weight = tl.load(pairs + place * 2 + 1 + one, mask=there & (one < 1), other=0.0)
            total, top, weight = _merge(total, top, weight, split_total, split_top, split_weight)
    result = _finish(total, top, weight, sinks, head + one, one < 1, HAS_SINKS)
    target = out + token.to(tl.int64) * out_stride + head * HEAD_DIM + dims
    tl.store(target, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


# ------------------------------------------------------------------------------------------------------------- prefill


@triton.jit(
    do_not_specialize=["num_sequences", "window", "table_stride", "key_scale", "softcap"],
    do_not_specialize_on_alignment=_LAYOUT,
)
def prefill_kernel(
    q, keys, values, table, rows, query_start, seq_lens, sinks, out, q_stride, block_stride, head_stride,
    out_stride, table_stride, num_sequences, key_scale, softcap, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, SEQUENCES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Any number of programs, for sequences with more than one query. An item is a tile of queries and of query heads
    of one group; a tile's row is a query and a head: HEADS_HERE heads of each of QUERIES queries."""
    HEADS_HERE: tl.constexpr = GROUP if GROUP < ROWS else ROWS
    QUERIES: tl.constexpr = ROWS // HEADS_HERE
    HEAD_PROGRAMS: tl.constexpr = KV_HEADS * ((GROUP + HEADS_HERE - 1) // HEADS_HERE)
    ends = prefill_ends(query_start, num_sequences, QUERIES, SEQUENCES)
    num_tiles = tl.max(ends, 0)
    for item in range(tl.program_id(0), num_tiles * HEAD_PROGRAMS, tl.num_programs(0)):
        # The last tiles of a prompt see the most keys, so they come first.
        tile = num_tiles - 1 - item % num_tiles
        sequence, before = owner_of(ends, tile)
        _prefill_item(
            sequence, (tile - before) * QUERIES, item // num_tiles, q, keys, values, table, rows, query_start,
            seq_lens, sinks, out, q_stride, block_stride, head_stride, out_stride, table_stride, key_scale, softcap,
            window, GROUP, HEAD_DIM, PADDED, BLOCK_SIZE, HEADS_HERE, QUERIES, ROWS, TILE, SPLIT, HAS_WINDOW,
            HAS_SOFTCAP, HAS_SINKS, DOT, PRECISION,
        )  # fmt: skip


@triton.jit
def _prefill_item(
    sequence, first_query, tile_of_heads, q, keys, values, table, rows, query_start, seq_lens, sinks, out,
    q_stride, block_stride, head_stride, out_stride, table_stride, key_scale, softcap, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS_HERE: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    HEAD_TILES: tl.constexpr = (GROUP + HEADS_HERE - 1) // HEADS_HERE
    SUMS: tl.constexpr = 2 * ROWS if ROWS <= 32 else 16
    begin = tl.load(query_start + sequence)
    num_queries = tl.load(query_start + sequence + 1) - begin
    kv_head = tile_of_heads // HEAD_TILES
    row = tl.arange(0, ROWS)
    in_group = (tile_of_heads % HEAD_TILES) * HEADS_HERE + row % HEADS_HERE
    offset = first_query + row // HEADS_HERE
    used = (row < QUERIES * HEADS_HERE) & (offset < num_queries) & (in_group < GROUP)
    heads = kv_head * GROUP + in_group
    dims = tl.arange(0, PADDED)
    real = used[:, None] & (dims < HEAD_DIM)[None, :]
    within = heads[:, None] * HEAD_DIM + dims[None, :]
    tokens = (begin + offset).to(tl.int64)
    query = tl.load(q + tokens[:, None] * q_stride + within, mask=real, other=0.0).to(DOT)
    length = tl.load(seq_lens + sequence)
    first_position = length - num_queries + first_query
    positions = tl.minimum(length - num_queries + offset, length - 1)
    end_key = tl.minimum(first_position + QUERIES, length)
    keys += kv_head.to(tl.int64) * head_stride
    values += kv_head.to(tl.int64) * head_stride
    table += tl.load(rows + sequence).to(tl.int64) * table_stride

    all_total = tl.zeros([ROWS, PADDED], tl.float32)
    all_top = tl.full([ROWS], float("-inf"), tl.float32)
    all_weight = tl.zeros([ROWS], tl.float32)
    total, top, weights = all_total, all_top, tl.zeros([ROWS, SUMS], tl.float32)
    begin_key = first_position * 0
    if HAS_WINDOW:
        begin_key = tl.maximum(first_position - window + 1, 0)
    for first_key in range(begin_key // TILE * TILE, end_key, TILE):
        total, top, weights = _attend_tile(
            query, positions, first_key, begin_key, end_key, total, top, weights, keys, values, table, block_stride,
            key_scale, softcap, window, HEAD_DIM, PADDED, BLOCK_SIZE, TILE, HAS_WINDOW, HAS_SOFTCAP, DOT, PRECISION,
        )  # fmt: skip
        if (first_key + TILE) % SPLIT == 0:
            all_total, all_top, all_weight = _merge(all_total, all_top, all_weight, total, top, tl.max(weights, 1))
            total = tl.zeros([ROWS, PADDED], tl.float32)
            top = tl.full([ROWS], float("-inf"), tl.float32)
            weights = tl.zeros([ROWS, SUMS], tl.float32)
    all_total, all_top, all_weight = _merge(all_total, all_top, all_weight, total, top, tl.max(weights, 1))
    result = _finish(all_total, all_top, all_weight, sinks, heads, used, HAS_SINKS)
    tl.store(out + tokens[:, None] * out_stride + within, result.to(out.dtype.element_ty), mask=real)
