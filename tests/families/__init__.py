"""Every model family against transformers and peft."""
