"""Defines numbers that kernels share. Kernels use base 2: exp2 is one instruction, exp is two."""

LOG2E = 1.4426950408889634  # log2(e): natural log -> base 2
LN2 = 0.6931471805599453  # ln(2): base 2 -> natural log
GATE_FLOOR = -200.0  # base-2 log gate of one token: 2^-200 is 0 in fp32, and -inf becomes finite
CHUNK = 64  # tokens: the unit of the chunked algorithms
