"""What a load needs to know of each kind of model: transformers', PEFT's, diffusers' and any module."""
