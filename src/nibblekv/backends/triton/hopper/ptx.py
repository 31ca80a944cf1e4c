"""The few PTX instructions that the decode kernel is made of, as functions of one 32-bit register per lane.

Every tensor here has one element per thread: the kernel is written per lane, and Gluon is its typed assembler.
"""

# mypy: ignore-errors
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _load_asm(space, words, offset):
    regs = ", ".join(f"${i}" for i in range(words))
    vector = "" if words == 1 else f".v{words}"
    target = regs if words == 1 else "{" + regs + "}"
    return f"ld.{space}{vector}.b32 {target}, [${words} + {offset}];"


@gluon.jit
def load_shared(address, OFFSET: gl.constexpr, WORDS: gl.constexpr):
    """Return WORDS (1, 2 or 4) int32 registers from shared memory; volatile: the ring's bytes change."""
    if WORDS == 1:
        return (
            gl.inline_asm_elementwise(
                _load_asm("shared", 1, OFFSET), "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1
            ),
        )
    elif WORDS == 2:
        return gl.inline_asm_elementwise(
            _load_asm("shared", 2, OFFSET), "=r,=r,r", [address], dtype=(gl.int32, gl.int32), is_pure=False, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            _load_asm("shared", 4, OFFSET),
            "=r,=r,=r,=r,r",
            [address],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
            is_pure=False,
            pack=1,
        )


