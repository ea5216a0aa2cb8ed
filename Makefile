# What needs a GPU, or takes long without one. The quick tests are `pytest`.
.PHONY: gpu-test gpu-sanitize gpu-bench compile-test pictures

# Mostly compiling: one process a core. Each test by name, so that a run that is cut off says what failed.
gpu-test:
	python -m pytest -m gpu -v -n auto --dist worksteal

# What is expected to be clean: docs/kernel-notes.md says what these tools report of the rest, and why.
gpu-sanitize:
	compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py
	compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize.py portable mods packed cache
	compute-sanitizer --tool initcheck --error-exitcode 1 python tests/sanitize.py portable mods packed cache

gpu-bench:
	python benchmarks/gpu.py benchmarks/results/gpu-portable.json
	python benchmarks/host.py benchmarks/results/gpu-host.json

compile-test:
	python -m pytest tests/test_portable_compile.py -m "not gpu" -q

# Of the results that are there; they need matplotlib and no GPU.
pictures:
	python benchmarks/plot.py docs/images/h200-hopper.png --causal benchmarks/results/h200-hopper-forward.json benchmarks/results/h200-hopper-backward.json
	python benchmarks/plot.py docs/images/h200-portable.png --causal benchmarks/results/h200-portable.json
