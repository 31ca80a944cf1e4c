"""The two kernels of the Hopper decode path: attention over packed pages, and the merge of its splits.

One warp reads one KV head of one range of tokens, and shares nothing but barriers with the others. Its lanes start one bulk
copy for each page (codes and scale words of a head are one run of bytes) into a private ring of tiles in shared memory, and
refill a tile as soon as they have read it. Nothing else is loaded in the loop but the page numbers of the tile after next.

Tokens are the rows of the matrix products and queries the columns, so that four heads fill no sixteen rows. Masks split a
word of eight codes into fp16 subnormals n * 2^-24 and n * 2^-20, which the tensor cores take exactly: no code is converted.

    scores  A = 16 tokens x 16 codes of K, B = 16 x 8 of the rotated query         S = (A B) * k_scale + sum(q) * k_bias
    values  A = 16 codes of V x 16 tokens, B = 16 x 8 of P * v_scale, transposed   O += A B, and sum(P * v_bias) aside

With four columns or fewer each query takes two columns, its fp16 rounding and the rest: the padding buys 11 more bits.
Lane l holds row l // 4 and columns 2 (l % 4) + (0, 1) of S and of O, so a query's maximum, its decay and its sums stay in
the lanes that need them. A word of a key row holds 8 dimensions; lane l takes the (l % 4)-th quarter of the row, and of
value rows the (l // 4)-th eighth: any order of dimensions serves, as long as Q and O follow it.

A head's part of a page is one run of bytes in both arrangements of pages, if a head's tokens follow one another; interleaved
rows only start at multiples of 8 (keys) and 4 bytes (values), so they are read in narrower words.

Weights are scaled by a running power of two above every value scale so far: fp16 then holds them for values of any size.

Keys of a raw window and sinks are attended by the merge, while it waits for the packed splits: programs of their own beside
those of the splits take the places of packed ones. It rotates the row that they give and takes it for one more split's.

DRAM, not the cores, bounds the loop; the rest of a call is its start, blocks that end unevenly, and the merge. Handing tiles
to whichever split is ready first evens the ends out and costs more: heads of one page then read it at different times.
"""

# Gluon's compiler takes neither starred tuples nor conditional expressions of different lengths; its types are not Python's.
# ruff: noqa: RUF005
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nibblekv.backends.triton.codec import FP8, INT8, SCALE_MIN, SCALE_ZERO, UINT4
from nibblekv.backends.triton.hopper import ptx

# Below every score, and finite: a row that has seen nothing yet rescales by exp2(0), not by exp2(inf - inf).
_LOW = gl.constexpr(-1e30)
# A weight is p * 2^15 at most, which fp16 holds; small ones keep 15 more binades before they lose bits.
_HEADROOM = gl.constexpr(15.0)
# Keys of a lane at once: three take so many registers that few programs are resident beside the decode kernel's.
_RAW_STEPS = gl.constexpr(2)
# Its name until Triton 3.6, and after.
_block_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.constexpr_function
def _ring_rows(warps, stages, stage_bytes):
    """Rows of 32 words per warp that hold every warp's ring and the barriers."""
    return (warps * stages * stage_bytes + 8 * stages + 128 * warps - 1) // (128 * warps)


@gluon.constexpr_function
def _code_row(row, rows, kb, vb, rows_mixed):
    """Byte of a token's key codes in its tile; pages of `rows` tokens of kb + vb bytes of codes follow one another."""
    if rows_mixed:
        return row * (kb + vb + 8)
    return row // rows * rows * (kb + vb + 8) + row % rows * kb


@gluon.constexpr_function
def _value_row(row, rows, kb, vb, rows_mixed):
    """Byte of a token's value codes in its tile."""
    if rows_mixed:
        return row * (kb + vb + 8) + kb + 4
    return row // rows * rows * (kb + vb + 8) + rows * kb + row % rows * vb


@gluon.constexpr_function
def _word(row, value, rows, kb, vb, rows_mixed):
    """Byte of the scale word of a token's key, or value (1), in its tile."""
    if rows_mixed:
        return row * (kb + vb + 8) + kb + value * (vb + 4)
    return row // rows * rows * (kb + vb + 8) + rows * (kb + vb) + row % rows * 4 + value * 4 * rows


@gluon.constexpr_function
def _spread(kb, vb, rows_mixed):
    """How eight fragment rows choose their tokens, such that the rows that a load reads lie in different banks.

    Interleaved rows are read 8 bytes at a time, sixteen lanes at once: four tokens, of each four runs of kb / 4 bytes.
    """
    if not rows_mixed:
        return "planar"
    pitch = (kb + vb + 8) // 4 % 32
    if pitch == 18 and kb == 32:
        return "fours"
    return "pairs" if pitch == 2 and kb == 64 else "rows"


@gluon.constexpr_function
def _second_row(spread):
    """The token of fragment row 8: rows 0 to 7 and 8 to 15 of a fragment are two sets of tokens, this far apart."""
    return {"fours": 2, "pairs": 4}.get(spread, 8)


@gluon.jit
def _token(g, SPREAD: gl.constexpr):
    """Return the token of fragment row g."""
    if SPREAD == "planar":
        return g ^ ((g >> 1) & 1)
    elif SPREAD == "fours":
        return ((g & 3) << 2) | (g >> 2)
    elif SPREAD == "pairs":
        return (g & 1) | ((g & 2) << 2) | ((g & 4) >> 1)
    else:
        return g


