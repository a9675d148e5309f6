"""vLLM with and without our plug-in: right tokens, GPU time of its gated-delta layers, throughput.

    bash scripts/engine_check.sh             everything, on a GPU with vLLM 0.33.0
    python -m benchmarks.engine --help       parts of it

models.py       models with random weights, and prompts
worker.py       an engine in a process of its own, which takes commands
reference.py    log-probabilities of the same tokens by transformers in fp32
profile.py      GPU time of the layers' region, by kernel
scenarios.py    what runs in which engine
__main__.py     starts engines, compares them, prints tables, writes the record
"""
