"""LoRA adapters: reading, laying out, naming, and where they are."""
