"""A block of a hybrid model over shared prompts: workloads, inputs, truth, and who computes it."""
