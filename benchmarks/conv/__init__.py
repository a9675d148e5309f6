"""The causal convolution: workloads, inputs, truth, and who computes it."""
