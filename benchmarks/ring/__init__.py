"""Sparse and dense ring attention on several GPUs."""
