"""The token-by-token form, for decoding: one kernel, which updates states in place."""