@gluon.jit
def _shared_words(address, OFFSET: gl.constexpr, COUNT: gl.constexpr, WIDTH: gl.constexpr):
    """Load COUNT words, WIDTH at a time."""
    words = ptx.load_shared(address, OFFSET, WIDTH)
    for i in gl.static_range(1, COUNT // WIDTH):
        words = words + ptx.load_shared(address, OFFSET + 4 * WIDTH * i, WIDTH)
    return words


@gluon.jit
def _key_words(address, ROW: gl.constexpr, ROWS: gl.constexpr, KB: gl.constexpr, VB: gl.constexpr, MIXED: gl.constexpr):
    """Load this lane's quarter of a row of key codes. Interleaved rows lie at multiples of 8 bytes."""
    return _shared_words(address, _code_row(ROW, ROWS, KB, VB, MIXED), KB // 16, 2 if MIXED else min(4, KB // 16))


@gluon.jit
def _value_words(address, ROW: gl.constexpr, ROWS: gl.constexpr, KB: gl.constexpr, VB: gl.constexpr, MIXED: gl.constexpr):
    """Load this lane's eighth of a row of value codes. In interleaved rows they lie at multiples of 4 bytes."""
    return _shared_words(address, _value_row(ROW, ROWS, KB, VB, MIXED), VB // 32, 1 if MIXED else min(4, VB // 32))


@gluon.jit
def _scale_word(
    address, ROW: gl.constexpr, VALUE: gl.constexpr, ROWS: gl.constexpr, KB: gl.constexpr, VB: gl.constexpr,
    MIXED: gl.constexpr,
):  # fmt: skip
    return ptx.load_shared(address, _word(ROW, VALUE, ROWS, KB, VB, MIXED), 1)[0]


@gluon.jit
def _scale_and_bias(word, CODE: gl.constexpr, WORD: gl.constexpr):
    """Return the float32 (scale, bias) of a scale word, for codes as they are unpacked."""
    if WORD == SCALE_MIN:
        return _as_float(word & -65536), _as_float(word << 16)
    elif WORD == SCALE_ZERO:
        scale = _as_float(word & -16)
        # The bits of 2^23 + zero point.
        return scale, scale * (8388608.0 - _as_float((word & 15) | 0x4B000000))
    elif CODE == INT8:  # unpacked as code + 128
        return _as_float(word), _as_float(word) * -128.0
    else:
        return _as_float(word), _as_float(word) * 0.0


@gluon.constexpr_function
def _unit(code):
    """What an unpacked code must be multiplied with."""
    return 256.0 if code == 2 else 16777216.0


@gluon.constexpr_function
def _middle(code):
    """The mean of unpacked codes."""
    return {0: 7.5, 1: 128.0, 2: 0.0}[code]


@gluon.jit
def _unpack_keys(word, CODE: gl.constexpr):
    """Return the pairs of a word's codes in the order of `_rotate_query`'s fragments."""
    if CODE == UINT4:
        return ptx.unpack_nibbles(word)
    else:
        return ptx.unpack_bytes(word, CODE == FP8)


@gluon.jit
def _unpack_values(even, odd, CODE: gl.constexpr):
    """Return pairs (code of one token, of the next), dimension after dimension of a word."""
    if CODE == UINT4:
        low, high = ptx.pair_halves(even, odd)
        return ptx.unpack_nibbles(low) + ptx.unpack_nibbles(high)
    else:
        return ptx.pair_bytes(even, odd, CODE == FP8)


@gluon.constexpr_function
def _sign_word(signs, index):
    word = signs >> 32 * index & 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


@gluon.jit
def _sign_bits(dim, SIGNS: gl.constexpr, D: gl.constexpr):
    """Return the 32 sign bits (1: negative) around each dimension."""
    bits = dim * 0 + _sign_word(SIGNS, 0)
    for i in gl.static_range(1, D // 32):
        bits = gl.where(dim >> 5 == i, _sign_word(SIGNS, i), bits)
    return bits


@gluon.jit
def _as_float(bits):
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _as_bits(x):
    return x.to(gl.int32, bitcast=True)


@gluon.jit
def _start_tile(
    table, stage, barrier, kv, tile, seq_len, block_stride, lane,
    T: gl.constexpr, BLOCK: gl.constexpr, KB: gl.constexpr, VB: gl.constexpr, MIXED: gl.constexpr,
):  # fmt: skip
    """Announce a tile's bytes to a barrier and start its copies. table: this lane's page of the tile."""
    ROWS: gl.constexpr = min(BLOCK, T)
    PAGES: gl.constexpr = T // ROWS
    CHUNK: gl.constexpr = ROWS * (KB + VB + 8)
    if BLOCK <= T:
        pages = gl.minimum(gl.cdiv(seq_len, BLOCK) - tile * PAGES, PAGES)
        ptx.barrier_expect(barrier, lane * 0 + pages * CHUNK, (lane == 0).to(gl.int32))
        ptx.bulk_copy(
            stage + lane * CHUNK,
            kv + table.to(gl.int64) * block_stride,
            lane * 0 + CHUNK,
            barrier,
            (lane < pages).to(gl.int32),
        )
    elif MIXED:
        source = lane * 0 + (tile * T) % BLOCK * (KB + VB + 8)
        ptx.barrier_expect(barrier, lane * 0 + CHUNK, (lane == 0).to(gl.int32))
        ptx.bulk_copy(
            stage + lane * 0, kv + table.to(gl.int64) * block_stride + source, lane * 0 + CHUNK, barrier,
            (lane == 0).to(gl.int32),
        )  # fmt: skip
    else:
        row = (tile * T) % BLOCK
        ptx.barrier_expect(barrier, lane * 0 + CHUNK, (lane == 0).to(gl.int32))
        size = gl.where(lane == 0, T * KB, gl.where(lane == 1, T * VB, T * 4))
        source = gl.where(lane == 0, row * KB, BLOCK * KB + row * VB)
        source = gl.where(lane < 2, source, BLOCK * (KB + VB) + (lane - 2) * (BLOCK * 4) + row * 4)
        target = gl.where(lane < 2, lane * (T * KB), T * (KB + VB) + (lane - 2) * (T * 4))
        ptx.bulk_copy(
            stage + target, kv + table.to(gl.int64) * block_stride + source, size, barrier, (lane < 4).to(gl.int32)
        )


@gluon.jit
def _tile_pages(block_table, tile, seq_len, lane, T: gl.constexpr, BLOCK: gl.constexpr):
    """Return the page numbers of a tile, one to a lane, repeating; entries past the sequence's end are not read."""
    if BLOCK <= T:
        page = tile * (T // BLOCK) + (lane & (T // BLOCK - 1))
    else:
        page = lane * 0 + tile * T // BLOCK
    return gl.load(block_table + page, mask=page * BLOCK < seq_len, other=0)


@gluon.jit
def _hadamard(x, part, N: gl.constexpr, PART_BITS: gl.constexpr, STEP: gl.constexpr):
    """Return the Hadamard sums of a row that lies N values to a lane; part: this lane's; the next part is STEP lanes on."""
    for bit in gl.static_range(6):
        if (1 << bit) < N:
            y = ()
            for i in gl.static_range(N):
                if i & (1 << bit) == 0:
                    y = y + (x[i] + x[i + (1 << bit)],)
                else:
                    y = y + (x[i - (1 << bit)] - x[i],)
            x = y
    for bit in gl.static_range(PART_BITS):
        negative = (part & (1 << bit)) != 0
        y = ()
        for i in gl.static_range(N):
            y = y + (ptx.shuffle_xor(x[i], STEP << bit) + gl.where(negative, -x[i], x[i]),)
        x = y
    return x


@gluon.jit
def _rotate_query(
    words, lane, valid, factor, SIGNS: gl.constexpr, D: gl.constexpr, HALF: gl.constexpr, PAIR: gl.constexpr,
    CODE: gl.constexpr,
):  # fmt: skip
    """Return (B fragments, scale of the score, sum of the query) of this lane's column.

    SIGNS: of the rotation, 0 for none (every real rotation has some).
    """
    N: gl.constexpr = D // 4
    x = ()
    for i in gl.static_range(N // 2):
        first = (lane & 3) * N + 2 * i
        bits = _sign_bits(first, SIGNS, D) >> (first & 31)
        pair = ptx.unpack2(words[i] ^ (((bits & 2) << 30) | ((bits & 1) << 15)), HALF)
        x = x + (gl.where(valid, pair[0], 0.0), gl.where(valid, pair[1], 0.0))
    if SIGNS:
        x = _hadamard(x, lane & 3, N, 2, 1)
    top = x[0] * 0.0
    for i in gl.static_range(N):
        top = gl.maximum(top, gl.abs(x[i]))
    top = gl.maximum(top, ptx.shuffle_xor(top, 1))
    top = gl.maximum(top, ptx.shuffle_xor(top, 2)) * factor
    exponent = gl.minimum(gl.maximum((_as_bits(top) >> 23) & 255, 40), 240)
    scaled = _as_float((266 - exponent) << 23) * factor
    unscale = _as_float((exponent - 12) << 23)
    total = x[0] * 0.0
    y = ()
    for i in gl.static_range(N):
        v = x[i] * scaled
        high = ptx.round_half(v)
        if PAIR:
            total += v
            v = gl.where((lane & 4) != 0, v - high, high)
        else:
            total += high
            v = high
        if CODE == UINT4 and i % 2 == 1:
            v = v * 0.0625
        y = y + (v,)
    total += ptx.shuffle_xor(total, 1)
    total += ptx.shuffle_xor(total, 2)
    fragments = ()
    if CODE == UINT4:
        for i in gl.static_range(N // 8):
            for n in gl.static_range(4):
                fragments = fragments + (ptx.pack_half2(y[8 * i + n], y[8 * i + n + 4]),)
    else:
        for i in gl.static_range(N // 2):
            fragments = fragments + (ptx.pack_half2(y[2 * i], y[2 * i + 1]),)
    return fragments, unscale * _unit(CODE), total * unscale


@gluon.jit
def _load_words(address, COUNT: gl.constexpr):
    words = ()
    for i in gl.static_range(COUNT // 4):
        words = words + ptx.load_global4(address, 16 * i)
    return words


@gluon.jit
def _rotate_row(x, part, gain, SIGNS: gl.constexpr, D: gl.constexpr):
    """Rotate a row of which each lane holds the part-th eighth, part = lane % 8 (SIGNS 0: do not); return it times gain."""
    N: gl.constexpr = D // 8
    bits = _sign_bits(part * N, SIGNS, D) >> (part * N & 31)
    y = ()
    for i in gl.static_range(N):
        y = y + (gl.where((bits >> i & 1) != 0, -x[i], x[i]) * gain,)
    if SIGNS:
        y = _hadamard(y, part, N, 3, 1)
    return y


@gluon.jit
def attend_raw(
    query, raw_key, raw_value, seq_lens, query_start_loc, partial, partial_lse, query_token_stride, query_head_stride,
    raw_seq_stride, raw_row_stride, raw_head_stride, factor, gain, window, raw_window, raw_sinks, raw_ring, raw_rows,
    HEADS: gl.constexpr, GROUP: gl.constexpr, QUERY_LEN: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, HALF: gl.constexpr, SIGNS: gl.constexpr,
):  # fmt: skip
    """Attend a program's query to its raw keys; store a row like a split's, from row raw_rows of partial on.

    Eight lanes share a key, four keys are read at once, `_RAW_STEPS` times in a step; every warp does the same. gain: turns
    Hadamard sums of a row into stored ones. Returns the row's index among the queries', -1 where a sequence has fewer.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    N: gl.constexpr = D // 8
    STEPS: gl.constexpr = _RAW_STEPS
    lane = gl.arange(0, 32 * gl.num_warps(), LANES) & 31
    key, part = lane >> 3, lane & 7
    pid = gl.program_id(0)
    head, number, seq = pid % HEADS, pid // HEADS % QUERY_LEN, pid // (HEADS * QUERY_LEN)
    seq_len = gl.load(seq_lens + seq).to(gl.int32)
    query_start = gl.load(query_start_loc + seq).to(gl.int32)
    query_len = gl.load(query_start_loc + seq + 1).to(gl.int32) - query_start
    token = query_start + number
    at = seq_len - query_len + number
    end = at + 1 if CAUSAL else seq_len
    first = gl.maximum(at - window + 1, 0) if WINDOW else 0
    sinks = gl.maximum(gl.minimum(raw_sinks, end) - first, 0)
    beyond = gl.where(raw_window > 0, gl.maximum(gl.maximum(at - raw_window + 1, raw_sinks), first), end)
    count = gl.where(number < query_len, sinks + gl.maximum(end - beyond, 0), 0)
    ring_first = (beyond - raw_sinks) % gl.maximum(raw_ring, 1)

    row = gl.where(number < query_len, token, query_start).to(gl.int64)
    query_words = _load_words(
        query.to(gl.int64) + 2 * (row * query_token_stride + head * query_head_stride + part * N), N // 2
    )
    x = ()
    for w in gl.static_range(N // 2):
        x = x + ptx.unpack2(query_words[w], HALF)
    offset = 2 * (seq.to(gl.int64) * raw_seq_stride + head // GROUP * raw_head_stride + part * N)
    keys, values = raw_key.to(gl.int64) + offset, raw_value.to(gl.int64) + offset

    zero = lane.to(gl.float32) * 0.0
    accumulator = (zero,) * N
    top = zero + _LOW
    total = zero
    for j in range(0, count, 4 * STEPS):
        key_words = ()
        value_words = ()
        for r in gl.static_range(STEPS):
            # Of the last step the last key, again and again.
            i = gl.minimum(j + 4 * r + key, count - 1)
            place = ring_first + i - sinks
            place = gl.where(place >= raw_ring, place - raw_ring, place) + raw_sinks
            place = 2 * (gl.where(i < sinks, first + i, place) * raw_row_stride).to(gl.int64)
            key_words = key_words + _load_words(keys + place, N // 2)
            value_words = value_words + _load_words(values + place, N // 2)
        score = ()
        for r in gl.static_range(STEPS):
            product = zero
            check = lane * 0
            for w in gl.static_range(N // 2):
                k = ptx.unpack2(key_words[N // 2 * r + w], HALF)
                product = product + x[2 * w] * k[0] + x[2 * w + 1] * k[1]
                check = ptx.add_nothing2(value_words[N // 2 * r + w], check, HALF)
            # A value row with NaN or infinity makes the score NaN.
            product = gl.where(check != 0, float("nan"), product)
            product += ptx.shuffle_xor(product, 1)
            product += ptx.shuffle_xor(product, 2)
            product += ptx.shuffle_xor(product, 4)
            score = score + (gl.where(j + 4 * r + key < count, product * factor, float("-inf")),)
        best = top
        for r in gl.static_range(STEPS):
            best = gl.maximum(best, score[r])
        decay = gl.exp2(top - best)
        top = best
        total = total * decay
        updated = ()
        for i in gl.static_range(N):
            updated = updated + (accumulator[i] * decay,)
        for r in gl.static_range(STEPS):
            weight = gl.exp2(score[r] - top)
            total = total + weight
            added = ()
            for w in gl.static_range(N // 2):
                v = ptx.unpack2(value_words[N // 2 * r + w], HALF)
                added = added + (updated[2 * w] + weight * v[0], updated[2 * w + 1] + weight * v[1])
            updated = added
        accumulator = updated

    best = gl.maximum(top, ptx.shuffle_xor(top, 8))
    best = gl.maximum(best, ptx.shuffle_xor(best, 16))
    decay = gl.exp2(top - best)
    total = total * decay
    total += ptx.shuffle_xor(total, 8)
    total += ptx.shuffle_xor(total, 16)
    summed = ()
    for i in gl.static_range(N):
        y = accumulator[i] * decay
        y += ptx.shuffle_xor(y, 8)
        y += ptx.shuffle_xor(y, 16)
        summed = summed + (y,)
    y = _rotate_row(summed, part, gl.where(total == 0.0, 0.0, gain / total), SIGNS, D)
    index = (raw_rows + token * HEADS + head).to(gl.int64)
    valid = (number < query_len) & (lane < 8)
    address = partial.to(gl.int64) + (index * D + part * N) * 4
    for i in gl.static_range(N // 4):
        ptx.store_global4(address, y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3], valid.to(gl.int32), 16 * i)
    gl.store(partial_lse + (lane * 0 + index), best + gl.log2(total), mask=valid & (lane == 0))
    return gl.where(number < query_len, token * HEADS + head, -1)


@gluon.jit(do_not_specialize=["num_kv_heads", "num_splits", "window", "raw_window", "raw_sinks"])
def decode_kernel(
    query, kv_cache, block_table, seq_lens, query_start_loc, partial, partial_lse,
    query_token_stride, query_head_stride, block_stride, head_stride, table_stride, factor, window, raw_window, raw_sinks,
    num_kv_heads, num_splits, GROUP: gl.constexpr, QUERY_LEN: gl.constexpr,
    D: gl.constexpr, BLOCK: gl.constexpr, T: gl.constexpr, STAGES: gl.constexpr,
    MIXED: gl.constexpr, K_CODE: gl.constexpr, K_WORD: gl.constexpr, V_CODE: gl.constexpr, V_WORD: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, RAW: gl.constexpr, HALF: gl.constexpr, SIGNS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Attend one split of a sequence for one KV head a warp; store normalised rows and their log2-sum-exp.

    MIXED: pages are interleaved, else planar. Codes and words as codec.py names them. RAW: leave the raw window and sinks
    out. SIGNS: of the keys' rotation.
    """
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    COLUMNS: gl.constexpr = GROUP * QUERY_LEN
    PAIR: gl.constexpr = COLUMNS <= 4
    NT: gl.constexpr = 1 if PAIR else (COLUMNS + 7) // 8
    NC: gl.constexpr = 1 if PAIR else 2 * NT
    ROWS: gl.constexpr = min(BLOCK, T)
    KB: gl.constexpr = D // 2 if K_CODE == UINT4 else D
    VB: gl.constexpr = D // 2 if V_CODE == UINT4 else D
    STAGE: gl.constexpr = T * (KB + VB + 8)
    NG: gl.constexpr = T // 16
    MT: gl.constexpr = D // 16
    # Words of a lane's quarter of a key row and eighth of a value row, and their products.
    KW: gl.constexpr = KB // 16
    K_STEPS: gl.constexpr = MT // KW
    VW: gl.constexpr = VB // 32
    V_STEPS: gl.constexpr = MT // VW
    K_BIASED: gl.constexpr = K_CODE != FP8
    V_BIASED: gl.constexpr = V_CODE != FP8

    thread = gl.arange(0, 32 * WARPS, LANES)
    lane, warp = thread & 31, thread >> 5
    g, t = lane >> 2, lane & 3
    pid = gl.program_id(0)
    groups = num_kv_heads // WARPS
    head = pid % groups * WARPS + warp
    split = pid // groups % num_splits
    seq = pid // (groups * num_splits)
    memory = gl.allocate_shared_memory(
        gl.int32, [_ring_rows(WARPS, STAGES, STAGE), 32 * WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    # An ordinary use of the allocation, so that its symbol is declared to the PTX that names it.
    memory.index(0).store(thread)
    base = ptx.shared_base(lane)
    barriers = base + WARPS * STAGES * STAGE
    base += warp * (STAGES * STAGE)
    ptx.barrier_init(barriers + 8 * thread, WARPS, (thread < STAGES).to(gl.int32))
    ptx.barrier_init_fence(lane)
    _block_barrier()

    if PDL:
        ptx.wait_for_dependency(lane)
        ptx.launch_dependents(lane)
    seq_len = gl.load(seq_lens + seq).to(gl.int32)
    query_start = gl.load(query_start_loc + seq).to(gl.int32)
    query_len = gl.load(query_start_loc + seq + 1).to(gl.int32) - query_start

    # Asked for before the first pages, behind which it would queue.
    query_words = ()
    for nt in gl.static_range(NT):
        column = g >> 1 if PAIR else 8 * nt + g
        row = column // GROUP
        valid = (row < query_len) & (column < COLUMNS)
        address = query.to(gl.int64) + 2 * (
            (query_start + row).to(gl.int64) * query_token_stride
            + (head * GROUP + column % GROUP) * query_head_stride
            + t * (D // 4)
        )
        address = gl.where(valid, address, query.to(gl.int64))
        for i in gl.static_range(D // 32):
            query_words = query_words + ptx.load_global4(address, 16 * i)

    first_position = seq_len - query_len
    first_visible = gl.maximum(first_position - window + 1, 0) if WINDOW else 0
    full_begin = gl.cdiv(gl.maximum(seq_len - window, 0), T) if WINDOW else 0
    if RAW:
        # What no query of the sequence reads as stored: the newest tokens, which the last query reads raw, and sinks.
        seq_len = gl.maximum(seq_len - raw_window, 0)
        first_visible = gl.maximum(first_visible, raw_sinks)
    tiles_begin = first_visible // T
    tiles = gl.cdiv(seq_len, T) - tiles_begin
    if RAW:
        tiles = gl.maximum(tiles, 0)
    begin = tiles_begin + split * tiles // num_splits
    end = tiles_begin + (split + 1) * tiles // num_splits
    count = gl.maximum(end - begin, 0)
    # Tiles in [full_begin, full_end) are visible to every query of the sequence.
    full_end = (first_position + 1) // T if CAUSAL else seq_len // T
    if RAW:
        full_end = gl.where(raw_window > 0, gl.maximum(first_position + 1 - raw_window, 0) // T, full_end)
        full_begin = gl.maximum(full_begin, gl.cdiv(raw_sinks, T))

    table = block_table + seq.to(gl.int64) * table_stride
    kv = kv_cache.to(gl.int64) + head.to(gl.int64) * head_stride + lane.to(gl.int64) * 0
    pages = ()
    for s in gl.static_range(STAGES):
        pages = pages + (_tile_pages(table, begin + s, seq_len, lane, T, BLOCK),)
    for s in gl.static_range(STAGES):
        if s < count:
            _start_tile(
                pages[s],
                base + s * STAGE,
                barriers + 8 * s,
                kv,
                begin + s,
                seq_len,
                block_stride,
                lane,
                T,
                BLOCK,
                KB,
                VB,
                MIXED,
            )
    next_pages = _tile_pages(table, begin + STAGES, seq_len, lane, T, BLOCK)

    fragments = ()
    score_scale = ()
    query_sum = ()
    for nt in gl.static_range(NT):
        column = g >> 1 if PAIR else 8 * nt + g
        row = column // GROUP
        valid = (row < query_len) & (column < COLUMNS)
        q = _rotate_query(
            query_words[nt * (D // 8) : (nt + 1) * (D // 8)], lane, valid, factor, SIGNS, D, HALF, PAIR, K_CODE
        )
        fragments = fragments + q[0]
        score_scale = score_scale + (ptx.broadcast_lane(q[1], 8 * t),)
        query_sum = query_sum + (ptx.broadcast_lane(q[2], 8 * t),)
        if not PAIR:
            score_scale = score_scale + (ptx.broadcast_lane(q[1], 8 * t + 4),)
            query_sum = query_sum + (ptx.broadcast_lane(q[2], 8 * t + 4),)

    zero = gl.full([32 * WARPS], 0.0, gl.float32, LANES)
    accumulator = (zero,) * (4 * MT * NT)
    top = (zero + _LOW,) * NC
    total = (zero,) * NC
    offset = (zero,) * NC
    # The largest value scale so far, as the bits of a power of two.
    reference = gl.full([32 * WARPS], 27 << 23, gl.int32, LANES)

    SPREAD: gl.constexpr = _spread(KB, VB, MIXED)
    SECOND: gl.constexpr = _second_row(SPREAD)
    K_PITCH: gl.constexpr = KB + VB + 8 if MIXED else KB
    V_PITCH: gl.constexpr = KB + VB + 8 if MIXED else VB
    token = _token(g, SPREAD)
    even, odd = _token(2 * t, SPREAD), _token(2 * t + 1, SPREAD)
    k_lane = token * K_PITCH + t * (KB // 4)
    v_even = even * V_PITCH + g * (VB // 8)
    v_odd = odd * V_PITCH + g * (VB // 8)
    w_lane = token * (K_PITCH if MIXED else 4)

    stage = 0
    phase = 0
    for j in range(count):
        tile = begin + j
        here = base + stage * STAGE
        barrier = barriers + stage * 8
        ptx.barrier_wait(barrier, lane * 0 + phase)
        k_here, ve_here, vo_here, w_here = here + k_lane, here + v_even, here + v_odd, here + w_lane

        score = ()
        v_scale = ()
        v_bias = ()
        for i in gl.static_range(NG):
            upper = _key_words(k_here, 16 * i, ROWS, KB, VB, MIXED)
            lower = _key_words(k_here, 16 * i + SECOND, ROWS, KB, VB, MIXED)
            words = ()
            v_words = ()
            for r in gl.static_range(2):
                words = words + (_scale_word(w_here, 16 * i + r * SECOND, 0, ROWS, KB, VB, MIXED),)
                v_words = v_words + (_scale_word(w_here, 16 * i + r * SECOND, 1, ROWS, KB, VB, MIXED),)
            # At head size 256 few warps are resident and a product waits for the one before it: two chains, added.
            c = ((zero, zero, zero, zero),) * NT
            other = c
            for w in gl.static_range(KW):
                a, b = _unpack_keys(upper[w], K_CODE), _unpack_keys(lower[w], K_CODE)
                for k in gl.static_range(K_STEPS):
                    pairs = (a[2 * k], b[2 * k], a[2 * k + 1], b[2 * k + 1])
                    d = ()
                    for nt in gl.static_range(NT):
                        of_query = fragments[
                            nt * (D // 8) + 2 * (w * K_STEPS + k) : nt * (D // 8) + 2 * (w * K_STEPS + k) + 2
                        ]
                        d = d + (ptx.mma(pairs, of_query[0], of_query[1], c[nt]),)
                    if D == 256:
                        c = other
                        other = d
                    else:
                        c = d
            if D == 256:
                d = ()
                for nt in gl.static_range(NT):
                    d = d + (
                        (c[nt][0] + other[nt][0], c[nt][1] + other[nt][1], c[nt][2] + other[nt][2], c[nt][3] + other[nt][3]),
                    )
                c = d
            for r in gl.static_range(2):
                k_scale, k_bias = _scale_and_bias(words[r], K_CODE, K_WORD)
                for n in gl.static_range(NC):
                    if PAIR:
                        product = c[0][2 * r] + c[0][2 * r + 1]
                    else:
                        product = c[n // 2][2 * r + n % 2]
                    product = product * (k_scale * score_scale[n])
                    if K_BIASED:
                        product = product + query_sum[n] * k_bias
                    score = score + (product,)
                scale, bias = _scale_and_bias(v_words[r], V_CODE, V_WORD)
                v_scale = v_scale + (scale,)
                v_bias = v_bias + (bias,)

        if (tile < full_begin) | (tile >= full_end):
            new_score = ()
            new_scale = ()
            new_bias = ()
            for i in gl.static_range(2 * NG):
                position = tile * T + i // 2 * 16 + i % 2 * SECOND + token
                inside = (position < seq_len) & (position >= first_visible)
                poison = v_scale[i] * 0.0 + v_bias[i] * 0.0
                finite = inside & (poison == 0.0)
                new_scale = new_scale + (gl.where(finite, v_scale[i], 0.0),)
                new_bias = new_bias + (gl.where(finite, v_bias[i], 0.0),)
                for n in gl.static_range(NC):
                    if PAIR:
                        column = t
                    else:
                        column = n // 2 * 8 + 2 * t + n % 2
                    at = first_position + column // GROUP
                    visible = inside
                    if CAUSAL:
                        visible = visible & (position <= at)
                    if WINDOW:
                        visible = visible & (at - position < window)
                    if RAW:
                        visible = visible & ((raw_window == 0) | (at - position >= raw_window))
                    new_score = new_score + (gl.where(visible, score[i * NC + n] + poison, float("-inf")),)
            score = new_score
            v_scale = new_scale
            v_bias = new_bias

        # One power of two per warp keeps p * scale inside fp16 for values of any size.
        largest = v_scale[0]
        for i in gl.static_range(2 * NG):
            largest = gl.maximum(largest, v_scale[i])
        bits = ptx.warp_max_bits((_as_bits(largest) + 0x7FFFFF) & 0x7F800000)
        bits = gl.maximum(bits, reference)
        inverse = _as_float(0x7F000000 - bits)
        shrink = _as_float(reference) * inverse
        reference = bits

        new_top = ()
        decay = ()
        for n in gl.static_range(NC):
            best = score[n]
            for i in gl.static_range(1, 2 * NG):
                best = gl.maximum(best, score[i * NC + n])
            best = gl.maximum(best, ptx.shuffle_xor(best, 4))
            best = gl.maximum(best, ptx.shuffle_xor(best, 8))
            best = gl.maximum(best, ptx.shuffle_xor(best, 16))
            best = gl.maximum(best, top[n])
            new_top = new_top + (best,)
            decay = decay + (gl.exp2(top[n] - best),)
        top = new_top
        new_total = ()
        new_offset = ()
        for n in gl.static_range(NC):
            new_total = new_total + (total[n] * decay[n],)
            if V_BIASED:
                new_offset = new_offset + (offset[n] * decay[n],)
        # Tensor cores truncate what they add to a large sum, always downwards, and codes are never negative: sums of a whole
        # split were off by 3e-3 of the output. So a tile (16 tokens of it where registers are short) is summed from zero and
        # then added in float32.
        SPAN: gl.constexpr = 1 if MT * NT > 8 else NG
        factors = ()
        for n in gl.static_range(NC):
            factors = factors + (decay[n] * shrink,)

        # A weight's rounding error is worth its product with the mean code, if the bias is counted from there: of the sum of
        # all eight lanes of a column, which a product with ones gives, each takes an eighth.
        middle = _as_float(reference) * (_middle(V_CODE) / 8)
        ones = lane * 0 + 0x3C003C00
        for i in gl.static_range(NG):
            v0, v1 = _value_words(ve_here, 16 * i, ROWS, KB, VB, MIXED), _value_words(vo_here, 16 * i, ROWS, KB, VB, MIXED)
            v2 = _value_words(ve_here, 16 * i + SECOND, ROWS, KB, VB, MIXED)
            v3 = _value_words(vo_here, 16 * i + SECOND, ROWS, KB, VB, MIXED)
            p_fragments = ()
            for r in gl.static_range(2):
                scale = v_scale[2 * i + r] * inverse
                weighted = ()
                kept_total = ()
                kept_offset = ()
                for n in gl.static_range(NC):
                    p = gl.exp2(score[(2 * i + r) * NC + n] - (top[n] - _HEADROOM))
                    kept_total = kept_total + (new_total[n] + p,)
                    if V_BIASED:
                        kept_offset = kept_offset + (
                            new_offset[n] + p * (v_bias[2 * i + r] + v_scale[2 * i + r] * _middle(V_CODE)),
                        )
                    weighted = weighted + (p * scale,)
                new_total = kept_total
                new_offset = kept_offset
                for nt in gl.static_range(NT):
                    if PAIR:
                        packed = ptx.pack_half2(weighted[0], zero)
                    else:
                        packed = ptx.pack_half2(weighted[2 * nt], weighted[2 * nt + 1])
                    p_fragments = p_fragments + (ptx.transpose8(packed),)
            if V_BIASED:
                kept_offset = ()
                for nt in gl.static_range(NT):
                    sums = ptx.mma((ones, ones, ones, ones), p_fragments[nt], p_fragments[NT + nt], (zero, zero, zero, zero))
                    for n in gl.static_range(NC // NT):
                        kept_offset = kept_offset + (new_offset[2 * nt + n] - sums[n] * middle,)
                new_offset = kept_offset
            if i % SPAN == 0:
                fresh = (zero,) * (4 * MT * NT)
            updated = ()
            for w in gl.static_range(VW):
                a, b = _unpack_values(v0[w], v1[w], V_CODE), _unpack_values(v2[w], v3[w], V_CODE)
                for k in gl.static_range(V_STEPS):
                    pairs = (a[k], a[V_STEPS + k], b[k], b[V_STEPS + k])
                    for nt in gl.static_range(NT):
                        held = fresh[4 * ((V_STEPS * w + k) * NT + nt) : 4 * ((V_STEPS * w + k) * NT + nt) + 4]
                        updated = updated + ptx.mma(pairs, p_fragments[nt], p_fragments[NT + nt], held)
            fresh = updated
            if i % SPAN == SPAN - 1:
                added = ()
                for m in gl.static_range(4 * MT * NT):
                    if PAIR and m % 2 == 1:  # columns of zero weights
                        added = added + (accumulator[m],)
                    elif i >= SPAN:
                        added = added + (accumulator[m] + fresh[m],)
                    elif PAIR:
                        added = added + (accumulator[m] * factors[0] + fresh[m],)
                    else:
                        added = added + (accumulator[m] * factors[m // 4 % NT * 2 + m % 2] + fresh[m],)
                accumulator = added
        total = new_total
        if V_BIASED:
            offset = new_offset

        ptx.warp_sync(lane)
        if j + STAGES < count:
            _start_tile(next_pages, here, barrier, kv, tile + STAGES, seq_len, block_stride, lane, T, BLOCK, KB, VB, MIXED)
            next_pages = _tile_pages(table, tile + STAGES + 1, seq_len, lane, T, BLOCK)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    memory._keep_alive()

    for n in gl.static_range(NC):
        s, z = total[n], offset[n]
        s += ptx.shuffle_xor(s, 4)
        s += ptx.shuffle_xor(s, 8)
        s += ptx.shuffle_xor(s, 16)
        z += ptx.shuffle_xor(z, 4)
        z += ptx.shuffle_xor(z, 8)
        z += ptx.shuffle_xor(z, 16)
        inverse = gl.where(s == 0.0, 0.0, 1.0 / s)
        if PAIR:
            column = t
        else:
            column = n // 2 * 8 + 2 * t + n % 2
        row = column // GROUP
        valid = (column < COLUMNS) & (row < query_len)
        index = (query_start + row) * (num_kv_heads * GROUP) + head * GROUP + column % GROUP
        index = (index * num_splits + split).to(gl.int64)
        address = partial.to(gl.int64) + (index * D + g * (D // 8)) * 4
        unit = _as_float(reference) * _unit(V_CODE) * inverse
        z = z * inverse
        out = ()
        for w in gl.static_range(VW):
            for half in gl.static_range(2):
                for k in gl.static_range(V_STEPS):
                    if PAIR:
                        value = accumulator[4 * (V_STEPS * w + k) + 2 * half]
                    else:
                        value = accumulator[4 * ((V_STEPS * w + k) * NT + n // 2) + 2 * half + n % 2]
                    out = out + (value * (unit * 0.0625 if V_CODE == UINT4 and k % 2 == 1 else unit) + z,)
        for i in gl.static_range(D // 32):
            ptx.store_global4(
                address, out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3], valid.to(gl.int32), 16 * i
            )
        gl.store(partial_lse + index, top[n] - _HEADROOM + gl.log2(s), mask=valid & (g == 0))


@gluon.jit(do_not_specialize=["window", "raw_window", "raw_sinks", "raw_ring", "raw_rows", "num_splits"])
def combine_kernel(
    partial, partial_lse, out, lse, query, raw_key, raw_value, seq_lens, query_start_loc, out_token_stride, out_head_stride,
    query_token_stride, query_head_stride, raw_seq_stride, raw_row_stride, raw_head_stride, gain, raw_factor, raw_gain,
    window, raw_window, raw_sinks, raw_ring, raw_rows, num_splits, HEADS: gl.constexpr, GROUP: gl.constexpr,
    QUERY_LEN: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, RAW: gl.constexpr,
    HALF: gl.constexpr, SIGNS: gl.constexpr, ROWS: gl.constexpr, LSE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Merge the splits of a row (RAW: after the row of its raw keys has been made, of a query of each of QUERY_LEN)."""
    WARPS: gl.constexpr = gl.num_warps()
    V: gl.constexpr = D // 32
    TILE: gl.constexpr = gl.BlockedLayout([1, V], [1, 32], [WARPS, 1], [1, 0])
    DIMS: gl.constexpr = gl.SliceLayout(0, TILE)
    ROW: gl.constexpr = gl.SliceLayout(1, TILE)
    row = gl.program_id(0)
    if RAW:
        # The decode kernel has waited for all that made these inputs before it let this one start.
        row = attend_raw(
            query, raw_key, raw_value, seq_lens, query_start_loc, partial, partial_lse, query_token_stride,
            query_head_stride, raw_seq_stride, raw_row_stride, raw_head_stride, raw_factor, raw_gain, window, raw_window,
            raw_sinks, raw_ring, raw_rows, HEADS, GROUP, QUERY_LEN, D, CAUSAL, WINDOW, HALF, SIGNS,
        )  # fmt: skip
        _block_barrier()
        if row < 0:
            return
    dim = gl.arange(0, D, DIMS)
    r = gl.arange(0, ROWS, ROW)
    top = gl.full([ROWS], _LOW, gl.float32, ROW)
    weight = gl.full([ROWS], 0.0, gl.float32, ROW)
    value = gl.full([ROWS, D], 0.0, gl.float32, TILE)
    if RAW:
        at = (raw_rows + row).to(gl.int64)
        raw_lse = gl.load(partial_lse + at + r * 0, mask=r == 0, other=float("-inf"))
        value = gl.load(
            partial + at * D + dim[None, :] + r[:, None] * 0, mask=(r == 0)[:, None] & (dim >= 0)[None, :], other=0.0
        )
        top = gl.maximum(raw_lse, top)
        weight = gl.exp2(raw_lse - top)
    if PDL:
        ptx.wait_for_dependency(r)
        ptx.launch_dependents(r)
    base = row.to(gl.int64) * num_splits
    # Every slot merges its own splits first: the loads of a step depend on nothing, and rows meet once, at the end.
    for first in range(0, num_splits, ROWS):
        inside = first + r < num_splits
        split_lse = gl.load(partial_lse + base + first + r, mask=inside, other=float("-inf"))
        rows = gl.load(
            partial + (base + first + r)[:, None] * D + dim[None, :], mask=inside[:, None] & (dim >= 0)[None, :], other=0.0
        )
        best = gl.maximum(top, split_lse)
        decay = gl.exp2(top - best)
        w = gl.exp2(split_lse - best)
        # A split that saw nothing has written no row.
        rows = gl.where((split_lse == float("-inf"))[:, None], 0.0, rows)
        weight = weight * decay + w
        value = value * decay[:, None] + rows * w[:, None]
        top = best
    best = gl.max(top, 0)
    scale = gl.exp2(top - best)
    total = gl.sum(weight * scale, 0)
    y = gl.sum(value * scale[:, None], 0) * gl.where(total == 0.0, 0.0, gain / total)
    if SIGNS:
        y = ptx.hadamard_in_lane(y, V)
        lane = dim // V
        for bit in gl.static_range(5):
            other = ptx.shuffle_xor(y, 1 << bit)
            y = gl.where((lane & (1 << bit)) != 0, other - y, other + y)
        negative = ((_sign_bits(dim, SIGNS, D) >> (dim & 31)) & 1) != 0
        y = gl.where(negative, -y, y)
    token, head = row // HEADS, row % HEADS
    gl.store(out + token.to(gl.int64) * out_token_stride + head * out_head_stride + dim, y.to(out.dtype.element_ty))
    if LSE:
        gl.store(lse + row, (best + gl.log2(total)) * 0.6931471805599453)
