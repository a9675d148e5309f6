"""The gated delta net: its workloads, inputs, truth, and who computes them."""
