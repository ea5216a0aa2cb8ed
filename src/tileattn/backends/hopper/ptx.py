"""What Gluon has no word for, in PTX. Every function is one instruction or two, and none knows an address.

Named barriers clobber memory. LLVM would sink a load to where its value is used, be that behind the arrival that lets
another warp overwrite what is loaded.

Of the NAMED_BARRIERS Triton uses the first, see first_barrier.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Of a block. The assembler takes 16 for 0, which is Triton's, without a word; the kernel then dies as it runs.
NAMED_BARRIERS = gl.constexpr(16)


def first_barrier(partitions: int) -> int:
    """The first named barrier that is ours in a kernel of this many partitions; Triton's own come before."""
    return partitions + 1


@gluon.jit
def barrier_sync(barrier, THREADS: gl.constexpr):
    """Wait on a named barrier until THREADS threads have arrived, these included."""
    gl.inline_asm_elementwise(
        "bar.sync $1, $2; mov.u32 $0, 0;", "=r,r,n,~{memory}", [barrier, THREADS], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def barrier_arrive(barrier, THREADS: gl.constexpr, pred=True):
    """Arrive at a named barrier and go on."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p bar.arrive $1, $2; mov.u32 $0, 0; }",
        "=r,r,n,r,~{memory}",
        [barrier, THREADS, gl.where(pred, 1, 0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def declare_flag():
    """Once in a kernel, before any_reaches: its flag, a predicate of each thread.

    One of PTX because a Gluon tensor cannot leave its elements' threads without a detour through shared memory.
    """
    gl.inline_asm_elementwise(
        ".reg .pred tileattn_flag; setp.ne.u32 tileattn_flag, 0, 0; mov.u32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def any_reaches(x, LIMIT: gl.constexpr):
    """1 where any element of x that this warp holds is LIMIT or more, or NaN; else 0. The same in all its threads."""
    gl.inline_asm_elementwise(
        "setp.geu.or.f32 tileattn_flag, $1, $2, tileattn_flag; mov.u32 $0, 0;",
        "=r,f,f",
        [x, LIMIT],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; vote.sync.any.pred p, tileattn_flag, 0xffffffff; selp.u32 $0, 1, 0, p; "
        "setp.ne.u32 tileattn_flag, 0, 0; }",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _here(x):
    """x, which LLVM computes before this place and uses behind it."""
    if x.dtype == gl.float32:
        y = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)
    else:
        y = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return y


@gluon.jit
def boundary(x):
    """x, which the assembler, too, computes before this place and uses behind it.

    It moves no code across a loop. This one ends at once, for some thread is active.
    """
    x = _here(x)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; again: activemask.b32 t; setp.eq.u32 p, t, 0; @p bra again; mov.u32 $0, 0; }",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    return _here(x)


@gluon.jit
def narrow(x, dtype: gl.constexpr):
    """x, float32, in 16 bits. In PTX because LLVM would sink a truncation below the loop's edge and carry float32."""
    if dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        y = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
        )
    return y


@gluon.jit
def narrow_product(p, x, dtype: gl.constexpr):
    """p, of 16 bits, times x, float32, in 16 bits.

    bfloat16 is multiplied as such, which rounds x as well; float16, whose range x may leave, in float32. Not pure, or
    LLVM would widen p long before.
    """
    if dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; mul.rn.bf16x2 $0, $1, t; }",
            "=r,r,f,f",
            [p, x],
            dtype=gl.bfloat16,
            is_pure=False,
            pack=2,
        )
    else:
        y = gl.inline_asm_elementwise(
            "{ .reg .b16 a, b; .reg .f32 c, d; mov.b32 {a, b}, $1; cvt.f32.f16 c, a; cvt.f32.f16 d, b; "
            "mul.f32 c, c, $2; mul.f32 d, d, $3; cvt.rn.f16x2.f32 $0, d, c; }",
            "=r,r,f,f",
            [p, x],
            dtype=gl.float16,
            is_pure=False,
            pack=2,
        )
    return y


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def wait_for_turn(turn_ptr, turn):
    """Wait until the number in global memory is `turn`; what was added through TMA before it became so is there.

    The fence is of global memory alone, as in pass_turn: one of all memory compiles to a slow MEMBAR.ALL.GPU as well.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 v; again: ld.acquire.gpu.global.b32 v, [$1]; "
        "setp.ne.s32 p, v, $2; @p bra again; fence.proxy.async.global; mov.u32 $0, 0; }",
        "=r,l,r",
        [turn_ptr.to(gl.int64), turn],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def pass_turn(turn_ptr, turn, PENDING: gl.constexpr):
    """Wait until all that this warp stored or added through TMA is in global memory, but for the last PENDING, then set
    the number to `turn`."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group $3; fence.proxy.async.global; bar.warp.sync 0xffffffff; "
        "fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [$1], $2; mov.u32 $0, 0;",
        "=r,l,r,n",
        [turn_ptr.to(gl.int64), turn, PENDING],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def opaque(x):
    """x, of which the compiler knows nothing more than when it is computed."""
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)
