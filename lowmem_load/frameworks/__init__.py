"""PEFT and bitsandbytes, whose layers are inside of models: one module for each."""
