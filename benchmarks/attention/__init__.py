"""Shared prompts and vertical-slash masks: workloads, inputs, truth, and who computes them."""
