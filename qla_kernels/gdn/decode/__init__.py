"""The token-by-token form for decoding: one kernel, which can update a pool of states in place."""
