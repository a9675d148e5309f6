"""The gated delta rule over sequences that are cut over ranks (cp_context), on CPU and CUDA."""
