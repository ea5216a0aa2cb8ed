"""`tileattn tune` and files of tiles, with made-up times: the search itself needs a GPU (test_portable_gpu.py)."""

import json
from typing import get_args

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from tileattn.backends.portable import launch, search, tuned, tuning
from tileattn.backends.portable.launch import Launch
from tileattn.backends.portable.search import Size, Trial
from tileattn.backends.portable.tuned import Entry
from tileattn.backends.portable.tuning import Tile
from tileattn.cli import main

GPU = torch.device("cuda", 0)
SMALL, LARGE, OTHER = Tile(32, 32, 4, 2), Tile(64, 64, 4, 2), Tile(64, 128, 8, 1, True, ranges=False)


@pytest.fixture
def gpu(monkeypatch):
    """One that PyTorch knows by name, and that times trials as `times` says, in ms."""

    class Properties:
        shared_memory_per_block = 64 * 1024

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(search, "compile_trial", lambda trial, dtype: None)
    monkeypatch.setattr(search, "check_trial", lambda trial, dtype: None)
    tuning._lookup.cache_clear()
    yield monkeypatch
    tuning._lookup.cache_clear()


def timing(ms_of):
    """time_trials with times by trial and size."""

    def time_trials(trials, size, dtype, step):
        for _ in trials:
            step("timing")
        return {trial: ms_of(trial, size) for trial in trials}

    return time_trials


def found(gpu, trials, ms_of):
    gpu.setattr(search, "time_trials", timing(ms_of))
    return search.search(trials, torch.bfloat16, 1)


def chosen(gpu, trials, ms_of, in_use=SMALL):
    best = search.best(found(gpu, trials, ms_of), torch.bfloat16, lambda kernel, head_dim: in_use)
    return {entry.kernel: (entry.tile, gain) for entry, gain in best}


def test_the_fastest_over_all_sizes_wins(gpu):
    def ms_of(trial, size):
        if trial.tile == SMALL:
            return 1.2
        return 2.4 if size == Size(1024, False) else 1.0

    trials = [Trial("forward", 64, tile) for tile in (SMALL, LARGE)]
    assert chosen(gpu, trials, ms_of) == {"forward": (LARGE, pytest.approx(1.2 / 2.4 ** (1 / 6)))}


@pytest.mark.parametrize(("together", "expected"), [(3.0, SMALL), (5.0, LARGE._replace(dv=OTHER))])
def test_dk_and_dv_come_from_two_launches_where_these_are_faster_than_one(together, expected, gpu):
    times = {("backward_kv", SMALL): together, ("backward_k", LARGE): 2.5, ("backward_v", OTHER): 1.5}
    times |= {("backward_k", OTHER): 2.6, ("backward_v", LARGE): 1.6}
    trials = [Trial(work, 64, tile) for work, tile in times]
    tile, gain = chosen(gpu, trials, lambda trial, _: times[trial.work, trial.tile])["backward_kv"]
    assert tile == expected
    assert gain == pytest.approx(together / min(together, 4.0))


def test_what_falls_behind_is_timed_at_few_sizes_and_never_chosen(gpu):
    slow = {search.SIZES[0]: 3.0, search.SIZES[1]: 9.0}
    trials = [Trial("forward", 64, tile) for tile in (SMALL, LARGE, OTHER)]
    gpu.setattr(search, "time_trials", timing(lambda trial, size: 2.0 if trial.tile == SMALL else slow.get(size, 0.1)))
    steps = []
    results = search.search(trials, torch.bfloat16, 1, lambda label, worth=1: steps.append(worth))
    assert {t.trial.tile: len(t.ms) for t in results} == {SMALL: len(search.SIZES), LARGE: 1, OTHER: 1}
    assert sum(steps) == search.steps(trials)
    [(entry, gain)] = search.best(results, torch.bfloat16, lambda kernel, head_dim: LARGE)
    assert (entry.tile, gain) == (SMALL, pytest.approx(1.5))


