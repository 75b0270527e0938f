"""Runs PTX on the CPU, so that the CUDA kernels are tested where there is no GPU: slowly, and as strictly as can be."""
