"""Launches of prebuilt kernels, on a stand-in for the driver: no GPU and no nvcc are needed."""
