"""The gated delta rule as an engine calls it: states in a pool, read and written in place."""
