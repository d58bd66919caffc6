"""TRL's GRPO with a real vLLM, on CPU: `python -m tests.vllm_cpu`."""
