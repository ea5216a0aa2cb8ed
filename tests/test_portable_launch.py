"""Launches that are kept and repeated: with the arguments, and by the kernel, that a fresh launch would have."""

import gc
import types
import weakref
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import triton
from oracle import ALL_DIMS, Case, build, wanted
from torch.utils._pytree import tree_leaves
from triton import language as tl
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from tileattn.backends import entry, portable
from tileattn.backends.portable import launch
from tileattn.problem import Problem

CASES = {
    "plain": {},
    "longer": {"seqlen_q": 200, "seqlen_k": 200},
    "bhsd": {"layout": "bhsd"},
    "sliced": {"layout": "sliced"},
    "no_queries": {"seqlen_q": 0},
    "float16": {"dtype": torch.float16},
    "modifiers": {"softcap": 3.0, "alibi": True, "sink": True, "dropout_p": 0.1, "window": (5, 0)},
    "bias": {"bias": ALL_DIMS, "mask": ALL_DIMS},
    "bias_of_keys": {"bias": (False, False, False, True), "mask": (True, False, False, True)},
    "varlen": {"lengths_q": (40, 0, 3), "lengths_k": (40, 7, 9)},
    "varlen_shorter": {"lengths_q": (30, 0, 3), "lengths_k": (40, 7, 9)},
    "mods": {"score_mod": "relative", "mask_mod": "documents"},
    "blocks": {"block_size": (32, 32)},
    "blocks_of_mod": {"block_size": (128, 128), "score_mod": "relative", "mask_mod": "lengths", "causal": True},
}


class Launches:
    """Stands in for Triton: notes what would be launched, and for which arguments a kernel would be compiled."""

    def __init__(self):
        self.seen, self.fresh = [], 0

    def start(self, kernel, call):
        self.fresh += 1
        compiled_for = [_specialised(arg) for arg in call.args]
        self.seen.append((kernel.__name__, call.programs, _addresses(call.args), compiled_for))
        return _Compiled(self, kernel.__name__, compiled_for)


class _Compiled:
    run = None

    def __init__(self, launches, name, compiled_for):
        self.launches, self.name, self.compiled_for = launches, name, compiled_for

    def __getitem__(self, grid):
        def run(*args):
            self.launches.seen.append((self.name, grid[0], _addresses(args), self.compiled_for))

        return run


def _addresses(args):
    """Arguments as the driver gets them; a null pointer is one."""
    if isinstance(args, (tuple, list)):
        return [_addresses(x) for x in args]
    if isinstance(args, tl.constexpr):
        return args.value
    if isinstance(args, TensorDescriptor):
        return [args.base.data_ptr(), args.shape, args.strides, args.block_shape]
    return args.data_ptr() if isinstance(args, torch.Tensor) else args


def _specialised(arg):
    """What Triton compiles for."""
    if isinstance(arg, tuple):
        return [_specialised(x) for x in arg]
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, int):
        return arg == 1, arg % 16 == 0, arg >= 2**31
    return arg.value if isinstance(arg, tl.constexpr) else type(arg)


def named(call, forward, gradients, seen):
    """Addresses in words: of inputs themselves, of results by name, of workspaces."""
    read = (*call.inputs, *call.inputs.score_mod_tensors, *call.inputs.mask_mod_tensors)
    names = {x.data_ptr(): x.data_ptr() for x in read if isinstance(x, torch.Tensor)}
    names |= {x.data_ptr(): x.data_ptr() for x in (call.dout, call.dlse)}
    results = forward._asdict() | gradients._asdict()
    for summed in ("dalibi_slopes", "dsink"):  # by torch: may lie where a workspace was
        del results[summed]
    names |= {x.data_ptr(): name for name, x in results.items() if x is not None}

    def of(x):
        if isinstance(x, list):
            return [of(y) for y in x]
        return names.get(x, "workspace") if isinstance(x, int) and x > 2**32 else x

    return [(name, programs, of(args), compiled_for) for name, programs, args, compiled_for in seen]


def run(call, launches):
    launches.seen.clear()
    alive, original = [], launch.Launches.launch

    def launch_and_keep(self, kernel, describe, *outputs, role=None):
        alive.append((self.tensors, outputs))  # else results may lie where a workspace was
        original(self, kernel, describe, *outputs, role=role)

    with mock.patch.object(launch.Launches, "launch", launch_and_keep):
        forward = portable.forward(call.problem, call.inputs)
        gradients = portable.backward(call.problem, call.inputs, forward, call.dout, call.dlse, wanted(call.inputs))
    return named(call, forward, gradients, launches.seen)


