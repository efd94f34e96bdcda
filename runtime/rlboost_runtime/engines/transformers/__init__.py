"""The transformers engine: continuous batching in a child process, on a CPU or a GPU.

Enter at `engine`. Made for tiny models and tests; `rlboost_runtime.engines.vllm` is the fast one.
"""
