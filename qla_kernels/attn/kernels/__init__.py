"""Kernels that belong to every attention family: module names."""

KERNELS = ("delta",)