def calls():
    base = Case(seqlen_q=70, seqlen_k=90, dtype=torch.bfloat16)
    found = {name: build(base.but(**fields)) for name, fields in CASES.items()}
    unaligned = torch.zeros(2 * 70 * 2 * 32 + 1, dtype=torch.bfloat16)[1:].view(2, 70, 2, 32)
    problem, inputs, dout, _ = found["plain"]
    bias = found["bias"].inputs
    found["float32_bias"] = found["bias"]._replace(inputs=bias._replace(bias=bias.bias.float()))
    found["unaligned"] = found["plain"]._replace(inputs=inputs._replace(q=unaligned))
    found["unaligned_dout"] = found["plain"]._replace(dout=unaligned)
    problem, inputs = Problem.of(dout, dout, dout)
    found["one_tensor"] = found["plain"]._replace(problem=problem, inputs=inputs)
    k, v = torch.zeros_like(dout), torch.zeros_like(dout)
    found["three_like_it"] = found["one_tensor"]._replace(inputs=inputs._replace(k=k, v=v))
    return found


def test_nothing_of_a_call_outlives_it(monkeypatch):
    """Not until garbage is collected either: gradients of a long sequence are large."""
    launches, seen = Launches(), []

    def start(kernel, of):
        found = [x.base if isinstance(x, TensorDescriptor) else x for x in tree_leaves(of.args)]
        seen.extend(weakref.ref(x) for x in found if isinstance(x, torch.Tensor))
        return launches.start(kernel, of)

    monkeypatch.setattr(launch, "start", start)
    launch._kept.cache_clear()
    call = build(Case(seqlen_q=70, seqlen_k=90, dtype=torch.bfloat16))
    gc.disable()
    try:
        for _ in range(3):
            run(call, launches)
        assert len(seen) > 6
        assert not any(x() is not None for x in seen)
    finally:
        gc.enable()


def expect_repeats_as_fresh(every, run, launches, forget):
    """Calls by name: whatever came before, run(call, launches) gives what it gives once everything is forgotten, and
    calls that were seen twice need nothing from Triton."""
    fresh = {}
    for name, call in every.items():
        forget()
        fresh[name] = run(call, launches)
    for order in (list(every), list(reversed(every))):
        forget()
        for name in 2 * order:
            assert run(every[name], launches) == fresh[name], name
        launches.fresh = 0
        for name in order:
            run(every[name], launches)
        assert launches.fresh == 0


def test_repeated_launches_are_those_that_a_fresh_one_would_be(monkeypatch):
    launches = Launches()
    monkeypatch.setattr(launch, "start", launches.start)
    monkeypatch.setattr(portable.tuning, "table_for", lambda device, dtype: portable.tuning.HOPPER)
    portable.tuning._lookup.cache_clear()
    expect_repeats_as_fresh(calls(), run, launches, launch._kept.cache_clear)
    portable.tuning._lookup.cache_clear()


@pytest.mark.parametrize(
    ("switch", "tf32"),
    [("fp32_precision", "tf32"), ("fp32_precision", "ieee"), ("allow_tf32", True), ("allow_tf32", False)],
)
def test_products_of_float32_have_the_precision_that_torch_was_told(switch, tf32):
    problem, matmul = build(Case()).problem, torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        setattr(matmul, switch, tf32)
        assert launch._precision(problem) == ("tf32" if tf32 in (True, "tf32") else "ieee")
    finally:
        matmul.fp32_precision = before


class Greedy:
    """A kernel that finds shared memory for so many stages."""

    def __init__(self, stages):
        self.stages = stages

    def __getitem__(self, programs):
        return self.run

    def run(self, *_, num_stages, **__):
        if num_stages > self.stages:
            error = OutOfResources(237568, 232448, "shared memory")  # named, as Triton does: they keep each other
            raise error
        return num_stages


def test_fewer_stages_where_shared_memory_runs_out():
    too_much = launch.Launch(1, portable.tuning.Tile(128, 64, 8, 3), ())
    assert [launch.start(Greedy(stages), too_much) for stages in (3, 2, 1)] == [3, 2, 1]
    with pytest.raises(OutOfResources):
        launch.start(Greedy(0), too_much)


def test_a_launch_with_fewer_stages_keeps_nothing():
    def call(x):
        launch.start(Greedy(1), launch.Launch(1, portable.tuning.Tile(128, 64, 8, 3), (x,)))

    gc.disable()
    try:
        x = torch.empty(1)
        kept = weakref.ref(x)
        call(x)
        del x
        assert kept() is None
    finally:
        gc.enable()


def test_a_launcher_with_other_names_inside_is_left_to_triton(monkeypatch):
    def renamed(enter):
        return lambda *args: enter(*args)

    class CudaLauncher:
        launch = staticmethod(renamed(print))

    monkeypatch.setattr(triton, "__version__", "3.6.9")
    assert entry.entry_of(types.SimpleNamespace(run=CudaLauncher()), 1) is None
