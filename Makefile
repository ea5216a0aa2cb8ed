# What needs a GPU, or takes long without one. The quick tests are `pytest`.
.PHONY: gpu-test gpu-bench compile-test

# Mostly compiling: one process a core. With an empty Triton cache some minutes of all cores' time.
gpu-test:
	python -m pytest -m gpu -q -n auto --dist worksteal

gpu-bench:
	python benchmarks/gpu.py benchmarks/results/gpu-portable.json

compile-test:
	python -m pytest tests/test_portable_compile.py -m "not gpu" -q
