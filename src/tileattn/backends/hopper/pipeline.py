"""Rings: blocks of shared memory that one warp fills through TMA and the warpgroups read, each in its turn.

Fill number i of a ring goes to block i % STAGES. Its bytes' landing is told by that block's mbarrier, whose phase turns
with every fill; that all readers are done with it, by a named barrier. (A Gluon arrival at an mbarrier stops all the
warps of its partition; an arrival at a named barrier stops none.)

An Outbox goes the other way: one block that a warpgroup fills and a warp carries to global memory.
"""
# ruff: noqa: RET505 (a return under a constexpr condition needs its else)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileattn.backends.hopper.gluon_names import aggregate, fence_async_shared, mbarrier, store_wait, tma_load
from tileattn.backends.hopper.ptx import barrier_arrive, barrier_sync
from tileattn.backends.hopper.schedule import Work, coordinates

WARP = gl.constexpr(32)
WARPGROUP_THREADS = gl.constexpr(128)
WARPGROUPS = gl.constexpr(2 * 128)  # the threads of both, where there are two


@aggregate
class Ring:
    """blocks: those of a descriptor, ROW_PARTS * COLUMN_PARTS for each of STAGES fills, column by column.

    READERS: threads that read, all of whom release.
    """

    blocks: gl.shared_memory_descriptor
    landed: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    ROW_PARTS: gl.constexpr
    COLUMN_PARTS: gl.constexpr
    EMPTIED: gl.constexpr
    READERS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, blocks, landed, STAGES, ROW_PARTS, COLUMN_PARTS, EMPTIED, READERS):
        self.blocks = blocks
        self.landed = landed
        self.STAGES = gl.constexpr(STAGES)
        self.ROW_PARTS = gl.constexpr(ROW_PARTS)
        self.COLUMN_PARTS = gl.constexpr(COLUMN_PARTS)
        self.EMPTIED = gl.constexpr(EMPTIED)
        self.READERS = gl.constexpr(READERS)

    @gluon.jit
    def _part(self, i, row_part, column_part):
        return self.blocks.index(((i % self.STAGES) * self.ROW_PARTS + row_part) * self.COLUMN_PARTS + column_part)

    @gluon.jit
    def acquire(self, i):
        """Filling warp: wait until block i % STAGES may be overwritten."""
        if i >= self.STAGES:
            barrier_sync(self.EMPTIED + i % self.STAGES, WARP + self.READERS)

    @gluon.jit
    def fill(self, i, desc, batch, first, row, length, head, mode, MORE: gl.constexpr = 0):
        """Filling warp: start to load fill i, from `row` on of the sequence that has `length` rows.

        MORE: bytes that the caller loads onto the same mbarrier.
        """
        ROWS: gl.constexpr = desc.block_type.shape[-3]
        COLUMNS: gl.constexpr = desc.block_type.shape[-1]
        landed = self.landed.index(i % self.STAGES)
        mbarrier.expect(landed, desc.block_type.nbytes * self.ROW_PARTS * self.COLUMN_PARTS + MORE)
        for r in gl.static_range(self.ROW_PARTS):
            for c in gl.static_range(self.COLUMN_PARTS):
                at = coordinates(batch, first, row + r * ROWS, length, head, c * COLUMNS, ROWS, mode)
                tma_load(desc, at, landed, self._part(i, r, c))

    @gluon.jit
    def drain(self, i):
        """Filling warp, at the end: wait for the release of all i fills, so that every barrier ends as it began."""
        for s in gl.static_range(self.STAGES):
            self.acquire(i + s)

    @gluon.jit
    def wait(self, i, pred=True):
        """Reader: wait until fill i has landed."""
        mbarrier.wait(self.landed.index(i % self.STAGES), (i // self.STAGES) & 1, pred=pred)

    @gluon.jit
    def block(self, i, row_part, column_part):
        """Reader: a part of fill i, [rows, columns]; rows of several heads take turns."""
        block = self._part(i, row_part, column_part)
        return block.reshape([block.shape[-3] * block.shape[-2], block.shape[-1]])

    @gluon.jit
    def release(self, i, pred=True):
        """Reader: done with fill i."""
        barrier_arrive(self.EMPTIED + i % self.STAGES, WARP + self.READERS, pred)


@aggregate
class Queue:
    """Tiles on their way to the warpgroups: a ring of queries, and the Work that each fill belongs to.

    facts: [STAGES * FACTS, 1], int32, the first fields of each Work, those that are not the same for all.
    """

    facts: gl.shared_memory_descriptor
    queries: Ring
    FACTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, facts, queries, FACTS):
        self.facts = facts
        self.queries = queries
        self.FACTS = gl.constexpr(FACTS)

    @gluon.jit
    def _put(self, i, FIELD: gl.constexpr, value):
        one_warp: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        self.facts.index(i % self.queries.STAGES * self.FACTS + FIELD).store(gl.full([1], value, gl.int32, one_warp))

    @gluon.jit
    def _get(self, i, FIELD: gl.constexpr):
        same_in_all: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        return gl.max(self.facts.index(i % self.queries.STAGES * self.FACTS + FIELD).load(same_in_all), 0)

    @gluon.jit
    def post(self, i, work):
        """Filling warp: the Work of entry i, whose fill of the ring comes next."""
        self.queries.acquire(i)
        for field in gl.static_range(self.FACTS):
            self._put(i, field, work[field])

    @gluon.jit
    def send(self, i, work, q_desc, mode):
        """Filling warp: entry i."""
        self.post(i, work)
        self.queries.fill(i, q_desc, work.batch, work.first_q, work.row, work.seqlen_q, work.head, mode)

    @gluon.jit
    def close(self, i):
        """Filling warp: entry i says that there is no further tile."""
        self.queries.acquire(i)
        for field in gl.static_range(self.FACTS):
            self._put(i, field, 0)
        mbarrier.arrive(self.queries.landed.index(i % self.queries.STAGES), count=1)

    @gluon.jit
    def receive(self, i, grid):
        """Reader: wait for entry i and return its Work."""
        self.queries.wait(i)
        if self.FACTS == 9:
            return Work(self._get(i, 0), self._get(i, 1), self._get(i, 2), self._get(i, 3), self._get(i, 4),
                        self._get(i, 5), self._get(i, 6), self._get(i, 7), self._get(i, 8))  # fmt: skip
        else:
            return Work(self._get(i, 0), self._get(i, 1), self._get(i, 2), self._get(i, 3), self._get(i, 4),
                        grid.seqlen_q, grid.seqlen_k, 0, 0)  # fmt: skip


@aggregate
class Outbox:
    """Payload number i on its way from a warpgroup to global memory, carried by one warp, or several in turn.

    lent: memory of another owner for a payload's second part; else block is there for both, one after the other.
    """

    block: gl.shared_memory_descriptor
    lent: gl.shared_memory_descriptor
    taken: gl.shared_memory_descriptor
    FILLED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, block, lent, taken, FILLED):
        self.block = block
        self.lent = lent
        self.taken = taken
        self.FILLED = gl.constexpr(FILLED)

    @gluon.jit
    def wait(self, i):
        """Wait until the payload before has left: for the warpgroup, and whoever lent memory for it."""
        mbarrier.wait(self.taken.index(0), (i & 1) ^ 1)

    @gluon.jit
    def part(self, n: gl.constexpr):
        if n == 0:
            return self.block
        else:
            return self.lent

    @gluon.jit
    def send(self):
        """Warpgroup: the block is filled."""
        fence_async_shared()
        barrier_arrive(self.FILLED, WARP + WARPGROUP_THREADS)

    @gluon.jit
    def receive(self):
        """Carrier: wait for a payload, no other warp beside it."""
        barrier_sync(self.FILLED, WARP + WARPGROUP_THREADS)

    @gluon.jit
    def release(self):
        """Carrier: the payload, stored through TMA, has been read."""
        store_wait(0)
        mbarrier.arrive(self.taken.index(0), count=1)


@gluon.jit
def make_queue(ring, mode):
    FACTS: gl.constexpr = 9 if mode.VARLEN else 5
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Queue(gl.allocate_shared_memory(gl.int32, [ring.STAGES * FACTS, 1], layout), ring, FACTS)


@gluon.jit
def make_ring(
    desc,
    STAGES: gl.constexpr,
    ROW_PARTS: gl.constexpr,
    COLUMN_PARTS: gl.constexpr,
    EMPTIED: gl.constexpr,
    READERS: gl.constexpr = WARPGROUPS,
):
    parts: gl.constexpr = ROW_PARTS * COLUMN_PARTS
    shape: gl.constexpr = [STAGES * parts] + desc.block_type.shape  # noqa: RUF005  (Triton cannot unpack)
    blocks = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    landed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(landed.index(s), count=1)
    return Ring(blocks, landed, STAGES, ROW_PARTS, COLUMN_PARTS, EMPTIED, READERS)


@gluon.jit
def make_outbox(desc, FILLED: gl.constexpr, lent=None):
    block = gl.allocate_shared_memory(desc.dtype, desc.block_type.shape, desc.layout)
    taken = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(taken.index(0), count=1)
    if lent is None:
        lent = block
    return Outbox(block, lent, taken, FILLED)