def test_faulty_trials_are_reported_and_never_chosen(gpu):
    gpu.setattr(search, "compile_trial", lambda trial, dtype: "OutOfResources" if trial.tile == LARGE else None)
    gpu.setattr(search, "check_trial", lambda trial, dtype: "error 1e+00" if trial.tile == OTHER else None)
    trials = [Trial("forward", 64, tile) for tile in (SMALL, LARGE, OTHER)]
    faults = {t.trial.tile: t.fault for t in found(gpu, trials, lambda *_: 1.0)}
    assert faults == {SMALL: None, LARGE: "OutOfResources", OTHER: "error 1e+00"}
    assert chosen(gpu, trials, lambda *_: 1.0) == {"forward": (SMALL, 1.0)}


@pytest.mark.parametrize("work", get_args(search.Work))
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("shared", [64 * 1024, 99 * 1024, 227 * 1024])
def test_candidates_fit_the_chip_and_are_few(work, head_dim, shared):
    tiles = list(search.candidates(work, head_dim, 2, shared, False))
    assert 5 <= len(tiles) == len(set(tiles)) <= 120
    assert all(2 * head_dim * (t.block_m + t.block_n) <= shared for t in tiles)


def test_trials_begin_with_the_tiles_in_use(gpu):
    trials = search.trials_for([64], torch.bfloat16, GPU)
    for work, kernel in (("forward", "forward"), ("backward_kv", "backward_kv"), ("backward_q", "backward_q")):
        first = next(trial for trial in trials if trial.work == work)
        assert first.tile == tuning.DEFAULT[kernel][64]


def test_tune_writes_a_file_that_lookups_then_use(gpu, tmp_path, capsys):
    path = tmp_path / "tiles.json"
    gpu.setattr(search, "time_trials", timing(lambda trial, _: 1.0 if trial.tile.block_m == 64 else 2.0))
    assert main(["tune", "--head-dims", "64", "--out", str(path), "--workers", "1"]) == 0
    assert f"TILEATTN_TILES={path}" in capsys.readouterr().out
    tiles = {e["kernel"]: e["tile"]["block_m"] for e in json.loads(path.read_text())["tiles"]}
    assert tiles == {"forward": 64, "backward_kv": 64, "backward_q": 64}

    before = {d: tuning._lookup(GPU, torch.float16, d, "backward_kv") for d in (64, 128)}
    gpu.setenv("TILEATTN_TILES", str(path))
    tuning._lookup.cache_clear()
    assert tuning._lookup(GPU, torch.float16, 64, "backward_kv").block_m == 64 != before[64].block_m
    assert tuning._lookup(GPU, torch.float16, 128, "backward_kv") == before[128]
    assert tuning._lookup(GPU, torch.float32, 64, "backward_kv") == tuning.FLOAT32["backward_kv"][64]


def test_tune_searches_for_the_kernels_that_it_is_told(gpu, tmp_path):
    path = tmp_path / "tiles.json"
    gpu.setattr(search, "time_trials", timing(lambda trial, _: 1.0))
    kernels = ["backward_kv", "forward"]
    assert main(["tune", "--head-dims", "64", "--kernels", *kernels, "--out", str(path), "--workers", "1"]) == 0
    assert {entry["kernel"] for entry in json.loads(path.read_text())["tiles"]} == {*kernels}


def test_a_file_of_another_gpu_changes_nothing(gpu, tmp_path):
    path = tmp_path / "tiles.json"
    tuned.write(path, "Another GPU", {}, [Entry("forward", "bfloat16", 64, OTHER)])
    gpu.setenv("TILEATTN_TILES", str(path))
    assert tuning._lookup(GPU, torch.bfloat16, 64, "forward") == tuning.DEFAULT["forward"][64]


def test_files_keep_every_field(tmp_path):
    entries = [
        Entry("forward", "bfloat16", 64, Tile(64, 128, 4, 2, True, 128)),
        Entry("backward_kv", "float16", 256, OTHER._replace(dv=SMALL)),
        Entry("backward_q", "float32", 96, SMALL),
    ]
    path = tmp_path / "tiles.json"
    tuned.write(path, "Some GPU", {"torch": "2"}, entries)
    read = tuned.read(path)
    assert read.device == "Some GPU"
    assert read.tables == {
        "bfloat16": {"forward": {64: entries[0].tile}},
        "float16": {"backward_kv": {256: entries[1].tile}},
        "float32": {"backward_q": {96: SMALL}},
    }