@gluon.jit
def load_global4(pointer, OFFSET: gl.constexpr):
    """Return four int32 registers from 16 aligned bytes of read-only global memory, in program order."""
    return gl.inline_asm_elementwise(
        _load_asm("global.nc", 4, OFFSET),
        "=r,=r,=r,=r,l",
        [pointer],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _store_asm(offset):
    return (
        f"{{ .reg .pred p; setp.ne.b32 p, $6, 0; @p st.global.v4.f32 [$1 + {offset}], {{$2, $3, $4, $5}}; mov.b32 $0, 0; }}"
    )


@gluon.jit
def store_global4(pointer, a, b, c, d, predicate, OFFSET: gl.constexpr):
    """Store four float32 registers to 16 aligned bytes of global memory where predicate is not 0."""
    gl.inline_asm_elementwise(
        _store_asm(OFFSET), "=r,l,f,f,f,f,r", [pointer, a, b, c, d, predicate], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _mma_asm(half):
    kind = "f16" if half else "bf16"
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )


@gluon.jit
def mma(a, b0, b1, c, HALF: gl.constexpr = True):
    """Return a 16 x 16 times 16 x 8 fp16 (HALF) or bf16 product plus c: four A registers, two of B, four accumulators."""
    return gl.inline_asm_elementwise(
        _mma_asm(HALF),
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def unpack_nibbles(word):
    """Split two halves into four pairs of fp16 subnormals, nibble i of both: n * 2^-24 (i = 0, 2), n * 2^-20 (1, 3)."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 h; and.b32 $0, $4, 0x000f000f; and.b32 $1, $4, 0x00f000f0; shr.u32 h, $4, 8; "
        "and.b32 $2, h, 0x000f000f; and.b32 $3, h, 0x00f000f0; }",
        "=r,=r,=r,=r,r",
        [word],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def pair_halves(a, b):
    """Return (low half of a, low half of b) and (high half of a, high half of b), each in one register, a's lowest."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;",
        "=r,=r,r,r",
        [a, b],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.constexpr_function
def _bytes_asm(count, prepare, floats):
    """Spread the pairs of bytes that `prepare` leaves in t and u over `count` registers, two bytes each, as fp16."""
    lines = [".reg .b32 t, u, v, w;", prepare]
    for i in range(count):
        source = "u" if count == 4 and i > 1 else "t"
        if floats:
            lines += [f"prmt.b32 v, {source}, 0, {0x3424 if i % 2 else 0x1404:#x};", "and.b32 w, v, 0x80008000;"]
            lines += ["shr.u32 v, v, 1;", "and.b32 v, v, 0x3f803f80;", f"or.b32 ${i}, v, w;"]
        else:
            lines.append(f"prmt.b32 ${i}, {source}, 0, {0x4342 if i % 2 else 0x4140:#x};")
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _word_bytes_asm(floats):
    return _bytes_asm(2, "mov.b32 t, $2;" if floats else "xor.b32 t, $2, 0x80808080;", floats)


@gluon.constexpr_function
def _pair_bytes_asm(floats):
    pairs = "prmt.b32 t, $4, $5, 0x5140; prmt.b32 u, $4, $5, 0x7362;"
    if not floats:
        pairs += " xor.b32 t, t, 0x80808080; xor.b32 u, u, 0x80808080;"
    return _bytes_asm(4, pairs, floats)


@gluon.jit
def unpack_bytes(word, FLOAT: gl.constexpr):
    """Split four 8-bit codes into two pairs of fp16: (code + 128) * 2^-24 of integers, value * 2^-8 of e4m3 (FLOAT).

    Every e4m3 becomes finite, so that bytes that were never written do no harm under a weight of 0.
    """
    return gl.inline_asm_elementwise(
        _word_bytes_asm(FLOAT), "=&r,=&r,r", [word], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def pair_bytes(a, b, FLOAT: gl.constexpr):
    """Return four pairs (code i of a, code i of b), as `unpack_bytes` gives codes."""
    return gl.inline_asm_elementwise(
        _pair_bytes_asm(FLOAT),
        "=&r,=&r,=&r,=&r,r,r",
        [a, b],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def pack_half2(low, high):
    """Round two float32 to fp16 and pack them."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _pack2_asm(half):
    return f"cvt.rn.{'f16x2' if half else 'bf16x2'}.f32 $0, $2, $1;"


@gluon.jit
def pack2(low, high, HALF: gl.constexpr):
    """Round two float32 to fp16 (HALF) or bf16 and pack them."""
    return gl.inline_asm_elementwise(_pack2_asm(HALF), "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def _add_nothing_asm(half):
    return f"{{ .reg .b32 z; mov.b32 z, 0; fma.rn.{'f16x2' if half else 'bf16x2'} $0, $1, z, $2; }}"


@gluon.jit
def add_nothing2(word, zeros, HALF: gl.constexpr):
    """Return zeros + 0 * word, two fp16 (HALF) or bf16 values: not 0 once a value was NaN or infinite."""
    return gl.inline_asm_elementwise(_add_nothing_asm(HALF), "=r,r,r", [word, zeros], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def transpose8(pair):
    """Transpose the warp's 8 x 8 matrix of 16-bit values: lane 4 r + c holds row r, columns 2 c and 2 c + 1."""
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [pair], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _shuffle_asm(mask):
    return f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, 0xffffffff;"


@gluon.jit
def shuffle_xor(x, MASK: gl.constexpr):
    """Return the float32 register of lane (this lane xor MASK)."""
    return gl.inline_asm_elementwise(_shuffle_asm(MASK), "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def warp_max_bits(x):
    """Return the largest int32 of the warp (0 and above), in every lane."""
    return gl.inline_asm_elementwise(
        "redux.sync.max.u32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def shared_base(lane):
    """Return the shared-memory address of the kernel's allocation, which must be its only one."""
    return gl.inline_asm_elementwise("mov.b32 $0, global_smem; // $1", "=r,r", [lane], dtype=gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def _barrier_init_asm(arrivals):
    return f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; @p mbarrier.init.shared::cta.b64 [$1], {arrivals}; mov.b32 $0, 0; }}"


@gluon.jit
def barrier_init(address, ARRIVALS: gl.constexpr, predicate):
    """Initialise an mbarrier in the lanes whose predicate is not 0."""
    gl.inline_asm_elementwise(
        _barrier_init_asm(ARRIVALS),
        "=r,r,r",
        [address, predicate],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def barrier_init_fence(lane):
    """Make initialised barriers visible to the copy engine and to the warp."""
    gl.inline_asm_elementwise(
        "fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff; mov.b32 $0, $1;",
        "=r,r",
        [lane],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def warp_sync(lane):
    """Order the warp's shared-memory reads before what its lanes do next."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def barrier_expect(address, size, predicate):
    """Arrive at an mbarrier and announce `size` bytes, in the lanes whose predicate is not 0."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2; mov.b32 $0, 0; }",
        "=r,r,r,r",
        [address, size, predicate],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def barrier_wait(address, parity):
    """Wait until the phase of this parity has completed."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; @!p bra WAIT; mov.b32 $0, 0; }",
        "=r,r,r",
        [address, parity],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def bulk_copy(target, source, size, barrier, predicate):
    """Start one copy of `size` bytes (a multiple of 16) from global to shared memory that completes on an mbarrier."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $5, 0; "
        "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$1], [$2], $3, [$4]; mov.b32 $0, 0; }",
        "=r,r,l,r,r,r",
        [target, source, size, barrier, predicate],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def broadcast_lane(x, source):
    """Return the float32 register of lane `source`."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=f,f,r", [x, source], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def round_half(x):
    """Round float32 to fp16 and back."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 h; cvt.rn.f16.f32 h, $1; cvt.f32.f16 $0, h; }", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _unpack2_asm(half):
    if half:
        return "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"
    return "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"


@gluon.jit
def unpack2(word, HALF: gl.constexpr):
    """Return the two float32 of a register with two fp16 (HALF) or bf16 values, the lower first."""
    return gl.inline_asm_elementwise(
        _unpack2_asm(HALF), "=f,=f,r", [word], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )


@gluon.constexpr_function
def _hadamard_asm(width):
    lines = [f".reg .f32 x<{width}>, y<{width}>;"] + [f"mov.f32 x{i}, ${width + i};" for i in range(width)]
    source, target, step = "x", "y", 1
    while step < width:
        for i in range(width):
            if i & step:
                lines.append(f"sub.f32 {target}{i}, {source}{i - step}, {source}{i};")
            else:
                lines.append(f"add.f32 {target}{i}, {source}{i}, {source}{i + step};")
        source, target, step = target, source, 2 * step
    lines += [f"mov.f32 ${i}, {source}{i};" for i in range(width)]
    return "{ " + " ".join(lines) + " }"


@gluon.jit
def hadamard_in_lane(x, WIDTH: gl.constexpr):
    """Transform the WIDTH consecutive float32 registers of each lane, in natural order, unnormalised."""
    return gl.inline_asm_elementwise(
        _hadamard_asm(WIDTH), _hadamard_constraints(WIDTH), [x], dtype=gl.float32, is_pure=True, pack=WIDTH
    )


@gluon.constexpr_function
def _hadamard_constraints(width):
    return ",".join(["=f"] * width + ["f"] * width)


@gluon.jit
def launch_dependents(lane):
    """Let the next kernel of the stream start where it was launched with programmatic dependence."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_dependency(lane):
    """Wait until the kernels before this one have completed and their writes are visible."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def divide(x, y):
    """Return x / y in float32, correctly rounded."""
    return gl.inline_asm_elementwise("div.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def floor_bits(x):
    """Return the bits of 2^23 + floor(x) as float32, for 0 <= x < 2^23: the low bits are the integer."""
    return gl.inline_asm_elementwise("add.rm.f32 $0, $1, 0f4B000000;", "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1)
