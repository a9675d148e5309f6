"""Decoding with the bits of the chunked form: a pool of anchors and tails."""
