# What needs a GPU, or takes long without one. The quick tests are `pytest`.
.PHONY: gpu-test gpu-sanitize gpu-bench compile-test

# Mostly compiling: one process a core.
gpu-test:
	python -m pytest -m gpu -q -n auto --dist worksteal

gpu-sanitize:
	for tool in memcheck racecheck initcheck; do \
	    compute-sanitizer --tool $$tool --error-exitcode 1 python tests/sanitize.py || exit 1; \
	done

gpu-bench:
	python benchmarks/gpu.py benchmarks/results/gpu-portable.json
	python benchmarks/host.py benchmarks/results/gpu-host.json

compile-test:
	python -m pytest tests/test_portable_compile.py -m "not gpu" -q
