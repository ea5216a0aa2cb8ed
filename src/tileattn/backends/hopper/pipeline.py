"""Rings: blocks of shared memory that one warp fills through TMA and two warpgroups read, each in its turn.

Fill number i of a ring goes to block i % STAGES. Its bytes' landing is told by that block's mbarrier, whose phase turns
with every fill; that both readers are done with it, by a named barrier. (A Gluon arrival at an mbarrier stops all the
warps of its partition; an arrival at a named barrier stops none.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileattn.backends.hopper.gluon_names import aggregate, mbarrier, tma_load
from tileattn.backends.hopper.ptx import barrier_arrive, barrier_sync
from tileattn.backends.hopper.schedule import Work

READERS = gl.constexpr(2)
PARTIES = gl.constexpr(32 + 128 * 2)  # threads that meet at a named barrier: the filling warp and both warpgroups


@aggregate
class Ring:
    """blocks: [STAGES * parts, 1, rows, 1, head_dim], part c of fill i being block (i % STAGES) * parts + c."""

    blocks: gl.shared_memory_descriptor
    landed: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    PARTS: gl.constexpr
    EMPTIED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, blocks, landed, STAGES, PARTS, EMPTIED):
        self.blocks = blocks
        self.landed = landed
        self.STAGES = gl.constexpr(STAGES)
        self.PARTS = gl.constexpr(PARTS)
        self.EMPTIED = gl.constexpr(EMPTIED)

    @gluon.jit
    def acquire(self, i):
        """Filling warp: wait until block i % STAGES may be overwritten."""
        if i >= self.STAGES:
            barrier_sync(self.EMPTIED + i % self.STAGES, PARTIES)

    @gluon.jit
    def fill(self, i, desc, batch, row, head):
        """Filling warp: start to load fill i, PARTS blocks of rows, from (batch, row, head)."""
        stage = i % self.STAGES
        mbarrier.expect(self.landed.index(stage), desc.block_type.nbytes * self.PARTS)
        for c in gl.static_range(self.PARTS):
            part = self.blocks.index(stage * self.PARTS + c)
            tma_load(desc, [batch, row + c * desc.block_type.shape[1], head, 0], self.landed.index(stage), part)

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
    def block(self, i, part):
        """Reader: [rows, head_dim] of fill i."""
        block = self.blocks.index((i % self.STAGES) * self.PARTS + part)
        return block.reshape([block.shape[1], block.shape[3]])

    @gluon.jit
    def release(self, i, pred=True):
        """Reader: done with fill i."""
        barrier_arrive(self.EMPTIED + i % self.STAGES, PARTIES, pred)


@aggregate
class Queue:
    """Tiles on their way to the warpgroups: a ring of queries, and the Work that each fill belongs to.

    facts: [STAGES * 5, 1], int32, the five fields of each Work.
    """

    facts: gl.shared_memory_descriptor
    queries: Ring

    @gluon.constexpr_function
    def __init__(self, facts, queries):
        self.facts = facts
        self.queries = queries

    @gluon.jit
    def _put(self, i, FIELD: gl.constexpr, value):
        one_warp: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        self.facts.index(i % self.queries.STAGES * 5 + FIELD).store(gl.full([1], value, gl.int32, one_warp))

    @gluon.jit
    def _get(self, i, FIELD: gl.constexpr):
        one_warpgroup: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        return gl.max(self.facts.index(i % self.queries.STAGES * 5 + FIELD).load(one_warpgroup), 0)

    @gluon.jit
    def send(self, i, work, q_desc):
        """Filling warp: entry i."""
        self.queries.acquire(i)
        for field in gl.static_range(5):
            self._put(i, field, work[field])
        self.queries.fill(i, q_desc, work.batch, work.row, work.head)

    @gluon.jit
    def close(self, i):
        """Filling warp: entry i says that there is no further tile."""
        self.queries.acquire(i)
        for field in gl.static_range(5):
            self._put(i, field, 0)
        mbarrier.arrive(self.queries.landed.index(i % self.queries.STAGES), count=1)

    @gluon.jit
    def receive(self, i):
        """Reader: wait for entry i and return its Work."""
        self.queries.wait(i)
        return Work(self._get(i, 0), self._get(i, 1), self._get(i, 2), self._get(i, 3), self._get(i, 4))


@gluon.jit
def make_queue(q_desc, SLOTS: gl.constexpr, PARTS: gl.constexpr, EMPTIED: gl.constexpr):
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    facts = gl.allocate_shared_memory(gl.int32, [SLOTS * 5, 1], layout)
    return Queue(facts, make_ring(q_desc, SLOTS, PARTS, EMPTIED))


@gluon.jit
def make_ring(desc, STAGES: gl.constexpr, PARTS: gl.constexpr, EMPTIED: gl.constexpr):
    shape: gl.constexpr = [STAGES * PARTS, 1, desc.block_type.shape[1], 1, desc.block_type.shape[3]]
    blocks = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    landed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(landed.index(s), count=1)
    return Ring(blocks, landed, STAGES, PARTS, EMPTIED)