def test_a_tile_serves_its_own_dtype_before_the_other_of_16_bits():
    tables = {"bfloat16": {"forward": {64: SMALL, 128: SMALL}}, "float16": {"forward": {64: LARGE}}}
    read = tuned.Tuned("Some GPU", tables)
    assert read.table_for("bfloat16") == {"forward": {64: SMALL, 128: SMALL}}
    assert read.table_for("float16") == {"forward": {64: LARGE, 128: SMALL}}
    assert read.table_for("float32") == {}


GOOD = {"kernel": "forward", "dtype": "bfloat16", "head_dim": 64, "tile": SMALL._asdict()}


def with_tile(**fields):
    return {**GOOD, "tile": {**GOOD["tile"], **fields}}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("tiles", "not JSON"),
        ([], "the file=[]: must be an object"),
        ({"device": "Some GPU"}, "the file lacks tiles"),
        ({"device": "Some GPU", "tiles": {}}, "tiles={}: must be an array"),
        (
            [{**GOOD, "kernel": "sideways"}],
            "tiles[0].kernel='sideways': must be one of forward, backward_kv, backward_q",
        ),
        ([GOOD, {**GOOD, "dtype": "int8"}], "tiles[1].dtype='int8': must be one of bfloat16, float16, float32"),
        ([{**GOOD, "head_dim": 0}], "tiles[0].head_dim=0: must be a whole number from 1 to 1024"),
        ([with_tile(block_m=48)], "tiles[0].tile.block_m=48: must be a power of two"),
        ([with_tile(block_n=512)], "tiles[0].tile.block_n=512: must be a whole number from 16 to 128"),
        ([with_tile(num_warps=True)], "tiles[0].tile.num_warps=True: must be a whole number from 1 to 16"),
        ([with_tile(descriptors=1)], "tiles[0].tile.descriptors=1: must be true or false"),
        ([with_tile(colour="red")], "tiles[0].tile has unknown colour"),
        ([with_tile(dv=SMALL._asdict())], "tiles[0].tile.dv: only a tile of backward_kv has one"),
    ],
)
def test_files_that_are_wrong_are_refused_in_a_sentence_that_says_where(content, words, gpu, tmp_path):
    path = tmp_path / "tiles.json"
    if content is not None:
        entries = isinstance(content, list) and content
        whole = {"device": "Some GPU", "tiles": content} if entries else content
        path.write_text(whole if isinstance(whole, str) else json.dumps(whole))
    gpu.setenv("TILEATTN_TILES", str(path))
    with pytest.raises(ValueError) as error:
        tuning._lookup(GPU, torch.bfloat16, 64, "forward")
    assert str(error.value).startswith(f"TILEATTN_TILES={path}: ")
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "needs a GPU"),
        (["--out", "no/such/folder/tiles.json"], "no/such/folder is not a directory"),
        (["--out", "."], "or . is one"),
        (["--head-dims", "64", "2048"], "--head-dims 2048: the kernels serve head dims up to 1024"),
    ],
)
def test_tune_says_what_it_lacks(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(arguments))
    assert main(["tune", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_tile_without_room_for_its_stages_is_faulty(monkeypatch):
    """Though calls that users make have fewer."""

    def run(num_stages, **_):
        if num_stages > 2:
            raise OutOfResources(237568, 232448, "shared memory")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        search, "_small", lambda trial, *_: lambda: launch.start({(1,): run}, Launch(1, trial.tile, ()))
    )
    fault_of = {n: search.compile_trial(Trial("forward", 64, Tile(128, 64, 8, n)), torch.bfloat16) for n in (2, 3)}
    assert fault_of[2] is None
    assert "OutOfResources" in fault_of[3]
