"""What runs workloads, whoever computes them: processes, timing, judgement, records."""
